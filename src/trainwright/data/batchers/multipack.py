"""Multipack: whole documents in rows by first-fit-decreasing, the baseline of most fine-tuning stacks.

Documents of a window are taken longest first; each goes into the first row that still holds it, or into a new one. A
document longer than a row of T tokens is cut into full rows and a rest. First-fit-decreasing needs at most
11/9 OPT + 6/9 rows (Dosa, 2007). The known samplers go on to share rows of different fill out over the ranks; here all
rows are T tokens wide and the loader does that.

Placed singly, items of one length fill a row before they turn to the next. So all of one length are placed by one
array operation, with the same result.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, PositiveInt

from trainwright.core.registry import register
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.batchers.windows import WindowedPlan, largest_first
from trainwright.data.packing import RowPlan


def first_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, int64, for items of ``sizes`` (1 .. capacity) in bins of ``capacity``.

    Items are taken largest first, equal ones in their order; each goes into the first bin that holds it.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    order = largest_first(sizes, capacity)
    cuts = np.flatnonzero(np.diff(sizes[order])) + 1
    smallest = int(sizes.min()) if len(sizes) else 1
    opened, rooms = np.zeros(0, np.int64), np.zeros(0, np.int64)  # bins that can still hold something, in order
    num_bins = 0
    for items in np.split(order, cuts) if len(sizes) else []:
        size = int(sizes[items[0]])
        # Methods and not functions of NumPy: some ten calls for each length are all that this costs.
        fits = (rooms >= size).nonzero()[0]
        placed = 0
        if len(fits):
            each = rooms[fits] // size
            left_over = len(items) - (each.cumsum() - each)
            each = np.minimum(np.maximum(left_over, 0), each)
            placed = int(each.sum())
            bins[items[:placed]] = opened[fits].repeat(each)
            rooms[fits] -= each * size
        left = len(items) - placed
        if left:
            per_bin = capacity // size
            new = np.arange(num_bins, num_bins - (-left // per_bin))
            counts = np.full(len(new), per_bin)
            counts[-1] = left - per_bin * (len(new) - 1)
            bins[items[placed:]] = new.repeat(counts)
            num_bins += len(new)
            opened, rooms = np.concatenate([opened, new]), np.concatenate([rooms, capacity - counts * size])
        usable = rooms >= smallest
        opened, rooms = opened[usable], rooms[usable]
    return bins


@register("batcher", "multipack")
class MultipackConfig(BatcherConfig):
    """Whole documents by first-fit-decreasing; only those longer than a row are cut."""

    window: PositiveInt = Field(100_000, description="Documents that are packed together.")

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return WindowedPlan(lengths, seq_len, seed, self.window, first_fit_decreasing)
