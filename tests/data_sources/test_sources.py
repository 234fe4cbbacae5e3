"""Conformance of every registered source, and what each kind must refuse."""

import csv
import gzip
import json
import os
import sys

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.sources._split import hash_fraction, split_tail

TEXTS = [f"Document {i}: äöü 漢字 🎉\nsecond line of {i}\n" * (1 + i % 3) for i in range(60)]


def make_text(folder):
    (folder / "deep").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        (folder / ("deep" if i % 2 else ".") / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    return {"name": "text", "path": str(folder)}


def make_jsonl(folder):
    folder.mkdir()
    for part in range(2):
        rows = [json.dumps({"text": t, "n": i}) for i, t in enumerate(TEXTS) if i % 2 == part]
        (folder / f"{part}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return {"name": "jsonl", "path": str(folder)}


def make_csv(folder):
    folder.mkdir()
    for part in range(2):
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "n"), *((t, i) for i, t in enumerate(TEXTS) if i % 2 == part)])
    return {"name": "csv", "path": str(folder)}


def make_parquet(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    pq.write_table(pa.table({"text": TEXTS, "n": list(range(len(TEXTS)))}), folder / "all.parquet", row_group_size=7)
    return {"name": "parquet", "path": str(folder / "all.parquet")}


def make_hf(folder):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder))
    return {"name": "hf", "path": str(folder)}


def make_chat(folder):
    folder.mkdir()
    rows = [json.dumps({"messages": [{"role": "assistant", "content": t}]}) for t in TEXTS]
    (folder / "all.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return {"name": "chat", "path": str(folder)}


def make_panda(folder):
    folder.mkdir()
    rows = [json.dumps({"inputs": f"question {i}", "targets": t}) for i, t in enumerate(TEXTS)]
    (folder / "all.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return {"name": "panda_llm", "path": str(folder)}


MAKERS = {
    "text": make_text,
    "jsonl": make_jsonl,
    "csv": make_csv,
    "parquet": make_parquet,
    "hf": make_hf,
    "chat": make_chat,
    "panda_llm": make_panda,
}
SOURCES = [m.name for m in registry.methods("source")]


@pytest.fixture(params=SOURCES)
def spec(request, tmp_path):
    if request.param in MAKERS:
        return MAKERS[request.param](tmp_path / "data")
    return {"name": request.param}


def build(spec, **more):
    return registry.build("source", {**spec, **more})


def docs(source, split="train", fraction=0.1):
    return list(source.documents(split, fraction))


def test_splits_are_disjoint_whole_and_repeatable(spec):
    train, held = docs(build(spec)), docs(build(spec), "validation")
    assert train and held
    ids = [d.id for d in train + held]
    assert len(set(ids)) == len(ids)
    assert [(d.id, d.text) for d in train] == [(d.id, d.text) for d in docs(build(spec))]
    both = {d.id: d.text for d in train + held}
    assert both == {d.id: d.text for d in docs(build(spec), fraction=0.0)}
    assert all(hash_fraction(d.id) < 0.1 for d in held) and all(hash_fraction(d.id) >= 0.1 for d in train)
    if spec["name"] == "panda_llm":  # its texts are prompt and answer
        assert sorted(both.values()) == sorted(f"question {i} {t}" for i, t in enumerate(TEXTS))
    elif spec["name"] in MAKERS:
        assert sorted(both.values()) == sorted(TEXTS)


def test_growing_validation_only_adds(spec):
    small = {d.id for d in docs(build(spec), "validation", 0.1)}
    large = {d.id for d in docs(build(spec), "validation", 0.4)}
    assert small < large


def test_fraction_zero_holds_nothing_out(spec):
    assert docs(build(spec), "validation", 0.0) == []


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5])
def test_fraction_out_of_range(spec, fraction):
    with pytest.raises(ConfigError, match="validation_fraction"):
        docs(build(spec), fraction=fraction)


def test_fingerprint_is_stable_and_ignores_weight(spec):
    assert build(spec).fingerprint() == build(spec, weight=2.0).fingerprint()


def test_config_round_trips_through_json(spec):
    config = build(spec)
    assert registry.build("source", json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_fingerprint_follows_files_and_settings(kind, tmp_path):
    spec = MAKERS[kind](tmp_path / "data")
    prints = {build(spec).fingerprint()}
    file = next(f.path for f in build(spec).files())
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    prints.add(build(spec).fingerprint())
    file.write_bytes(file.read_bytes() + b"\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    prints.add(build(spec).fingerprint())
    prints.add(build(spec, **({"separator": "x"} if kind == "text" else {"text_key": "n"})).fingerprint())
    if kind != "parquet":
        (tmp_path / "data" / f"new.{'txt' if kind == 'text' else 'jsonl'}").write_bytes(b"x")
        prints.add(build(spec).fingerprint())
    assert len(prints) == (4 if kind == "parquet" else 5)


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_files_read_as_plain(kind, suffix, tmp_path):
    spec = MAKERS[kind](tmp_path / "data")
    want = [d.text for d in docs(build(spec), fraction=0.0)]
    for file in build(spec).files():
        data = file.path.read_bytes()
        half = len(data) // 2  # two members, as `cat a.gz b.gz` makes
        pack = gzip.compress if suffix == ".gz" else zstandard.compress
        file.path.with_name(file.path.name + suffix).write_bytes(pack(data[:half]) + pack(data[half:]))
        file.path.unlink()
    assert [d.text for d in docs(build(spec), fraction=0.0)] == want


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_damaged_packed_file_is_named(suffix, damage, tmp_path):
    text = os.urandom(20_000).hex().encode()
    data = gzip.compress(text) if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(text)
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
    else:
        data = b"plain text\n"
    (tmp_path / f"a.txt{suffix}").write_bytes(data)
    with pytest.raises(DataError, match=f"a.txt{suffix}.*damaged or cut short"):
        docs(build({"name": "text", "path": str(tmp_path)}))


def test_zst_with_a_long_window_and_a_skippable_frame(tmp_path):
    text = ("a line of text\n" * 1000).encode()
    params = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"hello"
    packed = zstandard.ZstdCompressor(compression_params=params).compress(text)
    (tmp_path / "a.txt.zst").write_bytes(skippable + packed)
    assert [d.text for d in docs(build({"name": "text", "path": str(tmp_path)}), fraction=0.0)] == [text.decode()]


# --- where files are looked for


def test_globs_lists_and_folders(tmp_path):
    for name in ("a/x.txt", "a/sub/y.txt", "b/x.txt", "a/.hidden.txt", "a/z.png", ".git/h.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)

    def ids(path):
        return [d.id for d in docs(build({"name": "text", "path": path}), fraction=0.0)]

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert ids(a) == ["sub/y.txt", "x.txt"]
    assert ids([b, a]) == ["b/x.txt", "a/sub/y.txt", "a/x.txt"]
    assert ids(str(tmp_path / "**" / "*.txt")) == ["a/sub/y.txt", "a/x.txt", "b/x.txt"]
    assert ids([f"{a}/x.txt", f"{a}/*.txt", a]) == ["x.txt", "sub/y.txt"]
    assert ids(f"{b}/x.txt") == ["x.txt"]


def test_file_name_that_is_not_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("one\ntwo\n")
    source = build({"name": "text", "path": str(tmp_path)})
    assert len(source.fingerprint()) == 32
    assert [d.text for d in docs(source, "validation")] == ["two\n"]


def test_relative_and_path_like(tmp_path, monkeypatch):
    make_text(tmp_path / "data")
    absolute = [(d.id, d.text) for d in docs(build({"name": "text", "path": tmp_path / "data"}))]
    monkeypatch.chdir(tmp_path)
    assert [(d.id, d.text) for d in docs(build({"name": "text", "path": "data"}))] == absolute


def test_name_with_glob_characters(tmp_path):
    (tmp_path / "data[1].txt").write_text("literal")
    assert [d.text for d in docs(build({"name": "text", "path": str(tmp_path / "data[1].txt")}), fraction=0)] == [
        "literal"
    ]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "hf"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}/missing.txt", "does not exist"),
        ("{}/*.none", "no file matches"),
        ("{}", "holds no|is empty"),
        ([], "empty list"),
        ("", "empty string"),
    ],
)
def test_nothing_to_read(kind, path, message, tmp_path):
    path = path.format(tmp_path) if isinstance(path, str) else path
    source = build({"name": kind, "path": path})
    for call in (source.fingerprint, lambda: docs(source)):
        with pytest.raises(DataError, match=message):
            call()


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_files_without_text(kind, content, tmp_path):
    (tmp_path / f"a.{'txt' if kind == 'text' else kind}").write_text(content)
    for fraction in (0.0, 0.1):
        with pytest.raises(DataError, match="holds no text"):
            docs(build({"name": kind, "path": str(tmp_path)}), fraction=fraction)


def test_unreadable_file(tmp_path):
    (tmp_path / "a.txt").mkdir()
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"b\.txt"):
        docs(build({"name": "text", "path": str(tmp_path)}))


# --- validation


@pytest.mark.parametrize("kind", sorted(set(MAKERS) - {"chat", "panda_llm"}))  # these hold out a whole row
def test_small_corpora_hold_out_something(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", TEXTS[:3])
    spec = MAKERS[kind](tmp_path / "data")
    train, held = docs(build(spec), fraction=0.001), docs(build(spec), "validation", 0.001)
    assert len(held) == 1 and held[0].text.strip() and len(train) == 3
    assert held[0].id.endswith("#tail")
    whole = {d.id: d.text for d in train}
    whole[held[0].id.removesuffix("#tail")] += held[0].text
    assert sorted(whole.values()) == sorted(TEXTS)
    assert (train, held) == (docs(build(spec), fraction=0.001), docs(build(spec), "validation", 0.001))


def test_single_document_is_cut_at_a_line(tmp_path):
    lines = [f"line {i} of one book\n" for i in range(1000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    # A fraction that the only document's hash would fall below: it must still be trained on.
    for fraction in (0.01, 0.25, min(hash_fraction("book.txt") + 0.01, 0.99)):
        source = build({"name": "text", "path": str(tmp_path)})
        (train,), (held,) = docs(source, fraction=fraction), docs(source, "validation", fraction)
        assert train.text + held.text == "".join(lines)
        assert train.text.endswith("\n")
        assert len(held.text) == pytest.approx(fraction * len("".join(lines)), abs=25)


@given(st.text(st.characters(codec="utf-8"), max_size=80), st.integers(0, 100))
def test_split_tail_loses_nothing(text, wanted):
    head, tail = split_tail(text, wanted)
    assert head + tail == text
    assert not tail or (head.strip() and tail.strip())


@given(st.text())
def test_hash_fraction_range(doc_id):
    doc_id = doc_id.encode(errors="ignore").decode()
    assert 0 <= hash_fraction(doc_id) < 1


def test_hash_fraction_is_fixed():
    # Documents must not change sides between releases or machines.
    assert hash_fraction("a.txt") == pytest.approx(0.7853849123373798, abs=1e-12)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_validation_path(kind, tmp_path):
    spec = MAKERS[kind](tmp_path / "data")
    held_spec = MAKERS[kind](tmp_path / "data" / "held" if kind != "parquet" else tmp_path / "held")
    source = build(spec, validation_path=held_spec["path"])
    assert sorted(d.text for d in docs(source, "validation")) == sorted(TEXTS)
    assert sorted(d.text for d in docs(source)) == sorted(TEXTS)  # the nested folder is not in training
    assert source.fingerprint() != build(spec).fingerprint()
    with pytest.raises(DataError, match=r"none is left for training"):
        docs(build(spec, path=held_spec["path"], validation_path=held_spec["path"]))
    with pytest.raises(DataError, match=r"validation_path.*does not exist"):
        docs(build(spec, validation_path=str(tmp_path / "gone")), "validation")


def test_sources_pickle(spec):
    import pickle

    assert pickle.loads(pickle.dumps(build(spec))) == build(spec)
