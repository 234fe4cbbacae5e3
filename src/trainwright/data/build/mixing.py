"""Sources mixed in fixed shares, shuffled in two passes, and a part of them held out.

    target_s = fraction_s * total            in tokens, or whatever ``size`` counts
    next document: from the source that is furthest behind its share of what was given so far

Paper: SlimPajama-DC, arXiv:2309.10818. Its mixtures are token shares sampled without repeats until a source is used up.
"""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document

BUCKET_CHARACTERS = 1 << 26  # of the texts that a shuffle holds at once, about


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


def shuffle(
    documents: Iterable[Document], seed: int, work_dir: Path | None = None, buckets: int = 64
) -> Iterator[Document]:
    """A random order in two passes: each document into a random bucket on disk, then each bucket shuffled in memory.

    Memory: the largest bucket, that is about 1/buckets of the corpus. Depends on seed and the order of the input.
    """
    with tempfile.TemporaryDirectory(prefix="shuffle-", dir=work_dir) as folder:
        scatter(documents, Path(folder), seed, buckets)
        yield from gather(Path(folder), seed, buckets)


def scatter(documents: Iterable[Document], folder: Path, seed: int, buckets: int = 64) -> None:
    """The first pass of :func:`shuffle`, into files of ``folder``."""
    if buckets < 1:
        raise ConfigError("should be at least 1", key="buckets", value=buckets)
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    files: list[Any] = [(folder / f"{b:05d}").open("wb") for b in range(buckets)]
    try:
        for document in documents:
            pickle.dump(document, files[int(rng.integers(buckets))], protocol=5)
    finally:
        for file in files:
            file.close()


def gather(folder: Path, seed: int, buckets: int = 64) -> Iterator[Document]:
    """The second pass of :func:`shuffle`."""
    rng = np.random.Generator(np.random.PCG64([seed, 2]))
    for b in range(buckets):
        held = list(_unpickle(folder / f"{b:05d}"))
        for i in rng.permutation(len(held)):
            yield held[i]


def _unpickle(path: Path) -> Iterator[Document]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


def is_held_out(document: Document, fraction: float, seed: int = 0) -> bool:
    """Whether a document is in the held-out part: by the hash of its text, so that all exact copies go the same way and
    the two parts share none."""
    text = document.text.encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(text, seed=seed) < fraction * 2**64
