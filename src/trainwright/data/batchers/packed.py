"""Documents laid end to end and cut into rows: no padding but at the end of an epoch.

Row r of T tokens holds tokens ``r T : (r + 1) T`` of the shuffled documents. A document that a row end cuts goes on in
the next row as a segment of its own, with positions from 0; its first token there is still the target of the last
position before the cut.
"""

from __future__ import annotations

import numpy as np

from trainwright.core.registry import register
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.packing import RowPlan, Segments
from trainwright.data.permutation import Permutation


class PackedPlan:
    """The order of the documents and where each ends: 12 bytes a document."""

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int | None):
        self.lengths, self.seq_len = lengths, seq_len
        self.docs = Permutation(len(lengths), seed).all()
        self.ends = np.cumsum(lengths[self.docs], dtype=np.int64)
        self.num_rows = -(-int(self.ends[-1]) // seq_len) if len(lengths) else 0

    def segments(self, row: int) -> Segments:
        start = row * self.seq_len
        stop = min(start + self.seq_len, int(self.ends[-1]))
        first = int(np.searchsorted(self.ends, start, side="right"))  # holds token `start`
        last = int(np.searchsorted(self.ends, stop, side="left"))  # holds token `stop - 1`
        docs = self.docs[first : last + 1].astype(np.int64)
        ends = self.ends[first : last + 1]
        begins = ends - self.lengths[docs]
        out = Segments(docs, np.maximum(start, begins) - begins, np.minimum(stop, ends) - begins)
        empty = out.starts == out.stops  # documents without a token
        return Segments(*(a[~empty] for a in out)) if empty.any() else out


@register("batcher", "packed")
class PackedConfig(BatcherConfig):
    """Documents end to end, cut at row ends; what is cut off goes on in the next row as a segment of its own."""

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return PackedPlan(lengths, seq_len, seed)
