"""Best-fit packing: whole documents in rows, each where it leaves the least room.

A document longer than a row of T tokens is cut into full rows and a rest (data/batchers/windows.py). Rests and whole
documents are taken longest first; each goes into the row with the least room that still holds it, or into a new row.

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
from trainwright.data.batchers.windows import WindowedPlan, largest_first
from trainwright.data.packing import RowPlan


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
    order = largest_first(sizes, capacity)
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


@register("batcher", "best_fit", paper="arXiv:2404.10830")
class BestFitConfig(BatcherConfig):
    """Whole documents, each in the row whose room it fills best; only those longer than a row are cut."""

    window: PositiveInt = Field(
        1 << 20, description="Documents that are packed together; more leave less padding and take longer to plan."
    )

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return WindowedPlan(lengths, seq_len, seed, self.window, best_fit_decreasing)
