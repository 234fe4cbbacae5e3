"""What each kind of source reads, and what it must refuse."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core import registry
from trainwright.core.errors import DataError

TEXTS = [f"Document {i}: äöü\nsecond line\n" for i in range(60)]


def build(spec, **more):
    return registry.build("source", {**spec, **more})


def docs(source, split="train", fraction=0.1):
    return list(source.documents(split, fraction))


# --- text


def text_source(tmp_path, data, **more):
    (tmp_path / "a.txt").write_bytes(data)
    return build({"name": "text", "path": str(tmp_path / "a.txt"), **more})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"good text\n" + b"\0\1\2", "a.txt.*NUL byte at byte offset 10"),
        (b"caf\xe9 au lait", "a.txt.*0xe9 at byte offset 3"),
        ("hello".encode("utf-16"), "a.txt.*looks like UTF-16"),
        (b"x" * (3 << 20) + b"\n\xff", f"a.txt.*0xff at byte offset {(3 << 20) + 1}"),
        (b"\x89PNG\r\n\x1a\n\0\0", "a.txt.*0x89 at byte offset 0"),
        (b"ok \xe2\x82", "a.txt.*0xe2 at byte offset 3"),
    ],
)
def test_binary_given_as_text(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        docs(text_source(tmp_path, data))


def test_separators(tmp_path):
    def texts(data, **more):
        return [d.text for d in docs(text_source(tmp_path, data.encode(), **more), fraction=0.0)]

    assert texts("one\n\ntwo\nlines\n \n\t\n\nthree\n", separator="blank_line") == ["one", "two\nlines", "three\n"]
    assert texts("a\r\n\r\nb", separator="blank_line") == ["a", "b"]
    assert texts("a<|end|>b\n\nc<|end|><|end|>", separator="<|end|>") == ["a", "b\n\nc"]
    assert texts("a.b.c", separator=".") == ["a", "b", "c"]
    assert texts("\ufeffa\r\nb") == ["a\r\nb"]


def test_separator_ids_and_empty_count(tmp_path):
    source = text_source(tmp_path, b"a||b|||| |c", separator="||")
    assert [d.id for d in docs(source, fraction=0.0)] == ["a.txt#0", "a.txt#1", "a.txt#3"]
    assert source.empty_documents == 1


@given(st.lists(st.text("ab\n é", max_size=9), max_size=12), st.integers(1, 30))
def test_cutting_is_lossless(pieces, limit):
    from trainwright.data.sources import text

    data = "--".join(pieces).encode()
    parts = list(text.cut_stream(io.BytesIO(data), None, limit))
    assert b"".join(p for _, p in parts) == data
    assert all(data[o : o + len(p)] == p for o, p in parts)
    assert all(len(p) <= limit for _, p in parts)
    if limit >= 4:
        for _, part in parts:
            part.decode()
    split = [p for _, p in text.cut_stream(io.BytesIO(data), re.compile(b"--"), 1 << 20)]
    assert split == [p.encode() for p in "--".join(pieces).split("--")][: len(split)]
    assert sum(map(len, split)) == len(data) - 2 * data.count(b"--")


def test_separator_across_read_blocks(tmp_path, monkeypatch):
    from trainwright.data.sources import text

    want = ["x" * n for n in (3, 7, 1, 12, 5, 8)]
    data = "\n\n\n".join(want).encode()
    for block in range(1, 12):
        monkeypatch.setattr(text, "BLOCK", block)
        assert [d.text for d in docs(text_source(tmp_path, data, separator="blank_line"), fraction=0.0)] == want


def test_long_files_are_cut_and_memory_is_bounded(tmp_path):
    line = "0123456789" * 9 + "\n"
    with (tmp_path / "big.txt").open("w") as handle:
        for _ in range(600):
            handle.write(line * 1000)
    script = (
        "import resource, sys\nfrom trainwright.core import registry\n"
        "s = registry.build('source', {'name': 'text', 'path': sys.argv[1]})\n"
        "list(s.documents('validation', 0.0)); base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "n = sum(len(d.text) for d in s.documents('train', 0.0))\n"
        "print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "big.txt")], capture_output=True, text=True, timeout=120
    )
    total, grown_kib = map(int, out.stdout.split())
    assert total == 600 * 1000 * len(line)
    assert grown_kib < 30_000


# --- rows


def jsonl_source(tmp_path, data, **more):
    (tmp_path / "a.jsonl").write_bytes(data if isinstance(data, bytes) else data.encode())
    return build({"name": "jsonl", "path": str(tmp_path / "a.jsonl"), **more})


GOOD = '{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a\.jsonl:3: malformed JSON: Unterminated string.*column 10"),
        ("{'text': 1}", r"a\.jsonl:3: malformed JSON"),
        ('{"content": "x", "id": 1}', r"a\.jsonl:3: no field 'text'; available fields: content, id"),
        ('{"Text": "x"}', r"a\.jsonl:3: no field 'text'.*did you mean 'Text'"),
        ('{"text": 5}', r"a\.jsonl:3: field 'text' is a number, not a string"),
        ('{"text": null}', r"a\.jsonl:3: field 'text' is null, not a string"),
        ('{"text": ["x"]}', r"a\.jsonl:3: field 'text' is a list"),
        ('"just a string"', r"a\.jsonl:3: expected an object.*got a string"),
        ('{"text": "half \\ud83d pair"}', r"a\.jsonl:3: text holds the lone surrogate U\+D83D at character 5"),
        ("[" * 100_000, r"a\.jsonl:3: malformed JSON: nested too deeply"),
    ],
)
def test_bad_rows(tmp_path, line, message):
    data = GOOD + "\n" + line + "\n" + GOOD
    with pytest.raises(DataError, match=message):
        docs(jsonl_source(tmp_path, data))
    source = jsonl_source(tmp_path, data, skip_bad_rows=True, max_bad_rows=0.5)
    assert [d.id for d in docs(source, fraction=0.0)] == ["a.jsonl:1", "a.jsonl:4"]
    assert source.bad_rows == 1


def test_jsonl_that_is_no_text(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8 text: byte 0xff at byte offset 27"):
        docs(jsonl_source(tmp_path, GOOD.encode() + b'{"text": "\xff"}\n'))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*one JSON array"):
        docs(jsonl_source(tmp_path, '[{"text": "x"},\n{"text": "y"}]'))


def test_jsonl_empty_rows_keys_and_last_line_without_end(tmp_path):
    source = jsonl_source(
        tmp_path,
        '\ufeff{"body": "a", "lang": "en"}\n{"body": ""}\n{"body": "\\ud83c\\udf89"}',
        text_key="body",
        meta_keys=["lang"],
    )
    got = docs(source, fraction=0.0)
    assert [(d.text, d.id, d.meta) for d in got] == [("a", "a.jsonl:1", {"lang": "en"}), ("🎉", "a.jsonl:3", {})]
    assert source.empty_documents == 1


def test_parquet_errors(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x", None], "n": [1, 2]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: no field 'text'; available fields: body, n"):
        docs(build({"name": "parquet", "path": path}))
    with pytest.raises(DataError, match="column 'n' holds int64, not strings"):
        docs(build({"name": "parquet", "path": path, "text_key": "n"}))
    with pytest.raises(DataError, match="row 1: field 'body' is null"):
        docs(build({"name": "parquet", "path": path, "text_key": "body"}))
    source = build({"name": "parquet", "path": path, "text_key": "body", "meta_keys": ["n"], "skip_bad_rows": True,
                    "max_bad_rows": 0.5})  # fmt: skip
    assert [(d.text, d.id, d.meta) for d in docs(source, fraction=0.0)] == [("x", "a.parquet:0", {"n": 1})]
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], b"no parquet", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.parquet: damaged or cut short, or not a parquet file"):
            docs(build({"name": "parquet", "path": path}))


def test_parquet_string_types(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, kind in [("large", pa.large_string()), ("dictionary", pa.dictionary(pa.int32(), pa.string()))]:
        pq.write_table(pa.table({"text": pa.array(["x", "y", "x"]).cast(kind)}), tmp_path / f"{name}.parquet")
        found = docs(build({"name": "parquet", "path": tmp_path / f"{name}.parquet"}), fraction=0.0)
        assert [d.text for d in found] == ["x", "y", "x"]


# --- hf


def test_hf_splits(tmp_path):
    import datasets

    both = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"text": TEXTS[:40]}),
            "test": datasets.Dataset.from_dict({"text": TEXTS[40:]}),
        }
    )
    both.save_to_disk(str(tmp_path / "saved"))
    spec = {"name": "hf", "path": str(tmp_path / "saved")}
    source = build(spec, validation_split="test")
    assert [d.text for d in docs(source)] == TEXTS[:40]
    assert [d.text for d in docs(source, "validation")] == TEXTS[40:]
    assert [d.id for d in docs(build(spec, split="test"), fraction=0.0)][:2] == ["test:0", "test:1"]
    with pytest.raises(DataError, match="no split 'dev'; its splits: train, test"):
        docs(build(spec, split="dev"))
    with pytest.raises(DataError, match="no field 'body'; available fields: text"):
        docs(build(spec, text_key="body"))


def test_hf_data_repository_and_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "repo" / "data"
    (tmp_path / "rows").mkdir()
    for part in range(2):
        (tmp_path / "rows" / f"{part}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS[part::2]))
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": t}) for t in TEXTS]
    (folder / "train-00000-of-00001.jsonl").write_text("\n".join(lines))
    assert [d.text for d in docs(build({"name": "hf", "path": str(tmp_path / "repo")}), fraction=0.0)] == TEXTS
    files = build({"name": "hf", "path": str(tmp_path / "rows" / "*.jsonl")})
    assert sorted(d.text for d in docs(files, fraction=0.0)) == sorted(TEXTS)
    (folder / "train-00000-of-00001.jsonl").write_text('{"text": "x"}\n{"text": \n')
    with pytest.raises(DataError, match="cannot be read"):
        docs(build({"name": "hf", "path": str(tmp_path / "repo")}), fraction=0.0)


def test_hf_hub_id_without_network(tmp_path, monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    source = build({"name": "hf", "path": "nobody/nothing-here"})
    with pytest.raises(DataError, match=r"nobody/nothing-here.*hub did not answer.*no route to host"):
        source.fingerprint()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    ref = tmp_path / "datasets--nobody--nothing-here" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    prints = []
    for commit in ("1" * 40, "2" * 40):
        ref.write_text(commit)
        prints.append(source.fingerprint())
    assert prints[0] != prints[1]


# --- python_stdlib


def test_stdlib_is_real_and_of_the_promised_size():
    source = build({"name": "python_stdlib"})
    found = docs(source, fraction=0.0)
    size = sum(len(d.text.encode()) for d in found)
    assert 10e6 < size < 30e6
    ids = {d.id for d in found}
    assert {"json/decoder.py", "argparse.py", "asyncio/base_events.py"} <= ids
    assert not [i for i in ids if "site-packages" in i or "_sysconfigdata" in i or i.startswith("test/")]
    assert [d.id for d in found] == sorted(ids)
    by_id = {d.id: d.text for d in found}
    import argparse
    import inspect

    assert by_id["argparse.py"] == inspect.getsource(argparse)


def test_stdlib_order_is_the_same_in_another_process():
    script = (
        "from trainwright.core import registry\n"
        "s = registry.build('source', 'python_stdlib')\n"
        "print(s.fingerprint(), [d.id for d in s.documents('validation', 0.02)])"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outs) == 1 and ".py" in outs.pop()


def test_stdlib_tests_are_optional():
    plain, full = build({"name": "python_stdlib"}), build({"name": "python_stdlib", "include_tests": True})
    assert {f.id for f in plain.files()} <= {f.id for f in full.files()}
    assert plain.fingerprint() != full.fingerprint()
    docs(full)  # holds modules with wrong encodings on purpose


def test_stdlib_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"holds no \.py files"):
        build({"name": "python_stdlib"}).fingerprint()


def test_stdlib_leaves_out_generated_code_pages():
    """Near-copies of each other: in the validation split they would flatter every model."""
    source = build({"name": "python_stdlib"})
    ids = {d.id for split in ("train", "validation") for d in source.documents(split, 0.05)}
    assert "encodings/cp860.py" not in ids and {"encodings/utf_8.py", "ast.py"} <= ids
