"""One document a row, padded: the baseline that the others are measured against.

A document longer than a row goes on in rows of its own; nothing is cut off silently.
"""

from __future__ import annotations

import numpy as np

from trainwright.core.registry import register
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.packing import RowPlan, Segments
from trainwright.data.permutation import Permutation


class PaddedPlan:
    """The order of the documents and the number of the row that each ends before."""

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int | None):
        self.lengths, self.seq_len = lengths, seq_len
        self.docs = Permutation(len(lengths), seed).all()
        self.ends = np.cumsum(-(-lengths[self.docs] // seq_len), dtype=np.int64)
        self.num_rows = int(self.ends[-1]) if len(lengths) else 0

    def segments(self, row: int) -> Segments:
        i = int(np.searchsorted(self.ends, row, side="right"))
        doc = int(self.docs[i])
        start = (row - (int(self.ends[i - 1]) if i else 0)) * self.seq_len
        stop = min(start + self.seq_len, int(self.lengths[doc]))
        return Segments(*(np.array([x], dtype=np.int64) for x in (doc, start, stop)))


@register("batcher", "padded")
class PaddedConfig(BatcherConfig):
    """One document a row, padded; a longer one goes on in rows of its own."""

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return PaddedPlan(lengths, seq_len, seed)
