"""What is written can be read again, by us and by others, and is the same each time."""

import json

import pytest

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import open_reader
from trainwright.data.build.writers import Writer, write_documents

DOCUMENTS = [
    Document(
        "Text\nof two lines\r\n äöü 漢字 🎉", "d0", "web", "http://x/0", "cc0", {"n": 1, "deep": {"a": [1, None]}}
    ),
    Document("second", "d1", "books", None, None, {}, [{"step": "lengths"}, {"step": "decode", "encoding": "cp1252"}]),
    Document("third", "d2"),
]


@pytest.mark.parametrize(
    ("format", "packing"), [("jsonl", "none"), ("jsonl", "gz"), ("jsonl", "zst"), ("parquet", "none")]
)
def test_everything_comes_back(tmp_path, format, packing):
    write_documents(DOCUMENTS, tmp_path / "out", format, compression=packing)
    found = list(open_reader(tmp_path / "out", source=""))
    assert found == DOCUMENTS


def test_hf_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    write_documents(DOCUMENTS, tmp_path / "out", "hf")
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["text"][:] == [d.text for d in DOCUMENTS]
    assert list(open_reader(tmp_path / "out", "hf", source="")) == DOCUMENTS


@pytest.mark.parametrize("packing", ["none", "gz"])
def test_warc(tmp_path, packing):
    warcio = pytest.importorskip("warcio.archiveiterator")
    write_documents(DOCUMENTS, tmp_path / "out", "warc", compression=packing)
    (path,) = (tmp_path / "out").iterdir()
    with path.open("rb") as file:
        records = [(r.rec_type, r.content_stream().read().decode()) for r in warcio.ArchiveIterator(file)]
    assert records == [("conversion", d.text) for d in DOCUMENTS]
    found = list(open_reader(tmp_path / "out", source=""))
    assert [(d.text, d.id, d.source, d.licence) for d in found] == [
        (d.text, d.id, d.source, d.licence) for d in DOCUMENTS
    ]
    with pytest.raises(DataError, match="line break"):
        write_documents([Document("x", "a\nb")], tmp_path / "other", "warc")


def test_text(tmp_path):
    write_documents(DOCUMENTS, tmp_path / "out", "text")
    assert [d.text for d in open_reader(tmp_path / "out")] == [d.text for d in DOCUMENTS]


@pytest.mark.parametrize(
    ("format", "packing"), [("jsonl", "gz"), ("jsonl", "zst"), ("parquet", "none"), ("warc", "gz"), ("text", "none")]
)
def test_shards_are_of_the_size_and_the_same_each_time(tmp_path, format, packing):
    documents = [Document("x" * 100, f"{i}", "a") for i in range(25)]
    seen = []
    for name in ("one", "two"):
        with Writer(tmp_path / name, format, packing, shard_bytes=1000) as writer:
            for document in documents:
                writer.write(document)
        assert [f["documents"] for f in writer.files] == [10, 10, 5]
        files = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        seen.append([(p.relative_to(tmp_path / name), p.read_bytes()) for p in files])
    assert seen[0] == seen[1]
    assert [d.text for d in open_reader(tmp_path / "one")] == [d.text for d in documents]


def test_a_shard_that_is_not_whole_has_no_name(tmp_path):
    with pytest.raises(RuntimeError), Writer(tmp_path / "out", shard_bytes=10) as writer:
        writer.write(Document("long enough", "0"))
        writer.write(Document("short", "1"))
        raise RuntimeError
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == [".part-00001.jsonl.partial", "part-00000.jsonl"]
    assert json.loads((tmp_path / "out" / "part-00000.jsonl").read_text())["id"] == "0"


def test_refused(tmp_path):
    for wrong, names in (
        ({"format": "csv"}, "format='csv'"),
        ({"format": "parquet", "compression": "gz"}, "compression='gz'"),
        ({"format": "warc", "compression": "zst"}, "compression='zst'"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
    ):
        with pytest.raises(ConfigError, match=names):
            Writer(tmp_path / "out", **wrong)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "part-00000.jsonl").touch()
    with pytest.raises(DataError, match="is not empty"), Writer(tmp_path / "full"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"), Writer(tmp_path / "file"):
        pass
