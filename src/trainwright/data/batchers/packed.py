"""Documents laid end to end and cut into rows: no padding but at the end of an epoch."""

from __future__ import annotations

import numpy as np

from trainwright.core.registry import register
from trainwright.data.batchers.base import BatcherConfig, order
from trainwright.data.packing import RowPlan, Segment


class PackedPlan:
    """Row r holds tokens ``r T : (r + 1) T`` of the shuffled documents laid end to end."""

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int | None):
        self.seq_len = seq_len
        self.docs = order(len(lengths), seed)
        self.ends = np.cumsum(np.asarray(lengths)[self.docs], dtype=np.int64)
        self.num_rows = -(-int(self.ends[-1]) // seq_len) if len(lengths) else 0

    def segments(self, row: int) -> list[Segment]:
        start = row * self.seq_len
        stop = min(start + self.seq_len, int(self.ends[-1]))
        out = []
        i = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            first = int(self.ends[i - 1]) if i else 0
            end = min(int(self.ends[i]), stop)
            if end > start:
                out.append(Segment(int(self.docs[i]), start - first, end - first))
            start, i = end, i + 1
        return out


@register("batcher", "packed")
class PackedConfig(BatcherConfig):
    """Documents end to end, cut at row ends; what is cut off goes on in the next row as a segment of its own."""

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return PackedPlan(lengths, seq_len, seed)
