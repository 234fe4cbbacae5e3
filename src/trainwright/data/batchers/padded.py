"""One document a row, padded: the baseline that the others are measured against."""

from __future__ import annotations

import numpy as np

from trainwright.core.registry import register
from trainwright.data.batchers.base import BatcherConfig, order
from trainwright.data.packing import RowPlan, Segment


class PaddedPlan:
    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int | None):
        self.seq_len = seq_len
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.docs = order(len(lengths), seed)
        self.ends = np.cumsum(-(-self.lengths[self.docs] // seq_len))
        self.num_rows = int(self.ends[-1]) if len(lengths) else 0

    def segments(self, row: int) -> list[Segment]:
        i = int(np.searchsorted(self.ends, row, side="right"))
        doc = int(self.docs[i])
        start = (row - (int(self.ends[i - 1]) if i else 0)) * self.seq_len
        return [Segment(doc, start, min(start + self.seq_len, int(self.lengths[doc])))]


@register("batcher", "padded")
class PaddedConfig(BatcherConfig):
    """One document a row, padded; a longer one goes on in the next rows."""

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return PaddedPlan(lengths, seq_len, seed)
