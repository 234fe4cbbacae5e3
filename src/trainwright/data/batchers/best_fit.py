"""Best-fit packing: whole documents in rows, each where it leaves the least room.

A document longer than a row of T tokens is cut into full rows and a rest. Rests and whole documents are taken longest
first; each goes into the row with the least room that still holds it, or into a new row.

Fewer Truncations Improve Language Modeling, arXiv:2404.10830. It packs a corpus at once through a tree over the rooms;
here windows of ``window`` shuffled documents are packed one by one, and equal lengths together: all documents of
one length go into all rows of one room in one array operation, with the result of placing them singly. So the
cost grows with the number of different lengths and not with the number of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from pydantic import Field, PositiveInt

from trainwright.core.registry import register
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.packing import RowPlan, Segments
from trainwright.data.permutation import Permutation


class _OpenRows:
    """Rows with room left, by room."""

    def __init__(self) -> None:
        self.by_room: dict[int, list[np.ndarray]] = {}
        self.rooms: list[int] = []  # sorted

    def put(self, rows: np.ndarray, room: int) -> None:
        if room == 0 or not len(rows):
            return
        if room not in self.by_room:
            self.by_room[room] = []
            insort(self.rooms, room)
        self.by_room[room].append(rows)

    def tightest(self, size: int) -> int | None:
        """The least room that holds ``size``."""
        i = bisect_left(self.rooms, size)
        return self.rooms[i] if i < len(self.rooms) else None

    def take(self, room: int, count: int) -> np.ndarray:
        """At most ``count`` of the rows with ``room``, the oldest first."""
        waiting, out = self.by_room[room], []
        while waiting and count:
            rows = waiting[0]
            out.append(rows[:count])
            count -= len(out[-1])
            if len(out[-1]) == len(rows):
                waiting.pop(0)
            else:
                waiting[0] = rows[len(out[-1]) :]
        if not waiting:
            del self.by_room[room]
            del self.rooms[bisect_left(self.rooms, room)]
        return out[0] if len(out) == 1 else np.concatenate(out)


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, int64, for items of ``sizes`` (1 .. capacity) in bins of ``capacity``.

    Items are taken largest first, equal ones in their order; each goes into the fullest bin that still holds it.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    # 16-bit keys are sorted by radix, several times as fast.
    key = (capacity - sizes).astype(np.uint16 if capacity < 1 << 16 else np.int64)
    order = np.argsort(key, kind="stable")
    ordered = sizes[order]
    cuts = np.flatnonzero(np.diff(ordered)) + 1
    opened, num_bins = _OpenRows(), 0
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(sizes)], strict=True):
        size = int(ordered[begin]) if end > begin else 0
        while begin < end:
            # Placed singly, items of one size would fill a bin before turning to the next: it stays the tightest.
            room = opened.tightest(size)
            each = (capacity if room is None else room) // size
            wanted = -(-(end - begin) // each)
            if room is None:
                room = capacity
                into = np.arange(num_bins, num_bins + wanted)
                num_bins += wanted
            else:
                into = opened.take(room, wanted)
            placed = min(len(into) * each, end - begin)
            bins[order[begin : begin + placed]] = np.repeat(into, each)[:placed]
            begin += placed
            last = placed - (len(into) - 1) * each  # items in the last bin
            full = into if last == each else into[:-1]
            opened.put(full, room - each * size)
            if last < each:
                opened.put(into[-1:], room - last * size)
    return bins


class BestFitPlan:
    """Pieces sorted by row: document and start of each, and where each row begins among them."""

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int | None, window: int):
        self.lengths, self.seq_len = lengths, seq_len
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
        bins = best_fit_decreasing(rest[has_rest], self.seq_len)
        # Full rows first, then the bins; then both by the place of their first document, so that unshuffled data
        # keeps about its order.
        at_full = np.repeat(np.arange(len(docs)), whole)
        nth = np.arange(len(at_full)) - np.repeat(np.cumsum(whole) - whole, whole)
        by_bin = np.argsort(bins, kind="stable")
        counts = np.concatenate([np.ones(len(at_full), np.int64), np.bincount(bins)])
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


@register("batcher", "best_fit", paper="arXiv:2404.10830")
class BestFitConfig(BatcherConfig):
    """Whole documents, each in the row whose room it fills best; only those longer than a row are cut."""

    window: PositiveInt = Field(
        1 << 20, description="Documents that are packed together; more leave less padding and take longer to plan."
    )

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return BestFitPlan(lengths, seq_len, seed, self.window)
