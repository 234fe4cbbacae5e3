"""Tokenizing a source once, into memory-mapped shards that are re-used while nothing changes."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from trainwright.core.errors import DataError
from trainwright.data.cache import build_once
from trainwright.data.shards import FORMAT, SHARD_BYTES, ShardedDataset, ShardWriter
from trainwright.data.sources.base import Document, SourceConfig, Split
from trainwright.data.tokenizers.base import Tokenizer
from trainwright.data.watch import Watch

# Text in one call of the tokenizer: enough documents to keep its threads busy; some 100 bytes a token are in use
# meanwhile, so that this also bounds memory.
BATCH_BYTES = 1 << 20
BATCH_DOCS = 4096

Progress = Callable[[int], None]
log = logging.getLogger("trainwright")


class TrainingCorpus:
    """The training texts of several sources, one from each in turn: what a tokenizer is trained on.

    Call it for the stream; :attr:`fingerprint` stands for its content without reading it.
    """

    def __init__(self, sources: Sequence[SourceConfig], validation_fraction: float, watch: Watch | None = None):
        self.sources, self.validation_fraction, self.watch = list(sources), validation_fraction, watch

    @property
    def fingerprint(self) -> str:
        parts = [self.validation_fraction, *(s.fingerprint() for s in self.sources)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def __call__(self) -> Iterator[str]:
        streams = deque(s.documents("train", self.validation_fraction) for s in self.sources)
        if self.watch is not None:
            self.watch.begin("reading text for the tokenizer")
        done = 0
        try:
            while streams:
                stream = streams.popleft()
                doc = next(stream, None)
                if doc is not None:
                    streams.append(stream)
                    yield doc.text
                    if self.watch is not None:
                        done += _utf8_size(doc.text)
                        self.watch.advance(done)
        finally:  # also where the reader has enough
            if self.watch is not None:
                self.watch.begin("training the tokenizer")


def tokenize_source(
    source: SourceConfig,
    tokenizer: Tokenizer,
    split: Split,
    *,
    validation_fraction: float,
    cache_dir: Path,
    progress: Progress | None = None,
    num_proc: int = 1,
    shard_bytes: int = SHARD_BYTES,
) -> ShardedDataset:
    """The tokens of one split of ``source``, each document ended by the tokenizer's EOS.

    They are kept in a folder below ``cache_dir`` whose name is a hash of the source's fingerprint, the tokenizer's, the
    split and this format, and made only where that folder is missing or damaged. Of several processes that ask at
    once, one works and the others wait. ``progress`` gets the UTF-8 bytes of text done so far. With ``num_proc`` > 1
    that many processes encode, which pays where one process's threads do not use the cores up; the result is the same.

    A validation split may be empty (``validation_fraction`` 0). Raises DataError for what the source cannot read, for
    a training split without text, and for a source that changed while it was read.
    """
    before = source.fingerprint()
    key = json.dumps([FORMAT, before, tokenizer.fingerprint(), split, validation_fraction, shard_bytes])
    label = getattr(source, "label", source.name)
    digest = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    folder = Path(cache_dir) / f"{source.name}-{split}-{digest}"

    def build(target: Path) -> None:
        writer = ShardWriter(target, tokenizer.vocab_size, shard_bytes)
        try:
            empty = _write(source.documents(split, validation_fraction), tokenizer, writer, progress, num_proc)
            if source.fingerprint() != before:
                raise DataError(
                    f"source {label}: its files changed while they were read; run again when they are complete"
                )
            skipped = getattr(source, "bad_rows", 0)
            if skipped and (samples := getattr(source, "bad_samples", None)):
                log.warning("source %s: %d unusable rows skipped, e.g. %s", label, skipped, samples[0])
            if split == "train" and not writer.num_docs:
                raise DataError(
                    f"source {label}: no text is left for training (validation_fraction={validation_fraction}); "
                    f"add documents"
                )
            writer.close(name=label, split=split, empty_documents=empty + getattr(source, "empty_documents", 0))
        except BaseException:
            writer.abandon()
            raise

    data = build_once(folder, build, ShardedDataset)
    data.name = label  # the folder may have been made under another way to write the same paths
    return data


def _write(
    docs: Iterator[Document], tokenizer: Tokenizer, writer: ShardWriter, progress: Progress | None, num_proc: int
) -> int:
    """Encode and write ``docs``; how many had no tokens."""
    empty = done = 0
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    for batch, encoded in _encode(_batches(docs), tokenizer, num_proc):
        kept = [
            (np.concatenate([ids, eos]), d.id, _utf8_size(d.text))
            for d, ids in zip(batch, encoded, strict=True)
            if len(ids)
        ]
        empty += len(batch) - len(kept)
        if kept:
            writer.write(*(list(column) for column in zip(*kept, strict=True)))  # type: ignore[arg-type]
        done += sum(_utf8_size(d.text) for d in batch)
        if progress is not None:
            progress(done)
    return empty


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _batches(docs: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for doc in docs:
        batch.append(doc)
        size += len(doc.text)
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(
    batches: Iterator[list[Document]], tokenizer: Tokenizer, num_proc: int
) -> Iterator[tuple[list[Document], list[np.ndarray]]]:
    """Batches with their ids, in order. Others are being encoded while one is read or written."""
    pool: Executor
    if num_proc > 1:
        # Fresh processes: forking one with the tokenizer's threads in it may hang.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(num_proc, context, _set_tokenizer, (tokenizer,))
        encode, ahead = _encode_texts, num_proc + 1
    else:
        # The library lets go of the interpreter lock and has threads of its own. Two callers: one encodes while the
        # other turns its result into arrays, and the last long document of a batch does not leave cores idle.
        pool = ThreadPoolExecutor(2)
        encode, ahead = tokenizer.encode_batch, 2
    waiting: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(encode, [d.text for d in batch])))
            if len(waiting) > ahead:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None


def _set_tokenizer(tokenizer: Tokenizer) -> None:
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
    global _worker_tokenizer
    _worker_tokenizer = tokenizer


def _encode_texts(texts: list[str]) -> list[np.ndarray]:
    if _worker_tokenizer is None:
        raise RuntimeError("the worker was started without a tokenizer")
    return _worker_tokenizer.encode_batch(texts)
