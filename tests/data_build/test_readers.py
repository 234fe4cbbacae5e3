"""Reading what people have, and what is wrong with it."""

import gzip
import json
import os

import pytest
import zstandard

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.bad_rows import BadRows
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import Inputs, guess_format, open_reader
from trainwright.data.build.readers import JsonlReader, TextReader
from trainwright.data.build.warc import html_text

ROWS = [
    {"text": f"Text {i} äöü 漢字", "id": f"d{i}", "url": f"http://x/{i}", "licence": "cc0", "n": i} for i in range(5)
]


def jsonl(path, rows=ROWS, pack=bytes):
    lines = [r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode() for r in rows]
    path.write_bytes(pack(b"\n".join(lines) + b"\n"))
    return path


def texts(reader):
    return [d.text for d in reader]


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.ZstdCompressor().compress)],
)
def test_jsonl(tmp_path, name, pack):
    reader = open_reader(jsonl(tmp_path / name, pack=pack))
    found = list(reader)
    assert found == list(reader)  # it can be read again
    assert found[2] == Document(ROWS[2]["text"], "d2", "a", "http://x/2", "cc0", {"n": 2}, [])
    assert reader.statistics.documents_in == reader.statistics.documents_out == 5


def test_what_rows_do_not_say(tmp_path):
    path = jsonl(
        tmp_path / "wiki.jsonl", [{"body": "One"}, {"body": "Two", "id": 7, "source": "own", "license": "MIT"}]
    )
    found = list(open_reader(path, text_key="body", licence="cc-by"))
    assert found == [
        Document("One", "wiki.jsonl:1", "wiki", None, "cc-by"),
        Document("Two", "7", "own", None, "MIT"),
    ]
    assert next(iter(open_reader(path, text_key="body", source="named"))).source == "named"
    assert [d.metadata for d in open_reader(jsonl(tmp_path / "m.jsonl"), metadata_keys=[])] == [{}] * 5


def test_text(tmp_path):
    (tmp_path / "b.txt").write_text("one\ntwo\n", newline="")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert [(d.id, d.text) for d in open_reader(tmp_path)] == [("a.txt.gz", "packed"), ("b.txt", "one\ntwo\n")]
    lines = open_reader(tmp_path / "b.txt", lines=True)
    assert [(d.id, d.text) for d in lines] == [("b.txt:1", "one"), ("b.txt:2", "two")]


def test_parquet_and_hf_folders(tmp_path):
    pa = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    found = list(open_reader(tmp_path / "a.parquet"))
    assert found[1] == Document(ROWS[1]["text"], "d1", "a", "http://x/1", "cc0", {"n": 1}, [])
    with pytest.raises(DataError, match="no column 'body'; its columns: text, id"):
        list(open_reader(tmp_path / "a.parquet", text_key="body"))
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"bad\.parquet: damaged or cut short, or not a parquet file"):
        list(open_reader(tmp_path / "bad.parquet"))
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    saved = open_reader(tmp_path / "saved")
    assert saved.format == "hf" and [d.id for d in saved] == ["d0", "d1", "d2", "d3", "d4"]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:2])}).save_to_disk(str(tmp_path / "dict"))
    assert texts(open_reader(tmp_path / "dict")) == [r["text"] for r in ROWS[:2]]
    both = {"train": datasets.Dataset.from_list(ROWS[:2]), "test": datasets.Dataset.from_list(ROWS[2:])}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "both"))
    reader = open_reader(tmp_path / "both")
    assert len(list(reader)) == 2 and reader.statistics.counts["rows of the split test, not read"] == 3
    with pytest.raises(DataError, match="no split 'dev'"):
        list(open_reader(tmp_path / "dict", split="dev"))


PAGE = """<html><head><title>A title</title><style>p {}</style><script>var x = "<p>no</p>";</script></head>
<body><nav><ul><li>Home</li></ul></nav><p>First   para&shy;graph &amp; more.</p><div>Second<br>line</div>
<footer>Imprint</footer></body></html>"""


def test_html():
    assert html_text(PAGE) == "A title\nFirst para\xadgraph & more.\nSecond\nline"
    assert html_text("plain text") == "plain text"


def test_warc(tmp_path):
    pytest.importorskip("warcio")
    from io import BytesIO

    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    path = tmp_path / "crawl.warc.gz"
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        pages = [
            ("http://a/1", "text/html; charset=utf-8", PAGE.encode()),
            ("http://a/2", "text/html", "<meta charset='windows-1252'><p>Caf\u00e9</p>".encode("cp1252")),
            ("http://a/3", "image/png", b"\x89PNG"),
            ("http://a/4", "text/plain", "plain ü".encode()),
            ("http://a/5", "text/html", b"<p>\xff\xfe\xfd</p>"),
        ]
        for url, kind, body in pages:
            headers = StatusAndHeaders("200 OK", [("Content-Type", kind)], protocol="HTTP/1.0")
            writer.write_record(writer.create_warc_record(url, "response", BytesIO(body), http_headers=headers))
        writer.write_record(writer.create_warc_record("http://a/1", "request", BytesIO(b"GET")))
        writer.write_record(writer.create_warc_record("http://a/6", "conversion", BytesIO(b"WET-Text")))
    reader = open_reader(path, bad_rows=BadRows("skip", 5))
    found = list(reader)
    assert [(d.url, d.text) for d in found] == [
        ("http://a/1", html_text(PAGE)),
        ("http://a/2", "Café"),
        ("http://a/4", "plain ü"),
        ("http://a/6", "WET-Text"),
    ]
    assert found[1].provenance == [{"step": "decode", "encoding": "windows-1252"}, {"step": "html_text"}]
    assert found[0].id.startswith("urn:uuid:") and found[0].metadata["date"] and found[0].source == "crawl"
    assert reader.statistics.counts["bad rows: encoding"] == 1
    assert reader.statistics.counts["other records"] >= 2
    cut = tmp_path / "cut.warc"
    plain = gzip.decompress(path.read_bytes())
    for content in (b"WARC/1.0\r\nnot a header", b"no archive at all", plain[: plain.index(b"WET-") + 2]):
        cut.write_bytes(content)
        with pytest.raises(DataError, match=r"cut\.warc:\d: .*record"):
            list(open_reader(cut, encodings=["utf-8", "cp1252"]))
    assert len(list(open_reader(cut, bad_rows=BadRows("skip", 2)))) == 3  # what came before it is there


BAD = [
    (b'{"text": "cut', "malformed JSON"),
    (b'["no", "object"]', "no object"),
    (b'{"text": null}', "no text"),
    (b'{"other": "x"}', "no text"),
    (b'{"text": "\xff"}', "encoding"),
    (b'{"text": "half a pair \\ud800"}', "not text"),
    (b"\x00\x01\x02", "not text"),
    (b"[" * 100_000, "malformed JSON"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_a_malformed_row_is_refused_with_its_place(tmp_path, row, reason):
    path = jsonl(tmp_path / "a.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*--on-bad skip"):
        list(open_reader(path))
    reader = open_reader(path, bad_rows=BadRows("skip", 1))
    assert len(list(reader)) == 2
    assert reader.statistics.counts == {"files": 1, "bad rows": 1, f"bad rows: {reason}": 1}
    (sample,) = reader.statistics.samples[f"bad rows: {reason}"]
    assert sample.id.endswith("a.jsonl:2") and sample.detail


def test_malformed_rows_are_skipped_up_to_a_limit(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [ROWS[0], *(r for r, _ in BAD)])
    reader = open_reader(path, bad_rows=BadRows("skip", len(BAD)))
    assert len(list(reader)) == 1
    assert reader.statistics.counts["bad rows"] == len(BAD)
    assert len(list(reader)) == 1  # the count starts anew with each reading
    with pytest.raises(DataError, match=rf"{len(BAD)} bad rows, more than the limit max_bad={len(BAD) - 1}"):
        list(open_reader(path, bad_rows=BadRows("skip", len(BAD) - 1)))
    with pytest.raises(DataError, match="1 bad rows"):
        list(open_reader(path, bad_rows=BadRows("skip", 0)))
    with pytest.raises(DataError, match=r"8 of 9 rows are bad \(88.9%\)"):
        list(open_reader(path, bad_rows=BadRows("skip", 0.5)))
    assert len(list(open_reader(path, bad_rows=BadRows("skip", 0.9)))) == 1


def test_a_share_of_bad_rows_stops_long_before_the_end(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [b"{"] * 5000)
    reader = open_reader(path, bad_rows=BadRows("skip", 0.5))
    with pytest.raises(DataError, match="1000 of 1000"):
        list(reader)


@pytest.mark.parametrize("wrong", [{"on_bad": "ignore"}, {"limit": -1}, {"limit": 1.5}, {"limit": float("nan")}])
def test_policy_refused(wrong):
    with pytest.raises(ConfigError):
        BadRows(**wrong)


def test_mixed_encodings(tmp_path):
    rows = ['{"text": "schön"}'.encode(), '{"text": "schön"}'.encode("cp1252"), b'{"text": "plain"}']
    path = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not utf-8 text; name further encodings"):
        list(open_reader(path))
    found = list(open_reader(path, encodings=["utf-8", "cp1252"]))
    assert [d.text for d in found] == ["schön", "schön", "plain"]
    assert [d.provenance for d in found] == [[], [{"step": "decode", "encoding": "cp1252"}], []]
    with pytest.raises(ConfigError, match="utf-9"):
        open_reader(path, encodings=["utf-9"])
    with pytest.raises(ConfigError, match="no encoding"):
        open_reader(path, encodings=[])


@pytest.mark.parametrize("name", ["utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks(tmp_path, name):
    (tmp_path / "a.txt").write_bytes("schön".encode(name))
    assert texts(open_reader(tmp_path / "a.txt")) == ["schön"]
    (tmp_path / "a.jsonl").write_bytes('{"text": "schön"}\n{"text": "漢"}\n'.encode(name))
    assert texts(open_reader(tmp_path / "a.jsonl")) == ["schön", "漢"]


def test_empty_documents_are_counted(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": " \n\t"}, ROWS[0], b"", b"  "])
    reader = open_reader(path)
    assert len(list(reader)) == 1
    assert reader.statistics.counts["empty texts"] == 2 and reader.statistics.counts["bad rows"] == 0


@pytest.mark.parametrize("how", ["grows", "replaced", "rewritten"])
def test_a_file_that_changes_while_it_is_read(tmp_path, how):
    path = jsonl(tmp_path / "a.jsonl", ROWS * 3)
    stream = iter(open_reader(path))
    next(stream)
    if how == "grows":
        with path.open("ab") as file:
            file.write(b'{"text": "more"}\n')
    elif how == "replaced":
        other = jsonl(tmp_path / "b.jsonl", ROWS * 3)
        os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
        other.replace(path)
    else:
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was read"):
        list(stream)


def test_damaged_files(tmp_path):
    whole = zstandard.ZstdCompressor().compress(json.dumps(ROWS[0]).encode() * 100)
    (tmp_path / "a.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged or cut short"):
        list(open_reader(tmp_path / "a.jsonl.zst"))
    with pytest.raises(DataError, match="does not exist"):
        list(JsonlReader(tmp_path / "nothing.jsonl"))


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("trainwright.data.build.readers.MAX_LINE", 100)
    path = jsonl(tmp_path / "a.jsonl", [ROWS[0], {"text": "x" * 1000}, ROWS[1]])
    reader = open_reader(path, bad_rows=BadRows("skip", 1))
    assert [d.id for d in reader] == ["d0", "d1"]
    assert reader.statistics.counts["bad rows: too long"] == 1


def test_formats_by_name(tmp_path):
    for name in ("a.jsonl.gz", "b.warc.wet.gz", "c.txt", "d.parquet"):
        (tmp_path / name).touch()
    found = [guess_format([tmp_path / n]) for n in ("a.jsonl.gz", "b.warc.wet.gz", "c.txt", "d.parquet")]
    assert found == ["jsonl", "warc", "text", "parquet"]
    with pytest.raises(DataError, match=r"several formats \(jsonl, parquet, text, warc\)"):
        guess_format([tmp_path])
    (tmp_path / "e.xyz").touch()
    with pytest.raises(DataError, match=r"cannot tell the format of .*e\.xyz"):
        guess_format([tmp_path / "e.xyz"])
    with pytest.raises(ConfigError, match="format='csv'"):
        open_reader(tmp_path, "csv")
    assert isinstance(open_reader(tmp_path / "e.xyz", "text"), TextReader)


def test_several_inputs_with_names(tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl"), tmp_path / "b.txt"
    b.write_text("text of b")
    inputs = Inputs([f"wiki={a}", str(b)])
    found = list(inputs)
    assert [d.source for d in found] == ["wiki"] * 5 + ["b"]
    assert inputs.statistics.documents_out == 6
    with pytest.raises(DataError, match="no input"):
        Inputs([])
