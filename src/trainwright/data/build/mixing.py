"""Sources mixed in fixed shares, shuffled in two passes, and a part of them held out.

    target_s = fraction_s * total            in tokens, or whatever ``size`` counts
    next document: from the source that is furthest behind its share of what was given so far
    order: by a random 64-bit key a document; its upper part names the bucket on disk, which is sorted in memory

Paper: SlimPajama-DC, arXiv:2309.10818. Its mixtures are token shares sampled without repeats until a source is used up.
"""

from __future__ import annotations

import itertools
import math
import pickle
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document

BUCKET_BYTES = 1 << 26  # of the documents that a shuffle holds at once, about
MOST_BUCKETS = 128  # files open at once; a corpus of more bytes takes one more pass over the disk
NOTABLE = 0.03  # of a share
_RECORD = struct.Struct("<QQ")  # key and length of the pickled document behind it


@dataclass
class Share:
    """What a source is to give, and what it gave."""

    fraction: float
    target: float
    available: int
    documents: int = 0
    given: int = 0

    @property
    def epochs(self) -> float:
        """How often the source was gone through."""
        return self.given / self.available if self.available else 0.0


def plan_mixture(
    fractions: Mapping[str, float], available: Mapping[str, int], total: int, allow_repeat: bool = False
) -> dict[str, Share]:
    """Targets of a mixture of ``total`` tokens. Raises ConfigError for fractions that are negative or do not sum to 1,
    and for a source that would have to give more than it has while repeats are not allowed."""
    for name, fraction in fractions.items():
        if not math.isfinite(fraction) or fraction < 0:
            raise ConfigError("should be between 0 and 1", key=f"fractions.{name}", value=fraction)
        if fraction > 0 and name not in available:
            raise ConfigError(f"no such source; there are {', '.join(sorted(available))}", key=f"fractions.{name}")
    whole = math.fsum(fractions.values())
    if abs(whole - 1.0) > 1e-6:
        raise ConfigError(
            f"sum to {whole:g} and not to 1; divide each by their sum if shares are meant", key="fractions"
        )
    if total < 1:
        raise ConfigError("should be at least 1", key="total", value=total)
    # Rounded: 7/41 of 41 are 7 and not a little more.
    shares = {n: Share(f, round(f * total, 6), available[n]) for n, f in fractions.items() if f > 0}
    for name, share in shares.items():
        if share.available < 1:
            raise ConfigError("is empty; leave it out of the mixture", key=f"fractions.{name}", value=share.fraction)
        if share.target > share.available and not allow_repeat:
            most = min(int(s.available / s.fraction) for s in shares.values())
            raise ConfigError(
                f"asks for {share.target:,.0f} of a source that has {share.available:,}; lower total to {most:,}, "
                f"lower the fraction, or set allow_repeat: true",
                key=f"fractions.{name}",
                value=share.fraction,
            )
    return shares


def mix(
    sources: Mapping[str, Iterable[Document]],
    shares: Mapping[str, Share],
    size: Callable[[Document], int] = lambda d: len(d.text),
) -> Iterator[Document]:
    """Documents of ``sources`` in the planned shares, until each has reached its target to within one document.

    Sources that are to repeat must be iterables that can be read again. Afterwards ``shares`` hold what each gave.
    """
    streams = {name: iter(sources[name]) for name in shares}
    open_sources = set(streams)
    while open_sources:
        # The share of its target that a source has given: the lowest is furthest behind.
        name = min(sorted(open_sources), key=lambda n: shares[n].given / shares[n].target)
        share = shares[name]
        document = next(streams[name], None)
        if document is None:
            if share.target > share.available:  # repeats were allowed
                streams[name] = iter(sources[name])
                document = next(streams[name], None)
            if document is None:
                raise DataError(
                    f"source {name!r} ended at {share.given:,} of {share.target:,.0f}; it holds less than was said"
                )
        share.given += size(document)
        share.documents += 1
        if share.given >= share.target:
            open_sources.discard(name)
        yield document


def differing(shares: Mapping[str, Share]) -> dict[str, float]:
    """The share that each source got, where one is more than NOTABLE off what was asked; else nothing.

    A source ends within one document of its target, which is much where documents are large beside the total.
    """
    total = sum(s.given for s in shares.values())
    got = {name: s.given / total for name, s in shares.items()} if total else {}
    return got if any(abs(got[n] - shares[n].fraction) > NOTABLE for n in got) else {}


def shuffle(
    documents: Iterable[Document], seed: int, work_dir: Path | None = None, expected_bytes: int = 0
) -> Iterator[Document]:
    """A random order in two passes: each document into a bucket on disk, then each bucket sorted in memory.

    The order depends on the seed and the order of the input, and on nothing else. Memory: about BUCKET_BYTES and 24
    bytes a document of a bucket. ``expected_bytes``: of all documents; where it is too low some are written once more.
    """
    with tempfile.TemporaryDirectory(prefix="shuffle-", dir=work_dir) as folder:
        scatter(documents, Path(folder), seed, expected_bytes)
        yield from gather(Path(folder))


def scatter(documents: Iterable[Document], folder: Path, seed: int, expected_bytes: int = 0) -> None:
    """The first pass of :func:`shuffle`, into files of ``folder``."""
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    made = ((int(rng.integers(1 << 64, dtype=np.uint64)), pickle.dumps(d, protocol=5)) for d in documents)
    _into_buckets(made, folder, 0, 1 << 64, _buckets(expected_bytes))


def gather(folder: Path) -> Iterator[Document]:
    """The second pass of :func:`shuffle`. It leaves the files as they are, and can be called again."""
    for packed in _sorted(folder, 0, 1 << 64):
        document = pickle.loads(packed)
        del packed  # or the bucket would be held while the next one is read
        yield document


def _buckets(size: int) -> int:
    return min(max(1, -(-size // BUCKET_BYTES)), MOST_BUCKETS)


def _into_buckets(records: Iterable[tuple[int, bytes]], folder: Path, low: int, high: int, buckets: int) -> None:
    """Records with keys in [low, high) into files, each of an equal range of keys."""
    files: list[Any] = [(folder / f"{b:05d}").open("wb") for b in range(buckets)]
    try:
        for key, packed in records:
            file = files[(key - low) * buckets // (high - low)]
            file.write(_RECORD.pack(key, len(packed)))
            file.write(packed)
    finally:
        for file in files:
            file.close()


def _sorted(folder: Path, low: int, high: int) -> Iterator[bytes | memoryview]:
    """Packed documents of the buckets in ``folder`` by their keys; one that is too large goes into smaller ones."""
    paths = sorted(p for p in folder.iterdir() if p.name.isdigit())
    starts = [low - (low - high) * b // len(paths) for b in range(len(paths) + 1)]
    for path, start, end in zip(paths, starts, starts[1:], strict=False):
        size = path.stat().st_size
        if size > 2 * BUCKET_BYTES and end - start > 1 and sum(1 for _ in itertools.islice(_records(path), 2)) == 2:
            with tempfile.TemporaryDirectory(prefix="part-", dir=folder) as parts:
                _into_buckets(_records(path), Path(parts), start, end, _buckets(size))
                yield from _sorted(Path(parts), start, end)
        else:
            yield from _sorted_file(path)


def _sorted_file(path: Path) -> Iterator[memoryview]:
    data = memoryview(path.read_bytes())
    keys, starts = array("Q"), array("Q")
    at = 0
    while at < len(data):
        key, length = _RECORD.unpack_from(data, at)
        keys.append(key)
        starts.append(at)
        at += _RECORD.size + length
    for i in np.argsort(np.frombuffer(keys, np.uint64), kind="stable") if keys else ():
        start = starts[i] + _RECORD.size
        yield data[start : start + _RECORD.unpack_from(data, starts[i])[1]]


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        while head := file.read(_RECORD.size):
            key, length = _RECORD.unpack(head)
            yield key, file.read(length)


def is_held_out(document: Document, fraction: float, seed: int = 0) -> bool:
    """Whether a document is in the held-out part: by the hash of its text, so that all exact copies go the same way and
    the two parts share none."""
    text = document.text.encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(text, seed=seed) < fraction * 2**64
