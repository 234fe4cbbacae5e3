"""Bad input of training data, format by format: one clear error each, or a stated rule (docs/bad_input.md)."""

import gzip
import json
import logging
import os

import pytest
import zstandard

from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError, ModelError
from trainwright.data.chat.conversation import parse_row
from trainwright.data.module import DataConfig, build_data
from trainwright.data.sources import _files
from trainwright.data.tokenize import tokenize_source
from trainwright.data.tokenizers.bytes import ByteTokenizer

LETTERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ 'A:' + m.content + eos_token }}"
    "{% else %}{{ m.role[0] | upper + ':' + m.content + '|' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
ROWWISE = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "hf"]
CHAT = ["chat.jsonl", "chat.jsonl.gz", "chat.json", "chat.parquet"]


def row(kind, text):
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]} if (
        kind.startswith("chat")) else {"text": text}  # fmt: skip


def make(tmp_path, kind, rows, **more):
    """A source of ``kind`` over ``rows``: dicts, or bytes for lines as they are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, packed = kind.removeprefix("chat."), next((p for p in (".gz", ".zst") if kind.endswith(p)), "")
    path = tmp_path / f"a.{name}"
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    if kind == "text":
        path.write_bytes(b"\n\n".join(r["text"].encode() if isinstance(r, dict) else r for r in rows))
        more = {"separator": "blank_line", **more}
    elif name == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif name == "hf":
        import datasets

        datasets.Dataset.from_list(list(rows)).save_to_disk(str(path))
    elif name == "json":
        path.write_bytes(b"[" + b",\n".join(lines) + b"]")
    else:
        path.write_bytes(PACK[packed](b"\n".join(lines) + b"\n"))
    source = "chat" if kind.startswith("chat") else kind.removesuffix(packed) if packed else kind
    return registry.build("source", {"name": source, "path": str(path), **more}), path


def docs(source, split="train", fraction=0.0):
    return list(source.documents(split, fraction))


def tokens(source, tmp_path, seq_len=64):
    if hasattr(source, "tokenized"):
        return source.tokenized(
            ByteTokenizer(LETTERS), "train", seq_len=seq_len, validation_fraction=0.0, cache_dir=tmp_path / "cache"
        )
    return tokenize_source(source, ByteTokenizer(), "train", validation_fraction=0.0, cache_dir=tmp_path / "cache")


# -- malformed rows


@pytest.mark.parametrize("kind", [*ROWWISE, *CHAT])
def test_rows_without_text_are_refused_or_skipped_under_a_limit(tmp_path, kind, caplog):
    wrong = {"messages": [{"role": "user", "content": "q"}]} if kind.startswith("chat") else {"text": None}
    rows = [row(kind, f"text {i}") for i in range(18)]
    rows[7:7] = [wrong, wrong]
    source, _ = make(tmp_path, kind, rows)
    with pytest.raises(DataError, match=r"a\..*\b[789]\b.*(no assistant turn|null, not a string).*skip_bad_rows"):
        tokens(source, tmp_path)
    source, _ = make(tmp_path, kind, rows, skip_bad_rows=True) if kind != "hf" else (
        registry.build("source", {**source.model_dump(), "skip_bad_rows": True}), None)  # fmt: skip
    with caplog.at_level(logging.WARNING, "trainwright"):
        assert tokens(source, tmp_path).num_docs == 18  # 2 of 20 are the limit of a tenth
    assert source.bad_rows == 2
    assert "2 unusable rows skipped, e.g." in caplog.text
    strict = registry.build("source", {**source.model_dump(), "skip_bad_rows": True, "max_bad_rows": 0.05})
    with pytest.raises(DataError, match=r"2 of 20 rows cannot be used, more than max_bad_rows=0\.05:\n  .*a\."):
        tokens(strict, tmp_path / "strict")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "chat.jsonl"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "cut', "malformed JSON: Unterminated string"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "malformed JSON: Exceeds the limit"),
        (b"NaN", "expected an object"),
        (b'{"text": "\xff"}', "not UTF-8 text: byte 0xff at byte offset"),
        (b"\x00\x01", "NUL byte"),
        ('{"text": "wide"}'.encode("utf-16"), "not UTF-8 text"),
    ],
)
def test_malformed_lines(tmp_path, kind, line, said):
    source, _ = make(tmp_path, kind, [row(kind, "one"), line, row(kind, "two")], max_bad_rows=0.5)
    with pytest.raises(DataError, match=r"a\.jsonl.*:2: .*" + said):
        docs(source)
    source = registry.build("source", {**source.model_dump(), "skip_bad_rows": True})
    assert len(docs(source)) == 2 or line.startswith(b"\xff\xfe")  # UTF-16 holds line feeds of its own


def test_an_array_is_refused_where_it_breaks(tmp_path):
    for data, said in (
        (b'[{"a": 1}, {"a": ', "behind row 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b'[{"n": ' + b"9" * 5000 + b"}]", "Exceeds the limit"),
        (b'[{"a": 1} {"a": 2}]', "expected a comma"),
    ):
        (tmp_path / "a.json").write_bytes(data)
        with pytest.raises(DataError, match=rf"a\.json.*{said}"):
            docs(
                registry.build(
                    "source",
                    {"name": "chat", "path": str(tmp_path / "a.json"), "skip_bad_rows": True, "max_bad_rows": 1.0},
                )
            )


@pytest.mark.parametrize("kind", ["parquet", "chat.parquet"])
def test_parquet_strings_that_are_not_utf8(tmp_path, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    source, path = make(tmp_path, kind, [row(kind, "x")], skip_bad_rows=True, max_bad_rows=0.5)
    bad = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    if kind == "parquet":
        table = pa.table({"text": bad})
    else:
        messages = [[{"role": "assistant", "content": "a"}]] * 3
        table = pa.table({"messages": pa.array(messages), "name": bad})
    pq.write_table(table, path)
    assert [d.id for d in docs(source)] == ["a.parquet:0", "a.parquet:2"]
    assert source.bad_rows == 1
    with pytest.raises(DataError, match=r"a\.parquet.*1: not UTF-8 text"):
        docs(registry.build("source", {**source.model_dump(), "skip_bad_rows": False}))


def test_many_bad_rows_stop_long_before_the_end(tmp_path):
    source, _ = make(tmp_path, "jsonl", [b"{"] * 5000, skip_bad_rows=True)
    with pytest.raises(DataError, match="1000 of 1000 rows"):
        docs(source)


def test_the_limit_changes_no_documents(tmp_path):
    source, path = make(tmp_path, "jsonl", [{"text": "x"}])
    other = registry.build("source", {"name": "jsonl", "path": str(path), "max_bad_rows": 0.3})
    assert source.fingerprint() == other.fingerprint()


# -- lengths


@pytest.mark.parametrize("kind", ["text", *ROWWISE])
def test_empty_documents_are_counted_and_skipped(tmp_path, kind):
    source, _ = make(tmp_path, kind, [{"text": "one"}, {"text": " \t"}, {"text": "two"}, {"text": ""}])
    data = tokens(source, tmp_path)
    assert data.num_docs == 2
    assert data.empty_documents == (0 if kind == "text" else 2)  # blank lines are what separates texts


@pytest.mark.parametrize("kind", CHAT)
def test_empty_answers_are_bad_rows(tmp_path, kind):
    source, _ = make(tmp_path, kind, [row(kind, "one"), row(kind, " ")])
    with pytest.raises(DataError, match="only empty assistant turns"):
        docs(source)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "chat.jsonl"])
def test_lines_beyond_the_limit(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(_files, "MAX_LINE", 1 << 20)
    rows = [row(kind, "one"), row(kind, "x" * (1 << 21)), row(kind, "two")]
    source, _ = make(tmp_path, kind, rows, skip_bad_rows=True, max_bad_rows=0.5)
    assert [d.id.rsplit(":", 1)[1] for d in docs(source)] == ["1", "3"]
    with pytest.raises(DataError, match=r":2: a line of more than 1 MiB"):
        docs(registry.build("source", {**source.model_dump(), "skip_bad_rows": False}))


def test_long_texts_are_cut_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    source = registry.build("source", {"name": "text", "path": str(tmp_path), "max_document_bytes": 500})
    assert "".join(d.text for d in docs(source)) == text


@pytest.mark.parametrize(("rule", "left"), [("drop", 1), ("truncate_right", 2), ("truncate_left", 2)])
def test_long_conversations_follow_the_rule(tmp_path, rule, left, caplog):
    source, _ = make(tmp_path, "chat.jsonl", [row("chat", "a"), row("chat", "b" * 200)], too_long=rule)
    with caplog.at_level(logging.WARNING, "trainwright"):
        assert tokens(source, tmp_path).num_docs == left
    assert "64 tokens" in caplog.text


# -- encodings


@pytest.mark.parametrize("packed", PACK)
def test_text_that_is_not_utf8(tmp_path, packed):
    path = tmp_path / f"a.txt{packed}"
    for data, said in (
        ("schön".encode("latin-1"), "not UTF-8 text: byte 0xf6 at byte offset 3"),
        ("x".encode("utf-16"), "it looks like UTF-16; .*iconv"),
        (b"a\x00b", "binary file, not text: NUL byte at byte offset 1"),
    ):
        path.write_bytes(PACK[packed](data))
        with pytest.raises(DataError, match=said):
            docs(registry.build("source", {"name": "text", "path": str(path)}))
    path.write_bytes(PACK[packed](b"\xef\xbb\xbfmarked"))
    assert [d.text for d in docs(registry.build("source", {"name": "text", "path": str(path)}))] == ["marked"]


@pytest.mark.parametrize("kind", ["jsonl", "chat.jsonl"])
def test_half_a_surrogate_pair(tmp_path, kind):
    source, _ = make(tmp_path, kind, [row(kind, "\ud83d")])
    with pytest.raises(DataError, match=r"a\.jsonl:1: text holds the lone surrogate U\+D83D"):
        docs(source)


# -- ids


@pytest.mark.parametrize("kind", [*ROWWISE, *CHAT])
def test_ids_are_places_and_cannot_come_twice(tmp_path, kind):
    """The field id of a row plays no part; a file that is named twice is read once."""
    rows = [{**row(kind, f"{i}"), "id": "same"} for i in range(4)]
    source, path = make(tmp_path, kind, rows)
    assert len({d.id for d in docs(source)}) == 4
    if kind != "hf":
        twice = registry.build("source", {"name": source.name, "path": [str(path), str(path)]})
        assert len(docs(twice)) == 4


# -- conversations


def test_no_assistant_turn_and_no_template(tmp_path):
    with pytest.raises(DataError, match="has no assistant turn, so there is nothing to learn"):
        parse_row({"messages": [{"role": "user", "content": "x"}]})
    source, _ = make(tmp_path, "chat.jsonl", [row("chat", "a")])
    with pytest.raises(ModelError, match=r"tokenizer has no chat template.*set tokenizer.chat_template"):
        source.tokenized(ByteTokenizer(), "train", seq_len=64, validation_fraction=0.0, cache_dir=tmp_path / "cache")


# -- files


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "chat.jsonl.gz", "chat.parquet", "chat.json"])
def test_files_that_are_cut_short(tmp_path, kind):
    """A whole file that cannot be read on is refused, whatever is said about rows."""
    source, path = make(tmp_path, kind, [row(kind, f"{i} {os.urandom(40).hex()}") for i in range(200)],
                        skip_bad_rows=True, max_bad_rows=1.0)  # fmt: skip
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(DataError, match=r"a\.[a-z.]*: (damaged or cut short|malformed JSON array)"):
        docs(source)


@pytest.mark.parametrize("kind", ["text", "jsonl", "jsonl.gz", "parquet", "chat.jsonl", "chat.parquet"])
def test_files_that_cannot_be_read(tmp_path, kind):
    source, path = make(tmp_path, kind, [row(kind, "x")])
    path.unlink()
    path.symlink_to(tmp_path / "gone")  # its name is in the folder, and nothing behind it
    source = registry.build("source", {"name": source.name, "path": str(tmp_path)})
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read"):
        tokens(source, tmp_path)
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read"):
        docs(source)


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "in" / "closed").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("x")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"closed: cannot be read \(Permission denied\)"):
        registry.build("source", {"name": "text", "path": str(tmp_path / "in")}).files()


@pytest.mark.parametrize("kind", ["text", *ROWWISE, *CHAT])
def test_files_that_change_while_they_are_read(tmp_path, kind, monkeypatch):
    source, path = make(tmp_path, kind, [row(kind, f"text {i}") for i in range(5)])
    kind_of = type(source)
    real = kind_of.documents

    def documents(self, *args):
        yield from real(self, *args)
        target = next(p for p in sorted(path.rglob("*")) if p.suffix == ".arrow") if path.is_dir() else path
        os.utime(target, ns=(1, 1))

    monkeypatch.setattr(kind_of, "documents", documents)
    with pytest.raises(DataError, match="its files changed while they were read; run again"):
        tokens(source, tmp_path)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]  # and nothing half is left


@pytest.mark.parametrize("kind", ["text", *ROWWISE, *CHAT])
def test_an_empty_corpus(tmp_path, kind):
    if kind in ("parquet", "hf", "chat.parquet"):
        empty = [row(kind, "x")]
        source, path = make(tmp_path, kind, empty)
        if kind == "hf":
            pytest.skip("datasets writes no dataset without rows")
        import pyarrow.parquet as pq

        pq.write_table(pq.read_table(path).slice(0, 0), path)
    else:
        source, path = make(tmp_path, kind, [])
    with pytest.raises(DataError, match="holds no text"):
        tokens(source, tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        tokens(registry.build("source", {"name": source.name, "path": str(tmp_path / "nothing.x")}), tmp_path)


# -- weights


def test_weights_that_cannot_be(tmp_path):
    from trainwright.data.batchers.packed import PackedConfig
    from trainwright.data.dataset import ArrayDataset
    from trainwright.data.mixture import Mixture
    from trainwright.data.rows import RowStream

    streams = {n: RowStream(ArrayDataset([[1, 2, 3]], name=n), PackedConfig(), 2) for n in "ab"}
    for weights, said in (
        ({"a": 0.0, "b": 0.0}, "sum to zero"),
        ({"a": -1.0, "b": 2.0}, "finite number, at least 0"),
        ({"a": float("nan"), "b": 1.0}, "finite number"),
        ({"a": 1.0}, "give each source a weight"),
    ):
        with pytest.raises(ConfigError, match=said):
            Mixture(streams, weights)
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    sources = [{"name": "text", "path": str(tmp_path)} for _ in "ab"]
    for weights in ((0.0, 0.0), (1.0, None), (-1.0, 1.0)):
        with pytest.raises((ValueError, ConfigError), match=r"weight|greater than 0"):
            DataConfig.model_validate({
                "sources": [{**s, "weight": w} for s, w in zip(sources, weights, strict=True)],
                "cache_dir": str(tmp_path / "cache"),
            })  # fmt: skip


def test_an_answer_with_no_loss_at_all(tmp_path):
    rows = [{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}]
    _, path = make(tmp_path, "chat.jsonl", rows)
    with pytest.raises(DataError, match=r"no conversation is left|every loss weight is 0|nothing"):
        build_data(
            DataConfig.model_validate({
                "sources": [{"name": "chat", "path": str(path)}], "cache_dir": str(tmp_path / "c"),
                "validation_fraction": 0.0,
            }),
            ByteTokenizer(LETTERS), seq_len=32, seed=0,
        )  # fmt: skip
