"""Online Dynamic Batching (ODB), the arithmetic: groups under a token budget, and the same number of them on all ranks.

Online Dynamic Batching with Formal Guarantees for LLM Training, arXiv:2606.19989. Nothing here talks to other
processes or knows what a sample is; :mod:`trainwright.data.odb` does that.

A rank's window holds n samples. Sorted longest first, with L_i the length of sample i:

    groups   the first sample is a group alone; behind a group that ends with sample i, the next takes the following
             ``max(budget // L_i, 1)`` samples. Lengths only fall, so (longest of a group) * (size) <= max(budget,
             longest).
    target   the steps that every rank makes of this round: max(1, min(most groups of any rank, fewest slots of any
             rank, fewest samples of any rank)) over the ranks that have samples
    align    too few groups: samples are split off one by one, as groups of their own; too many: the ``target`` groups
             with most samples stay, the rest go back into the window

Three points where we differ:

* Split off is the longest sample of the first group that has two, so the longest groups first. The authors' code does
  that (its list runs from short to long and is worked from the end); a description that has the shortest samples
  split off makes steps of a few tokens where this makes steps of half a budget.
* A group with a sample that has gone back ``patience`` times stays whatever its size. "Most samples first" alone keeps
  short samples and can send the same long ones back all through an epoch.
* Ranks exchange the weight of each sample, not the sum of each group. As groups are runs of the sorted window, every
  rank then knows the exact total of each step from the one exchange, where the authors need a second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from trainwright.core.errors import ConfigError

MAX_LENGTH = 2**31 - 1
FINISHED, FAILED = -1, -2  # in the place of the number of groups
HEADER = 3  # which round it is, slots, number of groups
LossScale = Literal["exact", "approx"]


class Piece(NamedTuple):
    """Samples ``start:stop`` of a window sorted longest first, cut out of group ``group``."""

    group: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices by falling length, equal ones in their order."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def group_sizes(lengths: Sequence[int], budget: int) -> list[int]:
    """Sizes of the groups of samples whose ``lengths`` (>= 1) fall, see the module.

    Raises ConfigError for a budget below 1.
    """
    if budget < 1:
        raise ConfigError("should be at least 1 token", key="budget", value=budget)
    sizes: list[int] = []
    at, take = 0, 1
    while at < len(lengths):
        take = min(take, len(lengths) - at)
        sizes.append(take)
        at += take
        take = max(budget // lengths[at - 1], 1)
    return sizes


def group(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups of indices into ``lengths``, those of the longest samples first."""
    order = longest_first(lengths)
    out, at = [], 0
    for size in group_sizes([lengths[i] for i in order], budget):
        out.append(order[at : at + size])
        at += size
    return out


def target_steps(slots: Sequence[int], groups: Sequence[int], samples: Sequence[int]) -> int:
    """Steps of a round from what each rank can give: free slots, groups (below 1: takes no part), samples."""
    active = [r for r, n in enumerate(groups) if n > 0]
    limits = [max((groups[r] for r in active), default=1)]
    limits += [slots[r] for r in active if slots[r] > 0]
    limits += [samples[r] for r in active if samples[r] > 0]
    return max(1, min(limits))


def align(sizes: Sequence[int], target: int, ages: Sequence[int] | None = None, patience: int = 8) -> list[Piece]:
    """At most ``target`` pieces of groups of ``sizes``, in the order of the samples; fewer only if samples are fewer.

    ``ages``: for each group, how often one of its samples has gone back at most. What no piece holds goes back now.
    """
    starts = np.cumsum([0, *sizes]).tolist()
    pieces = [Piece(g, starts[g], starts[g + 1]) for g in range(len(sizes))]
    if len(pieces) > target:
        waited = [0] * len(sizes) if ages is None else [a if a >= patience else 0 for a in ages]
        kept = sorted(range(len(sizes)), key=lambda g: (-waited[g], -sizes[g], g))[:target]
        return [pieces[g] for g in sorted(kept)]
    missing, out = target - len(pieces), []
    for piece in pieces:
        off = min(missing, piece.size - 1)
        out += [Piece(piece.group, i, i + 1) for i in range(piece.start, piece.start + off)]
        out.append(Piece(piece.group, piece.start + off, piece.stop))
        missing -= off
    return out


@dataclass
class Entry:
    """A sample in the window."""

    sample: Any
    number: int  # how many samples of the pass were read before it
    length: int
    weight: int
    age: int = 0  # how often it has gone back into the window


class Step(NamedTuple):
    """This rank's part of a step; ``entries`` is empty where the rank has nothing."""

    entries: list[Entry]
    all_samples: int
    all_weight: float


class Window:
    """The samples of one rank that wait for a step.

    A round: :meth:`add` samples, give :meth:`row` to an all-gather, give what came back to :meth:`take`. Every rank
    computes what all ranks do, so no second exchange is needed.
    """

    def __init__(self, size: int, budget: int, loss_scale: LossScale | None = "exact", patience: int = 8):
        if size < 1:
            raise ConfigError("should be at least 1 sample", key="window", value=size)
        if budget < 1:
            raise ConfigError("should be at least 1 token", key="budget", value=budget)
        if patience < 1:
            raise ConfigError("should be at least 1 round", key="patience", value=patience)
        self.size, self.budget, self.loss_scale, self.patience = size, budget, loss_scale, patience
        self.entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Entry) -> None:
        if len(self.entries) >= self.size:
            raise ValueError(f"the window is full: {self.size} samples")
        self.entries.append(entry)

    def row(self, number: int, slots: int, groups: int | None = None) -> np.ndarray:
        """int64 ``[3 + 2 W]``, or ``[3 + 3 W]`` with a loss scale: the header, and per group its size and age, and
        the weights (of the sorted samples if exact, sums of the groups if approximate).

        ``groups``: FINISHED or FAILED in their place.
        """
        w = self.size
        row = np.zeros(HEADER + w * (3 if self.loss_scale else 2), dtype=np.int64)
        if groups is not None:
            row[:HEADER] = number, slots, groups
            return row
        self.entries.sort(key=lambda e: (-e.length, e.number))
        sizes = group_sizes([e.length for e in self.entries], self.budget)
        row[:HEADER] = number, slots, len(sizes)
        row[HEADER : HEADER + len(sizes)] = sizes
        at = 0
        for g, size in enumerate(sizes):
            row[HEADER + w + g] = max(e.age for e in self.entries[at : at + size])
            if self.loss_scale == "approx":
                row[HEADER + 2 * w + g] = sum(e.weight for e in self.entries[at : at + size])
            at += size
        if self.loss_scale == "exact":
            row[HEADER + 2 * w : HEADER + 2 * w + at] = [e.weight for e in self.entries]
        return row

    def take(self, rows: np.ndarray, rank: int) -> list[Step]:
        """The steps of this round: as many on every rank. ``rows`` ``[ranks, ...]`` holds the :meth:`row` of each."""
        w = self.size
        groups = rows[:, 2].tolist()
        sizes = [rows[r, HEADER : HEADER + max(n, 0)].tolist() for r, n in enumerate(groups)]
        ages = [rows[r, HEADER + w : HEADER + w + max(n, 0)].tolist() for r, n in enumerate(groups)]
        if all(n < 1 for n in groups):
            return []
        target = target_steps(rows[:, 1].tolist(), groups, [sum(s) for s in sizes])
        pieces = [align(s, target, a, self.patience) for s, a in zip(sizes, ages, strict=True)]
        weights = rows[:, HEADER + 2 * w :]
        steps = []
        for i in range(target):
            parts = [(r, p[i]) for r, p in enumerate(pieces) if i < len(p)]
            total = sum(self._weight(weights[r], sizes[r], part) for r, part in parts) if self.loss_scale else 0.0
            own = pieces[rank][i] if i < len(pieces[rank]) else None
            entries = [] if own is None else self.entries[own.start : own.stop]
            steps.append(Step(entries, sum(part.size for _, part in parts), total))
        self._drop(pieces[rank])
        return steps

    def _weight(self, weights: np.ndarray, sizes: list[int], piece: Piece) -> float:
        if self.loss_scale == "exact":
            return float(weights[piece.start : piece.stop].sum())
        return piece.size * float(weights[piece.group]) / sizes[piece.group]

    def _drop(self, pieces: list[Piece]) -> None:
        taken = {i for p in pieces for i in range(p.start, p.stop)}
        self.entries = [e for i, e in enumerate(self.entries) if i not in taken]
        for entry in self.entries:
            entry.age += 1
