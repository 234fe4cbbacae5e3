"""Token shards: right content, made once, never half."""

import json
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core import registry
from trainwright.core.errors import DataError
from trainwright.data import shards
from trainwright.data.cache import DamagedCache
from trainwright.data.dataset import ArrayDataset
from trainwright.data.shards import ShardedDataset, ShardWriter
from trainwright.data.sources.base import Document, SourceConfig
from trainwright.data.tokenize import TrainingCorpus, tokenize_source
from trainwright.data.tokenizers.bytes import ByteTokenizer

TEXTS = [f"Document {i}: é漢🎉 " * (1 + i % 5) for i in range(40)]


@pytest.fixture
def source(tmp_path):
    rows = [json.dumps({"text": t}) for t in TEXTS]
    rows.insert(7, json.dumps({"text": "  \n"}))
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    return registry.build("source", {"name": "jsonl", "path": str(tmp_path / "in.jsonl")})


def run(source, tmp_path, split="train", tokenizer=None, **more):
    options = {"validation_fraction": 0.1, "cache_dir": tmp_path / "cache", **more}
    return tokenize_source(source, tokenizer or ByteTokenizer(), split, **options)


def folders(tmp_path):
    return sorted(p for p in (tmp_path / "cache").iterdir() if p.is_dir())


def stamps(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} | {".": folder.stat().st_mtime_ns}


# --- content


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_tokens_are_those_of_the_documents(source, tmp_path, split, num_proc):
    tokenizer = ByteTokenizer()
    data = run(source, tmp_path, split, num_proc=num_proc)
    want = list(source.documents(split, 0.1))
    assert data.num_docs == len(want) > 0
    for i, doc in enumerate(want):
        assert data.tokens(i).tolist() == [*tokenizer.encode(doc.text), tokenizer.eos_id]
        assert data.doc_id(i) == doc.id
        assert data.byte_counts[i] == len(doc.text.encode())
    assert data.lengths.dtype == np.int32
    assert data.num_tokens == data.lengths.sum() == sum(len(data.tokens(i)) for i in range(data.num_docs))
    assert data.num_bytes == sum(len(d.text.encode()) for d in want)
    assert data.empty_documents == 1
    assert data.fingerprint == ArrayDataset([data.tokens(i) for i in range(data.num_docs)]).fingerprint


def test_many_batches_and_shards_change_nothing(source, tmp_path, monkeypatch):
    whole = run(source, tmp_path)
    monkeypatch.setattr("trainwright.data.tokenize.BATCH_BYTES", 100)
    parts = run(source, tmp_path, shard_bytes=300)
    assert len(parts.meta["shards"]) > 10 and len(whole.meta["shards"]) == 1
    assert parts.fingerprint == whole.fingerprint
    docs = range(whole.num_docs)
    assert [parts.tokens(i).tolist() for i in docs] == [whole.tokens(i).tolist() for i in docs]
    assert all(s["bytes"] <= 300 or s["bytes"] in parts.lengths * 2 for s in parts.meta["shards"])


class WideTokenizer(ByteTokenizer):
    """Bytes shifted to high ids."""

    vocab_size = 1 << 17
    eos_id = (1 << 17) - 1

    def encode_batch(self, texts):
        return [a + (1 << 16) for a in super().encode_batch(texts)]

    def fingerprint(self):
        return "wide"


def test_dtype_follows_the_vocabulary(source, tmp_path):
    assert run(source, tmp_path).tokens(0).dtype == np.uint16
    wide = run(source, tmp_path, tokenizer=WideTokenizer())
    assert wide.tokens(0).dtype == np.uint32
    assert wide.tokens(0)[0] == (1 << 16) + ord("D") and wide.tokens(0)[-1] == (1 << 17) - 1


def test_id_outside_of_the_vocabulary(source, tmp_path):
    tokenizer = WideTokenizer()
    tokenizer.vocab_size = 1 << 16
    with pytest.raises(DataError, match=r"id outside 0..65535"):
        run(source, tmp_path, tokenizer=tokenizer)
    assert folders(tmp_path) == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), max_size=30),
    st.integers(2, 60),
    st.integers(1, 7),
)
def test_writer_and_reader(tmp_path_factory, docs, shard_bytes, batch):
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, 1000, shard_bytes)
    for at in range(0, len(docs), batch):
        part = docs[at : at + batch]
        writer.write([np.array(d, np.int32) for d in part], [f"é{at + k}" for k in range(len(part))], [1] * len(part))
    writer.close()
    data, memory = ShardedDataset(folder), ArrayDataset(docs)
    data.verify()
    assert data.fingerprint == memory.fingerprint and data.num_tokens == memory.num_tokens
    for i in range(len(docs)):
        assert data.doc_id(i) == f"é{i}"
        for window in [(0, None), (1, None), (0, 3), (2, 5), (3, 100), (-2, None), (0, -1)]:
            assert data.tokens(i, *window).tolist() == memory.tokens(i, *window).tolist()


def test_pickle_is_small_and_maps_anew(source, tmp_path):
    data = run(source, tmp_path)
    data.tokens(0)
    blob = pickle.dumps(data)
    assert len(blob) < 500
    copy = pickle.loads(blob)
    assert copy.tokens(3).tolist() == data.tokens(3).tolist() and copy.fingerprint == data.fingerprint
    (data.folder / "meta.json").unlink()
    with pytest.raises(DataError, match="went away or changed"):
        pickle.loads(blob)


def test_open_maps_are_bounded(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_SHARDS", 3)
    data = run(source, tmp_path, shard_bytes=2)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    first = data.tokens(0)
    for i in range(data.num_docs):
        data.tokens(i)
    assert len(data._maps) <= 3
    if before:
        assert len(list(descriptors.iterdir())) <= before + 5
    assert first.tolist() == data.tokens(0).tolist()


def test_tokens_cannot_be_written_to(source, tmp_path):
    with pytest.raises(ValueError, match="read-only"):
        run(source, tmp_path).tokens(0)[0] = 1


def test_progress_counts_bytes(source, tmp_path, monkeypatch):
    monkeypatch.setattr("trainwright.data.tokenize.BATCH_BYTES", 200)
    seen = []
    data = run(source, tmp_path, progress=seen.append)
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1] == data.num_bytes


def test_empty_validation(source, tmp_path):
    data = run(source, tmp_path, "validation", validation_fraction=0.0)
    assert data.num_docs == data.num_tokens == 0
    assert pickle.loads(pickle.dumps(data)).num_docs == 0


# --- made once


def test_second_call_does_no_work(source, tmp_path):
    first = run(source, tmp_path)
    before = stamps(first.folder)

    def forbidden(*args):
        raise AssertionError("read again")

    again = registry.build("source", source.model_dump())
    object.__setattr__(again, "documents", forbidden)
    second = run(again, tmp_path)
    assert second.folder == first.folder and stamps(second.folder) == before
    assert folders(tmp_path) == [first.folder]


def test_rebuilt_when_anything_changes(source, tmp_path):
    seen = {run(source, tmp_path).folder}
    seen.add(run(source, tmp_path, "validation").folder)
    seen.add(run(source, tmp_path, validation_fraction=0.2).folder)
    seen.add(run(source, tmp_path, tokenizer=WideTokenizer()).folder)
    seen.add(run(source, tmp_path, tokenizer=ByteTokenizer("template")).folder)
    with (tmp_path / "in.jsonl").open("a") as handle:
        handle.write('\n{"text": "one more"}')
    grown = run(source, tmp_path, validation_fraction=0.0)
    seen.add(grown.folder)
    assert grown.num_docs == 41 and len(seen) == 6


def test_weight_is_no_reason_to_rebuild(source, tmp_path):
    heavier = registry.build("source", {**source.model_dump(), "weight": 3.0})
    assert run(heavier, tmp_path).folder == run(source, tmp_path).folder


@pytest.mark.parametrize("victim", [*shards.INDEX, "tokens-00000.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "remove", "flip", "empty"])
def test_damage_is_seen_and_mended(source, tmp_path, victim, damage):
    first = run(source, tmp_path)
    want = [first.tokens(i).tolist() for i in range(first.num_docs)]
    path = first.folder / victim
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    else:
        path.write_bytes(data[:-1] if damage == "cut" else b"")
    if victim == "tokens-00000.bin" and damage == "flip":
        # Not read at every start; verify() does.
        with pytest.raises(DataError, match=r"tokens-00000\.bin does not match its checksum"):
            run(source, tmp_path).verify()
        return
    if victim == "meta.json" and damage == "cut":
        return  # its last byte is the line feed
    with pytest.warns(UserWarning, match=f"is damaged.*{victim}"):
        again = run(source, tmp_path)
    assert [again.tokens(i).tolist() for i in range(again.num_docs)] == want
    again.verify()
    assert folders(tmp_path) == [again.folder]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(source, tmp_path)


def test_meta_of_another_format_is_damage(source, tmp_path):
    data = run(source, tmp_path)
    for change in ({"format": 99}, {"index": {}}, {"shards": None}, {"num_tokens": 7}):
        (data.folder / "meta.json").write_text(json.dumps({**data.meta, **change}))
        with pytest.raises(DamagedCache):
            ShardedDataset(data.folder)


class ChangingSource(SourceConfig):
    """Counts how often it is asked for its fingerprint."""

    def documents(self, split, validation_fraction):
        self.__dict__["reads"] = self.__dict__.get("reads", 0) + 1
        yield Document("text", "a")

    def fingerprint(self):
        return f"after {self.__dict__.get('reads', 0)} reads"


def test_source_that_changes_while_read(tmp_path):
    source = ChangingSource(name="changing")
    with pytest.raises(DataError, match="source changing: its files changed while they were read"):
        run(source, tmp_path)
    assert folders(tmp_path) == []


def test_file_that_grows_while_read(source, tmp_path, monkeypatch):
    monkeypatch.setattr("trainwright.data.tokenize.BATCH_BYTES", 100)

    def append(done):
        with (tmp_path / "in.jsonl").open("a") as handle:
            handle.write('\n{"text": "late"}')

    with pytest.raises(DataError, match="changed while they were read"):
        run(source, tmp_path, progress=append)


def test_error_of_the_source_leaves_nothing(source, tmp_path):
    with (tmp_path / "in.jsonl").open("a") as handle:
        handle.write('\n{"text": ')
    with pytest.raises(DataError, match=r"in\.jsonl:42: malformed JSON"):
        run(source, tmp_path)
    assert folders(tmp_path) == []


def test_interrupt_leaves_nothing(source, tmp_path):
    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path, progress=stop)
    assert folders(tmp_path) == []
    run(source, tmp_path)


def test_cache_folder_that_cannot_be_made(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache folder .*file.* cannot be written"):
        run(source, tmp_path, cache_dir=tmp_path / "file" / "cache")


def test_full_disk(source, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainwright.data.shards._File.write", full)
    with pytest.raises(DataError, match=r"No space left on device.*free space"):
        run(source, tmp_path)
    assert folders(tmp_path) == []


# --- several processes

WORKER = """
import sys, time
from pathlib import Path
from trainwright.core import registry
from trainwright.data import tokenize
from trainwright.data.tokenizers.bytes import ByteTokenizer

root, pause = Path(sys.argv[1]), float(sys.argv[2])
tokenize.BATCH_BYTES = 1000
source = registry.build("source", {"name": "jsonl", "path": str(root / "in.jsonl")})

def progress(done):
    with (root / "work.log").open("a") as handle:
        handle.write("x")
    time.sleep(pause)

data = tokenize.tokenize_source(
    source, ByteTokenizer(), "train", validation_fraction=0.1, cache_dir=root / "cache", progress=progress
)
data.verify()
print(data.fingerprint, data.num_docs)
"""


def start(tmp_path, pause):
    command = [sys.executable, "-W", "error", "-c", WORKER, str(tmp_path), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_processes_at_once_share_the_work(source, tmp_path):
    workers = [start(tmp_path, 0.05) for _ in range(3)]
    outs = [w.communicate(timeout=60) for w in workers]
    assert [w.returncode for w in workers] == [0, 0, 0], outs
    assert len({out for out, _ in outs}) == 1
    assert len(folders(tmp_path)) == 1
    done = len((tmp_path / "work.log").read_text())
    assert done == batches_of(source)  # one process worked, once


def batches_of(source):
    size = count = 0
    for doc in source.documents("train", 0.1):
        size += len(doc.text)
        if size >= 1000:
            count, size = count + 1, 0
    return count + (size > 0)


def test_killed_builder_blocks_nobody(source, tmp_path):
    victim = start(tmp_path, 30)
    log = tmp_path / "work.log"
    wait_for(log.exists)
    waiting = start(tmp_path, 0)
    time.sleep(0.5)
    assert waiting.poll() is None  # it waits for the victim
    assert len(folders(tmp_path)) == 1 and ".tmp-" in folders(tmp_path)[0].name
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err
    (folder,) = folders(tmp_path)  # what the victim left is gone
    data = run(source, tmp_path)
    assert data.folder == folder
    assert out.split() == [data.fingerprint, str(data.num_docs)]


def test_without_locks_the_cache_stays_whole(source, tmp_path, monkeypatch):
    monkeypatch.setattr("trainwright.data.cache.fcntl", None)
    inner = []

    def other(done):
        if not inner:
            inner.append(run(source, tmp_path))

    outer = run(source, tmp_path, progress=other)
    assert outer.folder == inner[0].folder and outer.fingerprint == inner[0].fingerprint
    assert folders(tmp_path) == [outer.folder]


# --- the corpus that tokenizers are trained on


def test_training_corpus(source, tmp_path):
    (tmp_path / "other.txt").write_text("other one||other two||other three")
    other = registry.build("source", {"name": "text", "path": str(tmp_path / "other.txt"), "separator": "||"})
    corpus = TrainingCorpus([source, other], 0.1)
    texts = list(corpus())
    assert sorted(texts) == sorted(d.text for s in (source, other) for d in s.documents("train", 0.1))
    assert texts[1].startswith("other")  # in turn, so that a sample of the beginning knows all sources
    assert corpus.fingerprint == TrainingCorpus([source, other], 0.1).fingerprint
    assert corpus.fingerprint != TrainingCorpus([source, other], 0.2).fingerprint
    assert corpus.fingerprint != TrainingCorpus([other, source], 0.1).fingerprint


def test_bpe_from_a_source_to_tokens_and_back(tmp_path):
    source = registry.build("source", "python_stdlib")
    config = registry.build("tokenizer", {"name": "bpe", "vocab_size": 600, "sample_bytes": 200_000})
    tokenizer = config.build(TrainingCorpus([source], 0.02), tmp_path)
    data = run(source, tmp_path, "validation", tokenizer, validation_fraction=0.02)
    lengths = tokenizer.token_byte_lengths()
    for i, doc in enumerate(source.documents("validation", 0.02)):
        ids = data.tokens(i)
        assert tokenizer.decode(ids[:-1]) == doc.text and ids[-1] == tokenizer.eos_id
        assert lengths[ids].sum() == data.byte_counts[i] == len(doc.text.encode())
    assert data.num_bytes / data.num_tokens > 1.7
