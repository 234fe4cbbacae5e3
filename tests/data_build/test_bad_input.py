"""Bad input of corpus building, format by format: one clear error each, or a stated rule (docs/bad_input.md)."""

import gzip
import json
import os
from io import BytesIO

import pytest
import zstandard

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build import readers
from trainwright.data.build.bad_rows import BadRows
from trainwright.data.build.filters import UniqueIds
from trainwright.data.build.formats import Inputs, open_reader
from trainwright.data.build.mixing import plan_mixture
from trainwright.data.build.pipeline import run_pipeline
from trainwright.data.build.stages import make_stages
from trainwright.data.build.warc import html_text
from trainwright.data.build.writers import FORMATS, Writer

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
LINES = ["txt", "jsonl", "jsonl.gz", "jsonl.zst"]
KINDS = [*LINES, "parquet", "hf", "warc", "warc.gz"]
NAMED = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "hf"]  # rows with fields


def make(tmp_path, kind, rows, bad=None, **more):
    """A reader of ``kind`` over texts, rows with fields, or bytes that stand for a row as they are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    packed = next((p for p in (".gz", ".zst") if kind.endswith(p)), "")
    path = tmp_path / f"a.{kind}"
    named = [r if isinstance(r, dict | bytes) else {"text": r} for r in rows]
    if kind == "txt":
        path.write_bytes(b"\n".join(r if isinstance(r, bytes) else r["text"].encode() for r in named) + b"\n")
        more = {"lines": True, **more}
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(named), path)
    elif kind == "hf":
        import datasets

        datasets.Dataset.from_list(named).save_to_disk(str(path))
    elif kind.startswith("warc"):
        from warcio.warcwriter import WARCWriter

        with path.open("wb") as file:
            writer = WARCWriter(file, gzip=bool(packed))
            for i, r in enumerate(named):
                body = r if isinstance(r, bytes) else (r["text"] or "").encode()
                writer.write_record(writer.create_warc_record(f"http://x/{i}", "conversion", BytesIO(body)))
    else:
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in named]
        path.write_bytes(PACK[packed](b"\n".join(lines) + b"\n"))
    policy = {} if bad is None else {"bad_rows": BadRows("skip", bad)}
    return open_reader(path, **policy, **more)


def texts(reader):
    return [d.text for d in reader]


# -- malformed rows: refused with their place, or counted, sampled and skipped under the limit


def wrong_row(kind):
    """A row of the kind that cannot be used, and what is said of it."""
    if kind in ("txt", "warc", "warc.gz"):
        return b"caf\xe9 \xff", "encoding", "not utf-"
    if kind in ("parquet", "hf"):
        return {"text": None}, "no text", "is not a string"
    return b'{"text": "cut', "malformed JSON", "malformed JSON"


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_row_is_refused_or_skipped_under_the_limit(tmp_path, kind):
    row, reason, said = wrong_row(kind)
    rows = ["one", row, "two", row, "three"]
    with pytest.raises(DataError, match=rf"a\.{kind}:[12]: .*{said}.*--on-bad skip"):
        texts(make(tmp_path, kind, rows))
    (tmp_path / "2").mkdir()
    reader = make(tmp_path / "2", kind, rows, bad=2)
    assert texts(reader) == ["one", "two", "three"]
    assert reader.statistics.counts["bad rows"] == reader.statistics.counts[f"bad rows: {reason}"] == 2
    assert len(reader.statistics.samples[f"bad rows: {reason}"]) == 2
    for limit, stop in ((1, "2 bad rows"), (0.3, r"2 of 5 rows are bad \(40\.0%\)"), (0, "1 bad rows")):
        reader.bad_rows = BadRows("skip", limit)
        with pytest.raises(DataError, match=rf"{stop}, more than the limit max_bad={limit}"):
            texts(reader)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize(
    "row",
    [b'{"n": ' + b"9" * 5000 + b"}", b"NaN", b'{"text": "x", "id": "\\ud83d"}', b'{"text": "x", "a": {"\\ud83d": 1}}',
     b'{"text": "\\uD83D"}', b"[" * 100_000],
    ids=["digits", "NaN", "id", "key", "text", "nested"],
)  # fmt: skip
def test_rows_that_json_allows_and_nothing_else(tmp_path, kind, row):
    reader = make(tmp_path, kind, ["one", row, "two"], bad=1)
    assert texts(reader) == ["one", "two"]


def test_what_is_skipped_can_be_shown(tmp_path):
    """Samples of bad rows, and names of files that are not UTF-8, go into files of ours."""
    name = os.fsdecode(b"odd-\xff.jsonl")
    (tmp_path / name).write_bytes(b'{"text": "one"}\n{"text": "\\ud800"}\n{broken\n')
    for format in FORMATS:
        out = tmp_path / format
        reader = open_reader(tmp_path / name, bad_rows=BadRows("skip", 2))
        found = run_pipeline(make_stages(["unique_ids", "near_dedup"]), reader, Writer(out, format))
        assert found["documents"] == 1
        assert (out / "statistics.json").read_text("utf-8").count("\\\\udcff") > 0
    (back,) = open_reader(tmp_path / "jsonl")
    assert back.id == "odd-\\udcff.jsonl:1" and back.source == "odd-\\udcff"


def test_fields_that_are_no_strings(tmp_path):
    rows = [{"text": "x", "id": 5, "url": ["a"], "licence": ["mit", "cc0"], "source": 3, "metadata": "plain",
             "provenance": "no list"},
            {"text": "y", "id": True, "url": "", "licence": None, "source": [], "metadata": [1]}]  # fmt: skip
    found = list(make(tmp_path, "jsonl", rows))
    assert (found[0].id, found[0].url, found[0].licence, found[0].source) == ("5", '["a"]', '["mit", "cc0"]', "3")
    assert (found[1].url, found[1].licence, found[1].source) == (None, None, "a")
    assert found[0].metadata == {"metadata": "plain"} and found[0].provenance == []
    for format in FORMATS:
        run_pipeline([], found, Writer(tmp_path / format, format))
    assert [d.licence for d in open_reader(tmp_path / "parquet")] == ['["mit", "cc0"]', None]


def test_parquet_strings_that_are_not_utf8(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    bad = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:1: not UTF-8 text"):
        texts(open_reader(tmp_path / "a.parquet"))
    reader = open_reader(tmp_path / "a.parquet", bad_rows=BadRows("skip", 1))
    assert [d.id for d in reader] == ["a.parquet:0", "a.parquet:2"]


# -- lengths and encodings


@pytest.mark.parametrize("kind", KINDS)
def test_empty_documents_are_passed_over_and_counted(tmp_path, kind):
    reader = make(tmp_path, kind, ["one", "", " \t ", "two"])
    assert texts(reader) == ["one", "two"]
    assert reader.statistics.counts["empty texts"] == 2


@pytest.mark.parametrize("kind", LINES)
def test_lines_beyond_the_limit_are_bad_rows(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE", 1 << 20)
    reader = make(tmp_path, kind, ["one", "x" * (1 << 21), "two"], bad=1)
    assert texts(reader) == ["one", "two"]
    assert reader.statistics.counts["bad rows: too long"] == 1
    with pytest.raises(DataError, match=r":2: more than 1 MiB in one line"):
        texts(make(tmp_path, kind, ["one", "x" * (1 << 21), "two"]))


def test_a_text_file_beyond_the_limit_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE", 1000)
    (tmp_path / "a.txt").write_text("x" * 2000)
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(DataError, match=r"a\.txt: more than .* in one file; read it a document a line"):
        texts(open_reader(tmp_path))
    assert texts(open_reader(tmp_path, bad_rows=BadRows("skip", 1))) == ["fine"]


@pytest.mark.parametrize("kind", [*LINES, "warc", "warc.gz"])
def test_mixed_encodings(tmp_path, kind):
    good, other = "schön", "schön".encode("cp1252")
    if kind.startswith("jsonl"):
        other = '{"text": "schön"}'.encode("cp1252")
    with pytest.raises(DataError, match="not utf-8 text; name further encodings to try, such as cp1252"):
        texts(make(tmp_path, kind, [good, other]))
    (tmp_path / "2").mkdir()
    found = list(make(tmp_path / "2", kind, [good, other, good], encodings=["utf-8", "cp1252"]))
    assert [d.text for d in found] == [good] * 3
    assert [len(d.provenance) for d in found] == [0, 1, 0]
    assert found[1].provenance == [{"step": "decode", "encoding": "cp1252"}]


# -- ids


@pytest.mark.parametrize("kind", NAMED)
def test_duplicate_ids(tmp_path, kind):
    reader = make(tmp_path, kind, [{"text": t, "id": i} for t, i in (("one", "a"), ("two", "a"), ("three", "b"))])
    with pytest.raises(DataError, match=r"the id 'a' comes twice .*on_duplicate=rename or drop"):
        list(UniqueIds().run(reader))
    assert [d.id for d in UniqueIds("rename").run(reader)] == ["a", "a#2", "b"]
    assert [d.text for d in UniqueIds("drop").run(reader)] == ["one", "three"]
    with pytest.raises(ConfigError, match="refuse, rename or drop"):
        UniqueIds("ignore")


# -- files


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "warc.gz"])
def test_files_that_are_cut_short_are_refused_whatever_is_said_about_rows(tmp_path, kind):
    reader = make(tmp_path, kind, [os.urandom(40).hex() for _ in range(200)], bad=10**6)
    path = tmp_path / f"a.{kind}"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3 - 7])
    with pytest.raises(DataError, match=rf"a\.{kind}: damaged or cut short"):
        texts(reader)


def test_a_warc_with_a_bad_record(tmp_path):
    """A record that ends early is a bad row; where the next one begins cannot be known, so the file ends there."""
    reader = make(tmp_path, "warc", ["one", "two", "three"], bad=2)
    path = tmp_path / "a.warc"
    data = path.read_bytes()
    at = data.index(b"WARC/1.0", data.index(b"two"))
    path.write_bytes(data[:at] + b"garbage\r\n\r\n" + data[at:])
    assert texts(reader)[:2] == ["one", "two"]
    assert reader.statistics.counts["bad rows: malformed record"] >= 1
    reader.bad_rows = BadRows()
    with pytest.raises(DataError, match=r"a\.warc:\d: .*record"):
        texts(reader)
    path.write_bytes(data[: data.index(b"three") + 2])
    reader.bad_rows = BadRows("skip", 1)
    assert texts(reader) == ["one", "two"]


def test_pages_that_no_parser_expects():
    for page in ("<![foo[x]]>text", "<![", "<p>a<![if !IE]>b<![endif]>c", "<!doctype", "<a <b>c", "&#xfffffffff; x"):
        assert isinstance(html_text(page), str)
    assert html_text("<![foo[x]]><p>text</p>") == "text"


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "parquet", "warc"])
def test_files_that_cannot_be_read(tmp_path, kind):
    reader = make(tmp_path, kind, ["x"], bad=10)
    path = tmp_path / f"a.{kind}"
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    reader.paths = [str(tmp_path)]
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read"):
        texts(reader)
    with pytest.raises(DataError, match="does not exist"):
        texts(open_reader(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_change_while_they_are_read(tmp_path, kind):
    stream = iter(make(tmp_path, kind, [f"text {i}" for i in range(20)]))
    next(stream)
    path = tmp_path / f"a.{kind}"
    if path.is_dir():
        path = next(p for p in path.rglob("*.arrow"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="changed while it was read; wait until"):
        list(stream)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_corpus(tmp_path, kind):
    make(tmp_path, kind, ["", " "])
    more = {"lines": True} if kind == "txt" else {}
    with pytest.raises(DataError, match=r"input: holds no document \(1 files, 2 empty texts, 0 bad rows\)"):
        list(Inputs([str(tmp_path / f"a.{kind}")], **more))
    with pytest.raises(DataError, match="holds no document"):
        run_pipeline([], Inputs([str(tmp_path / f"a.{kind}")], **more), Writer(tmp_path / "out"))
    assert not (tmp_path / "out" / "statistics.json").exists()


# -- weights of a mixture


def test_fractions_that_cannot_be():
    for fractions, said in (
        ({"a": 0.0, "b": 0.0}, "sum to 0 and not to 1"),
        ({"a": -1.0, "b": 2.0}, "between 0 and 1"),
        ({"a": float("nan"), "b": 1.0}, "between 0 and 1"),
        ({"a": 1.0, "c": 0.0, "d": 0.5}, "no such source"),
        ({"a": 1.0}, None),
    ):
        if said is None:
            assert plan_mixture(fractions, {"a": 10, "b": 10}, 5)["a"].target == 5
        else:
            with pytest.raises(ConfigError, match=said):
                plan_mixture(fractions, {"a": 10, "b": 10}, 5)
    with pytest.raises(ConfigError, match="is empty"):
        plan_mixture({"a": 1.0}, {"a": 0}, 5)
