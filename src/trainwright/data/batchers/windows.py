"""Whole documents in rows, window after window: what best-fit packing and multipack share.

A document longer than a row of T tokens is cut into full rows and a rest. The rests of a window of shuffled documents
go into rows as ``place`` says; the rows of a window then stand by the place of their first document, so that unshuffled
data keeps about its order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainwright.data.packing import Segments
from trainwright.data.permutation import Permutation

# (sizes of items, 1 .. capacity; capacity) -> the bin of each item, int64, bins numbered from 0 without gaps
Placement = Callable[[np.ndarray, int], np.ndarray]


def largest_first(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The order of ``sizes`` (1 .. capacity) from the largest on, equal ones as they stand."""
    # 16-bit keys are sorted by radix, several times as fast; so are the bins below.
    key = (capacity - sizes).astype(np.uint16 if capacity < 1 << 16 else np.int64)
    return np.argsort(key, kind="stable")


class WindowedPlan:
    """Pieces sorted by row: document and start of each, and where each row begins among them."""

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int | None, window: int, place: Placement):
        self.lengths, self.seq_len, self._place = lengths, seq_len, place
        docs = Permutation(len(lengths), seed).all()
        parts = [self._pack(docs[i : i + window]) for i in range(0, len(docs), window)]
        counts = np.concatenate([np.zeros(0, np.int64), *(p[2] for p in parts)])
        self.docs = np.concatenate([np.zeros(0, np.int32), *(p[0] for p in parts)])
        self.starts = np.concatenate([np.zeros(0, np.int32), *(p[1] for p in parts)])
        self.first = np.concatenate([[0], np.cumsum(counts)])
        self.num_rows = len(counts)

    def _pack(self, docs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(documents, starts) of the window's pieces sorted by row, and the number of pieces of each row."""
        lengths = self.lengths[docs]
        whole, rest = lengths // self.seq_len, lengths % self.seq_len
        has_rest = np.flatnonzero(rest)
        bins = self._place(rest[has_rest], self.seq_len)
        at_full = np.repeat(np.arange(len(docs)), whole)
        nth = np.arange(len(at_full)) - np.repeat(np.cumsum(whole) - whole, whole)
        in_bin = np.bincount(bins)
        by_bin = np.argsort(bins.astype(np.uint16) if len(in_bin) <= 1 << 16 else bins, kind="stable")
        counts = np.concatenate([np.ones(len(at_full), np.int64), in_bin])
        place = np.concatenate([at_full, has_rest[by_bin]])
        starts = np.concatenate([nth * self.seq_len, (lengths - rest)[has_rest][by_bin]]).astype(np.int32)
        begins = np.cumsum(counts) - counts
        row_order = np.argsort(place[begins], kind="stable")
        counts, begins = counts[row_order], begins[row_order]
        pieces = np.arange(len(place)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
        return docs[place[pieces]], starts[pieces], counts

    def segments(self, row: int) -> Segments:
        here = slice(int(self.first[row]), int(self.first[row + 1]))
        docs, starts = self.docs[here].astype(np.int64), self.starts[here].astype(np.int64)
        return Segments(docs, starts, np.minimum(starts + self.seq_len, self.lengths[docs]))
