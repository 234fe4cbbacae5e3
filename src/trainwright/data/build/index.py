"""What deduplication remembers of a corpus: on disk, in files that are only appended to and later mapped.

Per document 8 bytes a band, 4 bytes a permutation, 4 bytes a shingle (where similarities are computed exactly) and 32
bytes of particulars. Memory while the corpus is read does not grow with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainwright.data.build.clusters import Pairs
from trainwright.data.build.minhash import MinHasher, band_keys, jaccard

SHINGLES_HELD = 1 << 22  # of the sets kept in memory while pairs are compared
PAIRS_AT_ONCE = 8192
_TABLE = np.dtype([("text", "<u8"), ("id", "<u8"), ("shingles", "<i8"), ("length", "<u4"), ("source", "<i4")])


class Entries(NamedTuple):
    """What is remembered of one chunk of documents."""

    keys: NDArray[np.uint64]  # [documents, bands]
    signatures: NDArray[np.uint32]  # [documents, permutations]; no columns where nothing is to be estimated
    shingles: NDArray[np.uint32]  # one document's after the other's
    counts: NDArray[np.int64]  # [documents] shingles of each; 0: nothing to compare by, never a copy
    text: NDArray[np.uint64]  # [documents] hash of the text
    short: int


def hash_texts(texts: Sequence[str]) -> NDArray[np.uint64]:
    return np.array([xxhash.xxh3_64_intdigest(t.encode("utf-8", "surrogatepass")) for t in texts], np.uint64)


class NearEntries:
    """Chunk of texts -> Entries of the MinHash index; picklable, for worker processes."""

    def __init__(self, hasher: MinHasher, bands: int, rows: int):
        self.hasher, self.bands, self.rows = hasher, bands, rows

    def __call__(self, texts: list[str]) -> Entries:
        shingles = self.hasher.shingles(texts)
        signatures = self.hasher.signatures(shingles)
        keys = band_keys(signatures, self.bands, self.rows)
        return Entries(keys, signatures, shingles.values, np.diff(shingles.starts), hash_texts(texts), shingles.short)


class ExactEntries:
    """Chunk of texts -> Entries with one band: the hash of the text, or of what ``canonical`` makes of it."""

    def __init__(self, canonical: Callable[[str], str] | None = None):
        self.canonical = canonical

    def __call__(self, texts: list[str]) -> Entries:
        compared = texts if self.canonical is None else [self.canonical(t) for t in texts]
        none = np.zeros((len(texts), 0), np.uint32)
        lengths = np.array([len(t) for t in compared], np.int64)
        return Entries(hash_texts(compared)[:, None], none, none.ravel(), lengths, hash_texts(texts), 0)


class Index:
    """The files of one deduplication in ``folder``; ``add`` until all is read, then ask."""

    def __init__(self, folder: Path, bands: int, permutations: int, with_shingles: bool):
        self.folder, self.bands, self.permutations, self.with_shingles = folder, bands, permutations, with_shingles
        self.count = self.short = self._shingles = 0
        self.sources: dict[str, int] = {}
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _append(self, name: str, data: NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("wb", buffering=1 << 18)
        self._files[name].write(np.ascontiguousarray(data).data)

    def add(
        self,
        entries: Entries,
        ids: Sequence[str] | NDArray[np.uint64],
        sources: Sequence[str],
        lengths: Sequence[int] | NDArray[np.int64],
    ) -> None:
        """Documents in their order; ``ids`` may be hashed already."""
        table = np.zeros(len(ids), _TABLE)
        table["text"] = entries.text
        table["id"] = ids if isinstance(ids, np.ndarray) else hash_texts(ids)
        table["length"] = np.minimum(lengths, 0xFFFFFFFF)
        table["source"] = [self.sources.setdefault(s, len(self.sources)) for s in sources]
        ends = np.cumsum(entries.counts)
        table["shingles"] = np.where(entries.counts > 0, self._shingles + ends, -1)
        self._append("table", table)
        for band in range(self.bands):
            self._append(f"band-{band:03d}", entries.keys[:, band])
        if self.permutations:
            self._append("signatures", entries.signatures)
        if self.with_shingles:
            self._append("shingles", entries.shingles)
        self._shingles += int(ends[-1]) if len(ends) else 0
        self.count += len(ids)
        self.short += entries.short

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _map(self, name: str, kind: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        path = self.folder / name
        if not path.exists() or path.stat().st_size == 0:
            return np.zeros(shape, kind)
        return np.memmap(path, kind, "r", shape=shape)

    def table(self) -> NDArray[Any]:
        return self._map("table", _TABLE, (self.count,))

    def preference(self, priority: Sequence[str], keep: str) -> NDArray[np.int64]:
        """[documents] positions in the stream, the most preferred first.

        By the source's place in ``priority`` (sources that it does not name come last), then by ``keep``: the longest,
        or the first read; what is equal still, by hashes of the id and of the text, which no order of reading changes.
        """
        if keep == "first" and not priority:
            return np.arange(self.count)
        table = self.table()
        place = {name: i for i, name in enumerate(priority)}
        of_source = np.array([place.get(s, len(place)) for s in self.sources] or [0])
        keys: list[NDArray[Any]] = [of_source[table["source"]]]
        if keep == "longest":
            keys += [-table["length"].astype(np.int64), table["id"], table["text"]]
        # lexsort is stable and takes its last key as the first one.
        return np.lexsort(keys[::-1])

    def band_reader(self, order: NDArray[np.int64], local: bool) -> Callable[[], Iterator[NDArray[np.uint64]]]:
        """Keys of band after band by preference number; with ``local`` no two sources ever have an equal one."""
        salt = None
        if local:
            hashes = hash_texts(list(self.sources)) if self.sources else np.zeros(1, np.uint64)
            salt = hashes[self.table()["source"]][order]

        def read() -> Iterator[NDArray[np.uint64]]:
            for band in range(self.bands):
                keys = self._map(f"band-{band:03d}", np.uint64, (self.count,))[order]
                if salt is not None:
                    keys = (keys ^ salt) * np.uint64(0x9FB21C651E98DF25)
                yield keys

        return read


def verified(
    first: NDArray[np.uint32],
    second: NDArray[np.uint32],
    threshold: float,
    how: str,
    exactly: Callable[[int], float],
) -> NDArray[np.float64]:
    """Similarity of pairs by their signatures [pairs, permutations], -1 where it is below the threshold; ``exactly``
    gives that of pair k. ``how`` as in Verifier."""
    found = np.mean(first == second, axis=1)
    if how == "exact":
        doubt = 4.0 * np.sqrt(threshold * (1.0 - threshold) / first.shape[1])
        for k in np.flatnonzero(found >= threshold - doubt):
            found[k] = exactly(int(k))
    if how != "none":
        found[found < threshold] = -1.0
    return found


class Verifier:
    """Similarity of pairs, -1 where it is below the threshold.

    ``exact``: Jaccard similarity of the shingle sets, after the signatures have ruled out what is 4 standard errors
    below the threshold. ``signature``: the estimate alone. ``none``: all pairs pass, as in the paper's code.
    """

    def __init__(self, index: Index, order: NDArray[np.int64], threshold: float, how: str):
        self.order, self.threshold, self.how = order, threshold, how
        self._signatures = index._map("signatures", np.uint32, (index.count, index.permutations))
        self._width = index.permutations
        if how == "exact":
            self._ends = index.table()["shingles"]
            self._shingles = index._map("shingles", np.uint32, (index._shingles,))
            self._counts = np.diff(np.maximum.accumulate(np.concatenate((np.zeros(1, np.int64), self._ends))))
        self._sets: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        self._held = 0

    def __call__(self, pairs: Pairs) -> NDArray[np.float64]:
        if self._width == 0:
            return np.ones(len(pairs))
        out = np.empty(len(pairs))
        for at in range(0, len(pairs), PAIRS_AT_ONCE):
            places = self.order[pairs[at : at + PAIRS_AT_ONCE]]

            def exactly(k: int, places: Pairs = places) -> float:
                return jaccard(self._set(int(places[k, 0])), self._set(int(places[k, 1])))

            first, second = self._signatures[places[:, 0]], self._signatures[places[:, 1]]
            out[at : at + len(places)] = verified(first, second, self.threshold, self.how, exactly)
        return out

    def _set(self, place: int) -> NDArray[np.uint32]:
        held = self._sets.get(place)
        if held is None:
            end = int(self._ends[place])
            held = np.unique(self._shingles[end - int(self._counts[place]) : end])
            self._sets[place] = held
            self._held += len(held)
            while self._held > SHINGLES_HELD and len(self._sets) > 2:
                self._held -= len(self._sets.popitem(last=False)[1])
        else:
            self._sets.move_to_end(place)
        return held
