"""Hybrid data parallelism: each sequence gets just the ranks that it needs. The planner of ByteScale.

One pool of N ranks, each with room for C tokens. A sequence of s tokens gets D(s) = ceil(s / C) neighbouring ranks,
which cut it into 2 D chunks and exchange keys among themselves; those with D = 1 are packed up to C tokens on a rank
and send nothing. Ranks do different numbers of micro-batches and meet only when gradients are added up.

    cost     T(s) = (a s^2 + b s) / D + c seconds on each of its ranks; a pack adds up a s^2 + b s and has one c
    offload  r = min(1, T_layer(s) BW / bytes(s)) of a layer's activations reach host memory while the layer is
             computed, so D(s) = ceil((1 - r) s / C)

DP-balance: sequences by length, each to the ranks that are done with it first; where one of them would wait for the
others, short sequences fill the time. (The paper draws from buckets of equal cost, the large first: one sequence at a
time that is this order.)
PP-balance: a pipeline waits for the dearest of the micro-batches under way, so all of one have to cost alike. Sequences
by length are cut into buckets of equal total cost, and each bucket has ranks (pipelines) of its own; of 1, 2, 4, ...
buckets those are taken that are done first.
One shape: where stages hand on what they compute, all micro-batches of a step are filled up to the capacity, and every
rank does as many, some of them empty. Padding costs b a token, so what a micro-batch costs beyond another is its pairs.

Every micro-batch has a ``step``: on all its ranks it is the step-th. So any two ranks that share sequences meet them in
one order, and waiting can't go in a circle. A rank without one in some step has nothing to do there.

ByteScale, arXiv:2502.21231, of which the mechanism is known from its abstract and summaries; the code is closed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Cost:
    """Seconds of a forward and backward pass on one rank: per pair of tokens (half of them are seen: a s^2), per token,
    and per micro-batch."""

    a: float = 5.128e-9
    b: float = 1.8396e-4
    c: float = 0.0

    def __call__(self, length: int, ranks: int = 1) -> float:
        """Of one sequence, without the ``c`` of its micro-batch."""
        return (self.a * length * length + self.b * length) / ranks


def offload_ratio(
    length: int, bytes_per_token: float, bandwidth: float, layer_seconds: Callable[[int], float]
) -> float:
    """Largest share r of a layer's activations with ``r * bytes / bandwidth <= layer_seconds(length)``.

    bytes_per_token  activations of a layer; bandwidth  bytes a second to host memory. Raises ValueError where these are
    not above 0."""
    if length < 1 or bytes_per_token <= 0 or bandwidth <= 0:
        raise ValueError(
            f"length={length}, bytes_per_token={bytes_per_token} and bandwidth={bandwidth} should be above 0"
        )
    return min(1.0, max(0.0, layer_seconds(length) * bandwidth / (length * bytes_per_token)))


def ranks_needed(length: int, capacity: int, ratio: float = 0.0) -> int:
    """D(s). Raises ValueError for a capacity below 1 or a ratio outside 0 .. 1."""
    if capacity < 1:
        raise ValueError(f"capacity={capacity} should be at least 1 token a rank")
    if not 0 <= ratio <= 1:
        raise ValueError(f"an offload ratio of {ratio} is not between 0 and 1")
    held = length * (1 - ratio)
    return max(1, -int(-(held - 1e-9 * length) // capacity))


@dataclass(frozen=True)
class MicroBatch:
    """``sequences`` on ranks ``first .. first + ranks - 1``; several only where ``ranks`` is 1."""

    sequences: tuple[int, ...]
    first: int
    ranks: int
    step: int
    seconds: float  # on each rank

    @property
    def span(self) -> range:
        return range(self.first, self.first + self.ranks)


@dataclass(frozen=True)
class Plan:
    """Where the sequences of a step lie."""

    lengths: tuple[int, ...]
    ranks: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def steps(self) -> int:
        return 1 + max((m.step for m in self.micro_batches), default=-1)

    def of(self, rank: int) -> list[MicroBatch]:
        """What a rank does, in order."""
        return sorted((m for m in self.micro_batches if rank in m.span), key=lambda m: m.step)

    def load(self) -> list[float]:
        """Seconds of work per rank."""
        out = [0.0] * self.ranks
        for m in self.micro_batches:
            for rank in m.span:
                out[rank] += m.seconds
        return out

    @property
    def imbalance(self) -> float:
        """Largest load over mean load."""
        load = self.load()
        return max(load) * self.ranks / sum(load) if sum(load) else 1.0

    def seconds(self, stages: int = 1, cost: Callable[[MicroBatch], float] | None = None) -> float:
        """Until the last rank is done: each does its micro-batches in order, and ranks that share one start together.

        Each rank being a pipeline of ``stages``, the time in units of its stage. Neighbouring stages wait for each
        other, so every beat takes what the dearest of the ``stages`` micro-batches under way does. ``cost`` replaces
        the seconds of the micro-batches."""
        ready = [0.0] * self.ranks
        done: list[list[float]] = [[] for _ in ready]
        for m in sorted(self.micro_batches, key=lambda m: m.step):
            seconds = m.seconds if cost is None else cost(m)
            end = max(ready[r] for r in m.span) + seconds
            for r in m.span:
                ready[r] = end
                done[r].append(seconds)
        for r, times in enumerate(done):
            for beat in range(len(times) + stages - 1):
                under_way = times[max(0, beat - stages + 1) : beat + 1]
                ready[r] += max(under_way) - (times[beat] if beat < len(times) else 0.0)
        return max(ready)

    def at_one_shape(self, tokens: int, cost: Cost) -> Plan:
        """The plan as it is where every rank does all steps, and every micro-batch has ``tokens`` tokens on a rank:
        that many linear costs each, and empty micro-batches where a rank has nothing."""
        linear = cost.b * tokens + cost.c
        filled = [
            replace(m, seconds=linear + sum(cost.a * self.lengths[k] ** 2 for k in m.sequences) / m.ranks)
            for m in self.micro_batches
        ]
        busy = {(r, m.step) for m in self.micro_batches for r in m.span}
        for step, rank in itertools.product(range(self.steps), range(self.ranks)):
            if (rank, step) not in busy:
                filled.append(MicroBatch((), rank, 1, step, linear))
        return replace(self, micro_batches=tuple(sorted(filled, key=lambda m: (m.step, m.first))))

    def sent(self) -> int:
        """Tokens whose keys and values are sent, counted once per receiver, by a ring: s (D - 1) a sequence."""
        return sum(self.lengths[k] * (m.ranks - 1) for m in self.micro_batches for k in m.sequences)

    def digest(self) -> int:
        """63 bits that differ between plans; all ranks have to have the same."""
        text = repr((self.lengths, self.ranks, [(m.sequences, m.first, m.ranks, m.step) for m in self.micro_batches]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class _Short(NamedTuple):
    """A sequence that needs one rank."""

    number: int
    length: int
    seconds: float


@dataclass
class _Pack:
    free: int
    sequences: list[int] = field(default_factory=list)
    seconds: float = 0.0


def make_plan(
    lengths: Sequence[int],
    ranks: int,
    capacity: int,
    *,
    cost: Cost | None = None,
    ratio: Callable[[int], float] | None = None,
    balance: Literal["dp", "pp"] = "dp",
    stages: int = 1,
    one_shape: bool = False,
) -> Plan:
    """The plan of a step, see the module. The same on every rank that passes the same.

    ratio      offload ratio of a sequence by its length; None: nothing is offloaded
    balance    pp where ``stages`` of a pipeline, each with all micro-batches of its rank, are more than 1
    one_shape  all micro-batches have ``capacity`` tokens, and all ranks as many of them

    Raises ValueError for empty sequences, one that all ranks together cannot hold, and "dp" with several stages.
    """
    cost = cost or Cost()
    if ranks < 1:
        raise ValueError(f"ranks={ranks} should be at least 1")
    if stages > 1 and balance == "dp":
        raise ValueError(
            f"balance=dp evens out sums, and a pipeline of {stages} stages waits for its dearest micro-batch; use pp"
        )
    needed = []
    for k, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {k} has {length} tokens; leave empty sequences out")
        needed.append(ranks_needed(length, capacity, 0.0 if ratio is None else ratio(length)))
        if needed[-1] > ranks:
            raise ValueError(
                f"sequence {k} of {length} tokens needs {needed[-1]} ranks of {capacity} tokens, there are {ranks}; "
                f"raise the capacity to {-(-length // ranks)} or cut the sequence"
            )
    best: Plan | None = None
    tries = [(1, True)]
    if balance == "pp":  # a small pack between dear ones makes a pipeline wait, so also without
        tries = [(2**i, fill) for i in range(ranks.bit_length()) for fill in (True, False)]
    for count, fill in tries:
        plan = in_buckets(lengths, needed, ranks, capacity, cost, count, fill)
        if plan is None:
            continue
        if one_shape:
            plan = plan.at_one_shape(capacity, cost)
        if best is None or plan.seconds(stages) < best.seconds(stages):
            best = plan
    assert best is not None  # one bucket with all ranks has room
    return best


def in_buckets(
    lengths: Sequence[int], needed: Sequence[int], ranks: int, capacity: int, cost: Cost, count: int, fill: bool = True
) -> Plan | None:
    """The plan of ``count`` buckets, each with as many of the ranks; None where a sequence needs more ranks than that.

    A micro-batch of a bucket whose sequences have lo .. hi tokens costs at most C (a hi + b) + c, and at least
    C / 2 (a lo + b) + c where it is shared."""
    order = sorted(range(len(lengths)), key=lambda k: (-lengths[k], k))
    pools = [range(ranks * i // count, ranks * (i + 1) // count) for i in range(count)]
    ends = list(itertools.accumulate(buckets([lengths[k] for k in order], cost, [len(p) for p in pools])))
    members = [order[a:b] for a, b in itertools.pairwise([0, *ends])]
    if any(needed[k] > len(pool) for mine, pool in zip(members, pools, strict=True) for k in mine):
        return None
    found: list[MicroBatch] = []
    for mine, pool in zip(members, pools, strict=True):
        found += _place(mine, lengths, needed, pool, capacity, cost, fill)
    return Plan(tuple(lengths), ranks, tuple(sorted(found, key=lambda m: (m.step, m.first))))


def buckets(descending: Sequence[int], cost: Cost, shares: Sequence[int]) -> list[int]:
    """How many of the lengths, longest first, each bucket gets, so that total costs are as ``shares``."""
    whole, wanted = sum(cost(s) for s in descending), 0.0
    out, running, taken = [], 0.0, 0
    for i, share in enumerate(shares):
        wanted += whole * share / sum(shares)
        n = 0
        while taken < len(descending):
            seconds = cost(descending[taken])
            if i < len(shares) - 1 and running + seconds / 2 > wanted:
                break
            running += seconds
            taken, n = taken + 1, n + 1
        out.append(n)
    return out


class _Pool:
    """Neighbouring ranks while sequences are placed on them. ``ready``: when each is done, in seconds."""

    def __init__(self, ranks: range, capacity: int, cost: Cost):
        self.ranks, self.capacity, self.cost = ranks, capacity, cost
        self.ready = dict.fromkeys(ranks, 0.0)
        self.following = dict.fromkeys(ranks, 0)  # next free step
        self.found: list[MicroBatch] = []

    def add(self, sequences: Sequence[int], span: range, seconds: float) -> None:
        """After all that the ranks of ``span`` have; they start together."""
        end, step = max(self.ready[r] for r in span) + seconds, max(self.following[r] for r in span)
        for r in span:
            self.ready[r], self.following[r] = end, step + 1
        self.found.append(MicroBatch(tuple(sorted(sequences)), span.start, len(span), step, seconds))

    def fill(self, rank: int, until: float, short: list[_Short]) -> None:
        """Packs of ``short``, longest first, for what ``rank`` would wait."""
        while short:
            free, left = self.capacity, until - self.ready[rank] - self.cost.c
            if short[-1].seconds > left:
                return
            taken: list[_Short] = []
            rest: list[_Short] = []
            for one in short:
                if one.seconds <= left and one.length <= free:
                    taken.append(one)
                    free, left = free - one.length, left - one.seconds
                else:
                    rest.append(one)
            short[:] = rest
            seconds = self.cost.c + sum(one.seconds for one in taken)
            self.add([one.number for one in taken], range(rank, rank + 1), seconds)

    def pack(self, short: list[_Short]) -> None:
        """Each to the rank that is done with it first, into the fullest of its new packs that has room."""
        packs: dict[int, list[_Pack]] = {r: [] for r in self.ranks}
        ready = dict(self.ready)
        for one in short:
            best, into, seconds = (float("inf"), -1), -1, one.seconds
            for rank in sorted(self.ranks, key=lambda r: (ready[r], r)):
                if ready[rank] + seconds >= best[0]:
                    break
                fits = [(p.free, i) for i, p in enumerate(packs[rank]) if p.free >= one.length]
                done = ready[rank] + seconds + (0.0 if fits else self.cost.c)
                if (done, rank) < best:
                    best, into = (done, rank), min(fits)[1] if fits else -1
            ready[best[1]] = best[0]
            mine = packs[best[1]]
            if into < 0:
                mine.append(_Pack(self.capacity, seconds=self.cost.c))
            pack = mine[into]
            pack.sequences.append(one.number)
            pack.free -= one.length
            pack.seconds += seconds
        for rank, mine in packs.items():
            for pack in mine:
                self.add(pack.sequences, range(rank, rank + 1), pack.seconds)


def _place(
    order: Sequence[int],
    lengths: Sequence[int],
    needed: Sequence[int],
    ranks: range,
    capacity: int,
    cost: Cost,
    fill: bool,
) -> list[MicroBatch]:
    """Sequences ``order``, longest first, on ``ranks``: those that share first, with ``fill`` packs where a rank would
    wait, the others' packs last."""
    pool = _Pool(ranks, capacity, cost)
    short = [_Short(k, lengths[k], cost(lengths[k])) for k in order if needed[k] == 1]
    for k in order:
        d = needed[k]
        if d == 1:
            continue
        ready = pool.ready
        first = min(
            range(ranks.start, ranks.stop - d + 1),
            # Soonest, then where the ranks wait least.
            key=lambda f: (max(ready[r] for r in range(f, f + d)), -sum(ready[r] for r in range(f, f + d)), f),
        )
        span = range(first, first + d)
        start = max(ready[r] for r in span)
        for r in span if fill else ():
            pool.fill(r, start, short)
        pool.add([k], span, cost(lengths[k], d) + cost.c)
    pool.pack(short)
    return pool.found
