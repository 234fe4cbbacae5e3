"""Copies and near copies, removed within each source or across all of them.

    every document -> MinHash signature -> keys of its bands           (read once, in parallel, index on disk)
    equal keys -> candidate pairs -> Jaccard similarity of each pair   (below the threshold: no edge)
    best document first: keep it, remove what lies within max_steps edges of it
    read once more: kept documents go on, with the size of their cluster as metadata

Papers: SlimPajama-DC, arXiv:2309.10818 (global and local deduplication); Broder 1997 (MinHash).

Where we differ from the paper's code (Cerebras modelzoo), and why. There each shared band is an edge, unchecked, and
connected components of any size become one document: texts with common boilerplate chain up, and people have lost
whole sources that way. Here each edge is checked by its exact Jaccard similarity t, a removed document is at most
``max_steps`` = 2 edges from the one that is kept (Jaccard distance is a metric, so it shares at least 1 - 2 (1 - t)
with it; only in buckets of more than 12 copies, which are worked off in rounds, can it be 2 more per further round),
and the run stops where a source loses more than ``max_source_loss``. ``max_steps=None, verify="none"`` is the paper's
rule.
Two runs with other orders of reading give the same, but for ``keep="first"``; a second run removes nothing.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.clusters import Clusters, cluster
from trainwright.data.build.documents import Document
from trainwright.data.build.index import Entries, ExactEntries, Index, NearEntries, Verifier, hash_texts
from trainwright.data.build.minhash import MinHasher, Unit, check_bands, choose_bands, hit_rate, words
from trainwright.data.build.seen import SeenHashes
from trainwright.data.build.stage import chunks, parallel_map
from trainwright.data.build.statistics import Drop, Sample, Statistics, excerpt

_Cluster = Callable[[Index, NDArray[np.int64], NDArray[np.bool_]], Clusters]
Scope = Literal["global", "local"]
Keep = Literal["longest", "first"]
Verification = Literal["exact", "signature", "none"]
SMALL_SOURCE = 100  # documents; of a smaller source a share says little, and its loss stops nothing


class _Dedup:
    """What exact and near deduplication share: two readings and the choice of what stays."""

    name = ""

    def __init__(
        self,
        scope: Scope = "global",
        priority: Sequence[str] = (),
        keep: Keep = "longest",
        max_source_loss: float = 0.9,
        work_dir: Path | None = None,
    ):
        for key, value, known in (("scope", scope, ("global", "local")), ("keep", keep, ("longest", "first"))):
            if value not in known:
                raise ConfigError(f"should be {' or '.join(known)}", key=key, value=value)
        if not 0.0 < max_source_loss <= 1.0:
            raise ConfigError("should be above 0 and at most 1", key="max_source_loss", value=max_source_loss)
        if len(set(priority)) != len(priority):
            raise ConfigError("names a source twice", key="priority", value=list(priority))
        self.scope, self.priority, self.keep, self.max_source_loss = scope, list(priority), keep, max_source_loss
        self.work_dir = work_dir
        self.statistics = Statistics(self.name)

    _bands, _permutations, _with_shingles = 1, 0, False
    _reason = "copy"

    def _entries(self) -> Callable[[list[str]], Entries]:
        raise NotImplementedError

    def _cluster(self, index: Index, order: NDArray[np.int64], eligible: NDArray[np.bool_]) -> Clusters:
        raise NotImplementedError

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        """Documents that stay, in their order. What cannot be read twice is kept in ``work_dir`` in between."""
        if self.work_dir is not None:
            self.work_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="dedup-", dir=self.work_dir) as folder:
            spool = Spool(Path(folder) / "documents.zst") if isinstance(documents, Iterator) else None
            with Index(Path(folder), self._bands, self._permutations, self._with_shingles) as index:
                for entries, chunk in self._indexed(documents, spool, workers):
                    index.add(entries, [d.id for d in chunk], [d.source for d in chunk], [len(d.text) for d in chunk])
            keeper, similarity, sizes = self._decide(index)
            again = documents if spool is None else spool
            yield from self._second_reading(again, index.table()["text"], keeper, similarity, sizes)

    def _indexed(
        self, documents: Iterable[Document], spool: Spool | None, workers: int
    ) -> Iterator[tuple[Entries, list[Document]]]:
        under_way: list[list[Document]] = []

        def texts() -> Iterator[list[str]]:
            for chunk in chunks(documents):
                if spool is not None:
                    spool.write(chunk)
                under_way.append(chunk)
                yield [d.text for d in chunk]

        for entries in parallel_map(self._entries(), texts(), workers):
            yield entries, under_way.pop(0)
        if spool is not None:
            spool.close()

    def _decide(
        self, index: Index, cluster: _Cluster | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
        """Per document in the order of reading: the position of what is kept for it, how similar it is to the copy that
        it was found by, and the size of the cluster that it keeps. ``cluster`` does the work of ``_cluster``."""
        order = index.preference(self.priority, self.keep)
        eligible = index.table()["shingles"][order] >= 0
        found = (cluster or self._cluster)(index, order, eligible)
        keeper = np.empty(index.count, np.int64)
        keeper[order] = order[found.keeper]
        similarity = np.empty(index.count, np.float32)
        similarity[order] = found.similarity
        sizes = np.bincount(keeper, minlength=index.count)
        self._judge(index, keeper, sizes)
        largest = np.sort(sizes)[::-1][:10]
        self.statistics.figures |= {
            "scope": self.scope,
            "candidate_pairs": found.candidates,
            "copies_found": found.edges,
            "rounds": found.rounds,
            "clusters": int(np.count_nonzero(sizes > 1)),
            "largest_clusters": [int(s) for s in largest if s > 1],
            "shorter_than_an_ngram": index.short,
            "without_words": int(index.count - np.count_nonzero(eligible)),
        }
        return keeper, similarity, sizes

    def _judge(self, index: Index, keeper: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Refuse a result that takes most of a source away."""
        source = index.table()["source"]
        removed = keeper != np.arange(index.count)
        total = np.bincount(source, minlength=len(index.sources))
        lost = np.bincount(source[removed], minlength=len(index.sources))
        by_source = {name: {"documents": int(total[i]), "removed": int(lost[i])} for name, i in index.sources.items()}
        self.statistics.figures["sources"] = by_source
        for name, row in by_source.items():
            share = row["removed"] / max(row["documents"], 1)
            if row["documents"] >= SMALL_SOURCE and share > self.max_source_loss:
                raise DataError(
                    f"{self.name}: source {name!r} would lose {row['removed']} of {row['documents']} documents "
                    f"({share:.0%}), more than max_source_loss={self.max_source_loss}; its largest cluster has "
                    f"{int(sizes[keeper[source == index.sources[name]]].max())} documents. If these are copies, raise "
                    f"max_source_loss; if not, raise the threshold or ngram, or set max_steps to 1"
                )

    def _second_reading(
        self,
        documents: Iterable[Document],
        hashes: NDArray[np.uint64],
        keeper: NDArray[np.int64],
        similarity: NDArray[np.float32],
        sizes: NDArray[np.int64],
    ) -> Iterator[Document]:
        pairs = _Beside(self.statistics.samples_each, keeper, hashes)
        position = 0
        for chunk in chunks(documents):
            now = hash_texts([d.text for d in chunk])
            if position + len(chunk) > len(hashes) or not np.array_equal(now, hashes[position : position + len(chunk)]):
                raise DataError(
                    f"{self.name}: the documents changed between the first and the second reading (around document "
                    f"{position}, {chunk[0].id}); leave the files alone while they are deduplicated"
                )
            for document in chunk:
                pairs.see(position, document)
                kept = self._passed(document, position, keeper, sizes)
                if kept is not None:
                    yield kept
                position += 1
        if position != len(hashes):
            raise DataError(f"{self.name}: {position} documents at the second reading, {len(hashes)} at the first")
        self._show(pairs, similarity)

    def _passed(
        self, document: Document, position: int, keeper: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> Document | None:
        """The document as it goes on, counted; None where it is removed."""
        self.statistics.see(document.text)
        if keeper[position] != position:
            self.statistics.dropped[self._reason] += 1
            return None
        size = int(sizes[position])
        if size > 1:
            key = f"{self.name}_cluster_size"
            document = document.with_metadata(**{key: size * int(document.metadata.get(key, 1))})
        self.statistics.keep(document)
        return document

    def _show(self, pairs: _Beside, similarity: NDArray[np.float32]) -> None:
        for position, removed, kept in pairs.found():
            self.statistics.drop_sample(
                f"dropped: {self._reason}",
                Sample(
                    removed.id,
                    removed.source,
                    excerpt(removed.text),
                    f"similarity {similarity[position]:.2f}; kept: {kept.id} ({kept.source})",
                    excerpt(kept.text),
                ),
            )


class NearDedup(_Dedup):
    """Near copies by MinHash-LSH.

    threshold: least Jaccard similarity of a copy, by shingles of ``ngram`` words (``unit="char"``: characters).
    bands, rows: of the signature; None: as many rows as still find 90% of the pairs at the threshold.
    scope: ``global`` compares all documents, ``local`` only those of one source. priority: sources whose copy is
    rather kept, first the most. verify, max_steps, max_source_loss: see the module.
    Texts shorter than ``ngram`` words count as one shingle, so they are copies only of what has just these words; texts
    without a word are no copies of anything. Both are counted.
    Memory: about 75 bytes a document where each has a copy, up to 100 a candidate pair where copies come
    in larger groups, and what does not grow: at most 300 MB while a band is sorted, 150 MB of words and sets. Disk: see
    ``index``; its files are mapped, and a system that is short of memory gives their pages back.
    Raises ConfigError for settings out of range, DataError for a source that would lose too much.
    """

    name = "near_dedup"
    _reason = "near copy"

    def __init__(
        self,
        threshold: float = 0.8,
        ngram: int = 5,
        unit: Unit = "word",
        permutations: int = 128,
        bands: int | None = None,
        rows: int | None = None,
        verify: Verification = "exact",
        max_steps: int | None = 2,
        scope: Scope = "global",
        priority: Sequence[str] = (),
        keep: Keep = "longest",
        max_source_loss: float = 0.9,
        seed: int = 0,
        work_dir: Path | None = None,
    ):
        super().__init__(scope, priority, keep, max_source_loss, work_dir)
        if not 0.0 < threshold <= 1.0:
            raise ConfigError("should be above 0 and at most 1", key="threshold", value=threshold)
        if verify not in ("exact", "signature", "none"):
            raise ConfigError("should be exact, signature or none", key="verify", value=verify)
        if max_steps is not None and max_steps < 1:
            raise ConfigError("should be at least 1, or null for no limit", key="max_steps", value=max_steps)
        if (bands is None) != (rows is None):
            raise ConfigError("bands and rows go together; give both or neither", key="bands", value=bands)
        self.hasher = MinHasher(permutations, ngram, unit, seed)
        if bands is None or rows is None:
            bands, rows = choose_bands(threshold, permutations)
        check_bands(bands, rows, permutations)
        self.threshold, self.bands, self.rows, self.verify, self.max_steps = threshold, bands, rows, verify, max_steps
        self._bands, self._permutations, self._with_shingles = bands, permutations, verify == "exact"
        self.statistics.figures = {
            "threshold": threshold,
            "ngram": f"{ngram} {unit}s",
            "bands": bands,
            "rows": rows,
            "hit_rate_at_threshold": round(hit_rate(threshold, bands, rows), 4),
            "verify": verify,
        }

    def _entries(self) -> Callable[[list[str]], Entries]:
        return NearEntries(self.hasher, self.bands, self.rows)

    def _cluster(self, index: Index, order: NDArray[np.int64], eligible: NDArray[np.bool_]) -> Clusters:
        verifier = Verifier(index, order, self.threshold, self.verify)
        bands = index.band_reader(order, self.scope == "local")
        return cluster(index.count, bands, verifier, self.max_steps, eligible)


class ExactDedup(_Dedup):
    """Copies that are equal to the character; ``canonical=True``: equal in their words, whatever case and punctuation.

    With ``keep="first"`` and no priority the documents pass through once, and 8 bytes of each are remembered;
    otherwise they are read twice. Texts are told apart by 64-bit hashes: among 10^8 texts the chance that any is
    lost by accident is 3 in 10,000.
    """

    name = "exact_dedup"
    _reason = "exact copy"

    def __init__(
        self,
        canonical: bool = False,
        scope: Scope = "global",
        priority: Sequence[str] = (),
        keep: Keep = "first",
        max_source_loss: float = 0.9,
        work_dir: Path | None = None,
    ):
        super().__init__(scope, priority, keep, max_source_loss, work_dir)
        self.canonical = _canonical if canonical else None

    def _entries(self) -> Callable[[list[str]], Entries]:
        return ExactEntries(self.canonical)

    def _cluster(self, index: Index, order: NDArray[np.int64], eligible: NDArray[np.bool_]) -> Clusters:
        bands = index.band_reader(order, self.scope == "local")
        return cluster(index.count, bands, lambda pairs: np.ones(len(pairs)), None, eligible)

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        if self.keep != "first" or self.priority:
            yield from super().run(documents, workers)
            return
        seen = SeenHashes()
        for document in documents:
            self.statistics.see(document.text)
            text = self._compared(document)
            if text and not seen.add(text):
                self.statistics.drop(document, Drop(self._reason))
                continue
            self.statistics.keep(document)
            yield document

    def _compared(self, document: Document) -> str:
        """What two copies share; empty where there is nothing to compare by."""
        text = document.text if self.canonical is None else self.canonical(document.text)
        return f"{document.source}\0{text}" if text and self.scope == "local" else text


def _canonical(text: str) -> str:
    return " ".join(words(text))


class Spool:
    """Documents on disk between two readings."""

    def __init__(self, path: Path):
        import zstandard

        self.path = path
        self._file: Any = zstandard.open(path, "wb", cctx=zstandard.ZstdCompressor(level=1))

    def write(self, chunk: list[Document]) -> None:
        pickle.dump(chunk, self._file, protocol=5)

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Document]:
        import zstandard

        with zstandard.open(self.path, "rb") as file:
            while True:
                try:
                    chunk = pickle.load(file)
                except EOFError:
                    return
                yield from chunk


class _Beside:
    """A few removed documents and the ones that were kept for them, whichever is read first."""

    def __init__(self, count: int, keeper: NDArray[np.int64], hashes: NDArray[np.uint64]):
        removed = np.flatnonzero(keeper != np.arange(len(keeper)))
        # By the text's hash, so that neither the order of reading nor chance chooses the samples.
        ranks = hashes[removed]
        if len(removed) > count > 0:
            near = ranks <= np.partition(ranks, count - 1)[count - 1]
            removed, ranks = removed[near], ranks[near]
        chosen = removed[np.lexsort((removed, ranks))][:count].tolist()
        self._pairs = [(i, int(keeper[i])) for i in chosen]
        self.wanted = {i for pair in self._pairs for i in pair}
        self._held: dict[int, Document] = {}

    def see(self, position: int, document: Document) -> None:
        if position in self.wanted:
            self._held[position] = document

    def found(self) -> Iterator[tuple[int, Document, Document]]:
        """Position of a removed document, the document, and the one that was kept for it."""
        for removed, kept in self._pairs:
            yield removed, self._held[removed], self._held[kept]
