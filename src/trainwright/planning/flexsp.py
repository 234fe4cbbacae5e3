"""FlexSP: each micro-batch gets its own mix of sequence-parallel group sizes, long sequences large groups.

A group of d ranks that holds the sequences G takes, in milliseconds (Ulysses attention, d = 1 sends nothing)

    T = sum_G (a1 s^2 + a2 s) / d + sum_G A2A(s, d) + beta      A2A = 4 * 2 * L h s * bytes / (d v_d)
    memory:  sum_G s / d <= cap                                 cap = (M - 16 P / N) / activation bytes a token (ZeRO-3)

Three steps plan a global batch of sequences on N ranks:

1. blaster: sorted by length, cut into m stretches whose largest token sum is least (dynamic program); m goes from the
   fewest that fit to four more, and the least total time wins
2. bucketing: the lengths of a micro-batch are rounded up to 16 values so that least is added (dynamic program); one
   value more as long as the rounded tokens exceed half way between the tokens and what the cluster holds
3. of N / d possible groups of each power of two d, a mixed-integer program chooses which exist and how many sequences
   of each value go where, so that the slowest is fastest (HiGHS, through scipy)

With equal lengths the best plan has groups of one size: if size d does most sequences per rank within a time, nothing
beats N / d groups of it. A homogeneous plan wins every tie.

FlexSP, arXiv:2412.01523. Where we differ: groups of one rank are candidates (the released solver has none), every
program starts from the best of a longest-first greedy over some layouts, which is also the answer when time runs out,
and in the balance of the program memory counts the rounded lengths, so that no plan is over the cap.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from trainwright.planning.flexsp_cuts import blast, rounded

MORE_MICRO_BATCHES = 4
WORTH_SOLVING = 1.05  # numbers of micro-batches whose greedy total is farther from the best are not solved for
LAYOUTS = 202  # of 32 ranks
# 7B on sixteen A100, eight a node: GB/s that a rank sends in an all-to-all over d ranks.
BANDWIDTH = {2: 154.0, 4: 137.0, 8: 121.0, 16: 8.7}


@dataclass(frozen=True)
class CostModel:
    """What a group of ranks takes; the defaults are those measured for a 7B model on A100.

    quadratic, linear  ms per token squared, per token, on one rank; overhead ms per micro-batch
    layers, hidden, element_bytes  of the model: what the all-to-alls carry
    bandwidth  degree -> GB/s; a degree above 1 without one raises ValueError
    """

    quadratic: float = 5.128e-6
    linear: float = 0.18396
    overhead: float = 629.36
    layers: int = 32
    hidden: int = 4096
    element_bytes: int = 2
    bandwidth: Mapping[int, float] = field(default_factory=lambda: dict(BANDWIDTH))

    def per_token_exchange(self, degree: int) -> float:
        """ms of all-to-all that a token of a group of ``degree`` costs: q, k, v and the output, in both passes."""
        if degree == 1:
            return 0.0
        if degree not in self.bandwidth:
            known = ", ".join(map(str, sorted(self.bandwidth)))
            raise ValueError(f"bandwidth has no value for groups of {degree} ranks (only for {known}); add it")
        sent = 4 * 2 * self.layers * self.hidden * self.element_bytes / degree
        return sent / (self.bandwidth[degree] * 1e9) * 1e3

    def sequence(self, length: float, degree: int) -> float:
        """ms that one sequence adds to a group."""
        compute = (self.quadratic * length + self.linear) * length / degree
        return compute + length * self.per_token_exchange(degree)

    def group(self, lengths: Sequence[int], degree: int) -> float:
        """ms of a group; 0 where it has nothing to do."""
        return sum(self.sequence(s, degree) for s in lengths) + self.overhead if lengths else 0.0


def token_cap(memory_gb: float, params_b: float, ranks: int, activation_mb: float = 4.71) -> int:
    """Tokens that a rank can hold under ZeRO-3: 16 bytes per parameter over all ranks, the rest for activations.

    Raises ValueError where the states alone exceed the memory.
    """
    left = memory_gb * 1024 - 16 * params_b * 1024 / ranks
    if left < activation_mb:
        raise ValueError(
            f"the states of {params_b}B parameters take {16 * params_b / ranks:.1f} GB of each of {ranks} ranks, which "
            f"have {memory_gb} GB; use more ranks"
        )
    return int(left / activation_mb)


@dataclass(frozen=True)
class Group:
    """Ranks ``first .. first + degree - 1`` with the sequences (indices into the batch) that they share."""

    degree: int
    first: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class MicroPlan:
    """Groups of one micro-batch; every rank is in exactly one. ``time`` is the modelled one of the slowest, in ms."""

    groups: tuple[Group, ...]
    time: float

    @property
    def layout(self) -> tuple[int, ...]:
        return tuple(g.degree for g in self.groups)

    def group_of(self, rank: int) -> Group:
        return next(g for g in self.groups if g.first <= rank < g.first + g.degree)


@dataclass(frozen=True)
class Plan:
    micro_batches: tuple[MicroPlan, ...]

    @property
    def time(self) -> float:
        return sum(m.time for m in self.micro_batches)


# -- layouts and the greedy -------------------------------------------------------------------------------------------


def layouts(ranks: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to divide ``ranks`` into groups of ``degrees``, as descending tuples."""

    def choose(left: int, allowed: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield ()
        elif allowed:
            largest, rest = allowed[0], allowed[1:]
            for copies in range(left // largest, -1, -1):
                for tail in choose(left - copies * largest, rest):
                    yield (largest,) * copies + tail

    return choose(ranks, tuple(sorted(set(degrees), reverse=True)))


def powers_of_two(up_to: int) -> list[int]:
    return [1 << i for i in range(up_to.bit_length()) if 1 << i <= up_to]


def greedy(
    lengths: Sequence[int], layout: Sequence[int], cap: int, cost: CostModel
) -> tuple[list[list[int]], float] | None:
    """Longest sequence first, each to the group that is done with it first and has room; None where one has none."""
    shares: list[list[int]] = [[] for _ in layout]
    # Of groups of one size the least loaded with room is the best, so only that one is compared with other sizes'.
    heaps: dict[int, list[tuple[float, int, int]]] = {}
    for g, degree in enumerate(layout):
        heaps.setdefault(degree, []).append((0.0, 0, g))
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        s = lengths[i]
        best: tuple[float, int, tuple[float, int, int]] | None = None
        for degree, heap in heaps.items():
            entry = heap[0]
            if entry[1] + s > cap * degree:
                entry = min((e for e in heap if e[1] + s <= cap * degree), default=(math.inf, 0, 0))
            done = entry[0] + cost.sequence(s, degree)
            if done < math.inf and (best is None or done < best[0]):
                best = done, degree, entry
        if best is None:
            return None
        done, degree, entry = best
        heap = heaps[degree]
        if entry is heap[0]:
            heapq.heapreplace(heap, (done, entry[1] + s, entry[2]))
        else:
            heap.remove(entry)
            heap.append((done, entry[1] + s, entry[2]))
            heapq.heapify(heap)
        shares[entry[2]].append(i)
    return shares, max(cost.group([lengths[i] for i in share], d) for share, d in zip(shares, layout, strict=True))


def _micro_plan(shares: Sequence[Sequence[int]], layout: Sequence[int], time: float, names: Sequence[int]) -> MicroPlan:
    """Groups placed largest first, which aligns each to a multiple of its size."""
    first, groups = 0, []
    for degree, share in sorted(zip(layout, shares, strict=True), key=lambda g: -g[0]):
        groups.append(Group(degree, first, tuple(names[i] for i in share)))
        first += degree
    return MicroPlan(tuple(groups), time)


def greedy_plan(lengths: Sequence[int], layout: Sequence[int], cost: CostModel | None = None) -> MicroPlan:
    """The groups of ``layout`` with ``lengths`` spread over them, whatever memory that takes."""
    cost = cost or CostModel(bandwidth=dict.fromkeys(layout, 100.0))
    shares, time = cast(tuple[list[list[int]], float], greedy(lengths, layout, 1 << 62, cost))
    return _micro_plan(shares, layout, time, range(len(lengths)))


# -- the program ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlexSPPlanner:
    """Plans global batches for ``ranks`` ranks of ``cap`` tokens each.

    degrees  group sizes; None: the powers of two up to ``ranks``
    heads    what a degree has to divide; 0: not checked
    method   "milp"; "layouts": the greedy over every layout, without a solver
    seconds, gap  when the solver of a micro-batch stops; the best found by then is taken
    Raises ValueError for ranks that are no power of two, a cap below 1 and degrees without a bandwidth or not dividing
    the heads.
    """

    ranks: int
    cap: int
    cost: CostModel = field(default_factory=CostModel)
    degrees: tuple[int, ...] | None = None
    heads: int = 0
    method: str = "milp"
    seconds: float = 5.0
    gap: float = 0.01

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks & (self.ranks - 1):
            raise ValueError(f"{self.ranks} ranks are not a power of two; use {_nearest_powers(self.ranks)}")
        if self.cap < 1:
            raise ValueError(f"a cap of {self.cap} tokens a rank leaves no room; it should be 1 or more")
        if self.method not in ("milp", "layouts"):
            raise ValueError(f"method should be milp or layouts, not {self.method!r}")
        for d in self.sizes:
            if d not in powers_of_two(self.ranks):
                raise ValueError(f"degree {d} is no power of two up to {self.ranks}")
            if self.heads and self.heads % d:
                legal = ", ".join(str(x) for x in powers_of_two(self.ranks) if self.heads % x == 0)
                raise ValueError(f"degree {d} does not divide the {self.heads} heads; use {legal}")
            self.cost.per_token_exchange(d)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.degrees if self.degrees is not None else tuple(powers_of_two(self.ranks))

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The plan with the least modelled time. Raises ValueError for a sequence that no group can hold."""
        if not lengths:
            return Plan(())
        if min(lengths) < 1:
            raise ValueError("a sequence of no tokens cannot be planned; leave it out")
        room, longest = self.cap * max(self.sizes), max(lengths)
        if longest > room:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than {room}, which the largest group of {max(self.sizes)} "
                f"ranks holds at {self.cap} tokens each; cut it, or use more ranks"
            )
        fewest = math.ceil(sum(lengths) / (self.cap * self.ranks))
        tried: list[tuple[float, int, Plan | None]] = []
        for parts in range(fewest, len(lengths) + 1):
            found = self._of_parts(lengths, parts, self._greedy)
            if found is None and self.method == "milp" and len(tried) == 0:
                found = self._of_parts(lengths, parts, self._solve)  # packs tighter than the greedy does
            if found is not None:  # else smaller micro-batches fit, at the latest those of one sequence
                tried.append((found.time, parts, found))
            if len(tried) > MORE_MICRO_BATCHES:
                break
        best = min((p for _, _, p in tried if p is not None), key=lambda p: p.time)
        if self.method == "milp" and len(self.sizes) > 1:
            for time, parts, _ in tried:
                if time > WORTH_SOLVING * min(t for t, _, _ in tried):
                    continue
                found = self._of_parts(lengths, parts, self._solve)
                if found is not None and found.time < best.time:
                    best = found
        return best

    def _of_parts(
        self, lengths: Sequence[int], parts: int, one: Callable[[list[int], list[int]], MicroPlan | None]
    ) -> Plan | None:
        micro: list[MicroPlan] = []
        for part in blast(lengths, parts):
            found = one([lengths[i] for i in part], part)
            if found is None:
                return None
            micro.append(found)
        return Plan(tuple(micro))

    def _solve(self, lengths: list[int], names: list[int]) -> MicroPlan | None:
        """The program's answer, unless the greedy's is as good: the solver's tolerance must not choose a mix where
        equal groups do as well."""
        best = self._greedy(lengths, names)
        solved = _solve(self, lengths, names, best.time if best else math.inf)
        return solved if solved is not None and (best is None or solved.time < best.time * (1 - 1e-9)) else best

    def _greedy(self, lengths: list[int], names: list[int]) -> MicroPlan | None:
        equal = [(d,) * (self.ranks // d) for d in sorted(self.sizes)]
        best: MicroPlan | None = None
        for layout in [*equal, *_layouts(self.ranks, self.sizes)]:
            if layout[0] * self.cap < max(lengths):
                continue
            found = greedy(lengths, layout, self.cap, self.cost)
            if found is not None and (best is None or found[1] < best.time * (1 - 1e-9)):
                best = _micro_plan(found[0], layout, found[1], names)
        return best


@functools.lru_cache(maxsize=8)
def _layouts(ranks: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    every = list(itertools.islice(layouts(ranks, degrees), LAYOUTS + 1))
    return every if len(every) <= LAYOUTS else []  # of many ranks the greedy takes equal groups alone


def _nearest_powers(n: int) -> str:
    below = powers_of_two(max(n, 1))[-1]
    return f"{below} or {2 * below}"


def _solve(planner: FlexSPPlanner, lengths: list[int], names: Sequence[int], bound: float) -> MicroPlan | None:
    """The mixed-integer program over A[k, p] (sequences of bucket k in group p), m[p] (group p exists) and the time."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    bounds, which = rounded(lengths, planner.cap * planner.ranks)
    in_bucket = [[i for i, b in enumerate(which) if b == k] for k in range(len(bounds))]
    degrees = [d for d in sorted(planner.sizes, reverse=True) for _ in range(planner.ranks // d)]
    buckets, groups = len(bounds), len(degrees)
    exists, last = buckets * groups, buckets * groups + groups  # columns: A, then m, then the time
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    low: list[float] = []
    high: list[float] = []

    def constrain(entries: Sequence[tuple[int, float]], least: float, most: float) -> None:
        for column, value in entries:
            rows.append(len(low))
            columns.append(column)
            values.append(value)
        low.append(least)
        high.append(most)

    upper = np.zeros(last + 1)
    # In hundreds, so that the solver's absolute tolerances are small against them.
    scale = 100.0 / max(planner.cost.sequence(max(bounds), max(degrees)), 1e-12)
    for p, d in enumerate(degrees):
        own = [k * groups + p for k in range(buckets)]
        times = [planner.cost.sequence(b, d) for b in bounds]
        constrain(
            [*((c, t * scale) for c, t in zip(own, times, strict=True)),
             (exists + p, planner.cost.overhead * scale), (last, -1.0)],
            -np.inf, 0.0,
        )  # fmt: skip
        constrain(
            [*((c, float(b)) for c, b in zip(own, bounds, strict=True)), (exists + p, -float(planner.cap * d))],
            -np.inf, 0.0,
        )  # fmt: skip
        if p and degrees[p - 1] == d:  # of equal groups the first exist
            constrain([(exists + p - 1, 1.0), (exists + p, -1.0)], 0.0, np.inf)
        for k, b in enumerate(bounds):
            upper[k * groups + p] = len(in_bucket[k]) if b <= planner.cap * d else 0
    for k in range(buckets):
        constrain([(k * groups + p, 1.0) for p in range(groups)], len(in_bucket[k]), len(in_bucket[k]))
    constrain([(exists + p, float(d)) for p, d in enumerate(degrees)], planner.ranks, planner.ranks)
    upper[exists:last] = 1
    upper[last] = bound * scale
    kinds = np.ones(last + 1)
    kinds[last] = 0
    aim = np.zeros(last + 1)
    aim[last] = 1
    matrix = coo_array((values, (rows, columns)), shape=(len(low), last + 1)).tocsr()
    solved = milp(
        aim,
        integrality=kinds,
        bounds=Bounds(np.zeros(last + 1), upper),
        constraints=LinearConstraint(matrix, low, high),
        options={"time_limit": planner.seconds, "mip_rel_gap": planner.gap},
    )
    if solved.x is None:
        return None
    number = np.rint(solved.x[:exists]).astype(int).reshape(buckets, groups)
    chosen = np.rint(solved.x[exists:last]).astype(bool)
    shares: list[list[int]] = [[] for _ in degrees]
    for k, waiting in enumerate(in_bucket):
        waiting = sorted(waiting, key=lambda i: -lengths[i])
        for p in range(groups):
            shares[p] += [waiting.pop() for _ in range(number[k, p])]
    layout = [d for d, c in zip(degrees, chosen, strict=True) if c]
    shares = [s for s, c in zip(shares, chosen, strict=True) if c]
    time = max(planner.cost.group([lengths[i] for i in s], d) for s, d in zip(shares, layout, strict=True))
    return _micro_plan(shares, layout, time, names)


def static_plan(planner: FlexSPPlanner, lengths: Sequence[int], degree: int) -> Plan:
    """What groups of one size for all steps take: the mesh that a run without FlexSP has. ValueError as ``plan``."""
    return replace(planner, degrees=(degree,), method="layouts").plan(lengths)
