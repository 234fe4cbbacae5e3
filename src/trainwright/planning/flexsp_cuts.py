"""The two dynamic programs of FlexSP (arXiv:2412.01523): cutting a batch into micro-batches, rounding lengths up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BUCKETS = 16


def blast(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of ``lengths``, longest first, cut into ``parts`` stretches with the least largest token sum.

    O(parts n^2). Raises ValueError for fewer sequences than parts."""
    n = len(lengths)
    if not 1 <= parts <= n:
        raise ValueError(f"{n} sequences cannot be cut into {parts} micro-batches")
    order = sorted(range(n), key=lambda i: -lengths[i])
    sums = np.concatenate([[0], np.cumsum([lengths[i] for i in order])]).astype(np.float64)
    best = sums.copy()  # of the first i sequences in one part
    best[0] = np.inf
    came: list[NDArray[np.int64]] = []
    for _ in range(parts - 1):
        following, at = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64)
        for i in range(1, n + 1):
            largest = np.maximum(best[:i], sums[i] - sums[:i])
            at[i] = largest.argmin()
            following[i] = largest[at[i]]
        best = following
        came.append(at)
    ends = [n]
    for at in reversed(came):
        ends.append(int(at[ends[-1]]))
    ends = [0, *reversed(ends)]
    return [order[a:b] for a, b in itertools.pairwise(ends)]


def bucket_bounds(lengths: Sequence[int], buckets: int) -> list[int]:
    """At most ``buckets`` values, ascending, that round the lengths up with the least sum of (bound - length)."""
    values, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
    n = len(values)
    if buckets >= n:
        return [int(v) for v in values]
    number = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * values)])
    ends = np.arange(1, n + 1)
    best = np.concatenate([[0], values * number[ends] - tokens[ends]]).astype(np.float64)
    came: list[NDArray[np.int64]] = []
    for _ in range(buckets - 1):
        following, at = best.copy(), np.arange(n + 1)
        for i in range(1, n + 1):
            added = best[:i] + values[i - 1] * (number[i] - number[:i]) - (tokens[i] - tokens[:i])
            at[i] = added.argmin()
            following[i] = added[at[i]]
        best = following
        came.append(at)
    end, bounds = n, []
    for at in [*reversed(came), np.zeros(n + 1, np.int64)]:
        if end == 0:
            break
        bounds.append(int(values[end - 1]))
        end = int(at[end])
    return bounds[::-1]


def rounded(lengths: Sequence[int], room: int, buckets: int = BUCKETS) -> tuple[list[int], list[int]]:
    """Bucket bounds, and of each sequence its bucket; more buckets while the rounded tokens exceed
    ``(tokens + room) / 2``, where ``room`` is what all ranks hold."""
    tokens, distinct = sum(lengths), len(set(lengths))
    while True:
        bounds = bucket_bounds(lengths, buckets)
        which = np.searchsorted(bounds, lengths).tolist()
        if buckets >= distinct or sum(bounds[b] for b in which) <= (tokens + room) / 2:
            return bounds, which
        buckets += 1
