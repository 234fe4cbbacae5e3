"""Best-fit packing: whole documents in rows, each where it leaves the least room.

Fewer Truncations Improve Language Modeling, arXiv:2404.10830: documents longer than a row are cut into full rows and a
rest, pieces are taken longest first, and each goes into the row whose room it fills best. Here within windows of
``window`` documents, so that the plan stays quick and shuffled.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from pydantic import Field, PositiveInt

from trainwright.core.registry import register
from trainwright.data.batchers.base import BatcherConfig, order
from trainwright.data.packing import RowPlan, Segment


class BestFitPlan:
    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int | None, window: int):
        docs = order(len(lengths), seed)
        pieces_doc, pieces_start, pieces_stop, row_of = [], [], [], []
        rows = 0
        for begin in range(0, len(docs), window):
            chunk = docs[begin : begin + window]
            pieces = []
            for doc in chunk.tolist():
                n = int(lengths[doc])
                pieces += [(doc, s, min(s + seq_len, n)) for s in range(0, n, seq_len)]
            pieces.sort(key=lambda p: p[1] - p[2])
            room: list[tuple[int, int]] = []  # (tokens left, row), sorted
            first = rows
            placed = []
            for piece in pieces:
                size = piece[2] - piece[1]
                i = bisect_left(room, (size, -1))
                if i == len(room):
                    left, row = seq_len, rows
                    rows += 1
                else:
                    left, row = room.pop(i)
                placed.append(row)
                if left > size:
                    insort(room, (left - size, row))
            # Full rows come first by construction; mix the window's rows again.
            mixed = first + order(rows - first, None if seed is None else seed + begin + 1)
            for piece, row in zip(pieces, placed, strict=True):
                pieces_doc.append(piece[0])
                pieces_start.append(piece[1])
                pieces_stop.append(piece[2])
                row_of.append(int(mixed[row - first]))
        by_row = np.argsort(np.asarray(row_of, dtype=np.int64), kind="stable")
        self.pieces = np.stack(
            [np.asarray(x, dtype=np.int64)[by_row] for x in (pieces_doc, pieces_start, pieces_stop)], axis=-1
        ).reshape(-1, 3)
        self.num_rows = rows
        self.first = np.searchsorted(np.asarray(row_of, dtype=np.int64)[by_row], np.arange(rows + 1))

    def segments(self, row: int) -> list[Segment]:
        return [Segment(*map(int, p)) for p in self.pieces[self.first[row] : self.first[row + 1]]]


@register("batcher", "best_fit", paper="arXiv:2404.10830")
class BestFitConfig(BatcherConfig):
    """Whole documents, each in the row whose room it fills best; only those longer than a row are cut."""

    window: PositiveInt = Field(10_000, description="Documents that are packed together.")

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return BestFitPlan(lengths, seq_len, seed, self.window)
