"""Which documents of a row are cut over all ranks and which stay whole: the planner of FlashCP.

A row holds documents of d_1 .. d_K tokens, sum S, for R ranks; attention stays inside a document.

- Per-Doc: the document is cut into 2 R chunks, rank r takes chunks r and 2 R - 1 - r: equal tokens and equal work.
- Whole-Doc: one rank has the document; none of its keys travel.

Keys travel only to ranks that hold a later chunk of the same document. Chunk c < R goes to the R - 1 others, chunk
c >= R of owner o = 2 R - 1 - c to the o ranks below it: 1.5 R (R - 1) sends of a chunk, 3/4 of an all-gather's.

Search: documents by length, the q longest Per-Doc, the rest whole, each in turn to the rank with the least attention
work (pairs of tokens) among those that stay within (1 + eps) S / R tokens; then pairwise swaps of whole documents while
they lower the largest work. Kept is the plan that sends least with a largest work of at most 1.05 of the mean. Then
each cut document is tried whole again, as the q longest are not always the cheapest to cut.

FlashCP, arXiv:2606.08476, of which we know the abstract: the details above are ours. Documents too short for 2 R chunks
of ``min_chunk`` tokens stay whole, unless no plan is even without cutting them. Chunks of a document whose length 2 R
does not divide differ by one token.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CUT = -1  # home of a document that lies on all ranks


def chunk(length: int, ranks: int, index: int) -> range:
    """Tokens of the ``index``-th of 2 ``ranks`` chunks of a document; the first ones are one token longer."""
    size, longer = divmod(length, 2 * ranks)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


def chunks_of(length: int, ranks: int, rank: int) -> list[range]:
    """The two chunks of a document that a rank holds, in order; of one rank, the document."""
    if ranks == 1:
        return [range(length)]
    return [chunk(length, ranks, rank), chunk(length, ranks, 2 * ranks - 1 - rank)]


@functools.lru_cache(maxsize=4096)
def _cut_shares(length: int, ranks: int) -> tuple[tuple[int, int, int], ...]:
    """Per rank: tokens, pairs of tokens and sends of a token's keys, of a document that is cut."""
    found = []
    for rank in range(ranks):
        first, second = chunks_of(length, ranks, rank)
        # What has a token on no rank is sent to none.
        later_first = sum(1 for p in range(ranks) if p != rank and len(chunk(length, ranks, 2 * ranks - 1 - p)))
        later_second = sum(1 for p in range(rank) if len(chunk(length, ranks, 2 * ranks - 1 - p)))
        sent = len(first) * later_first + len(second) * later_second
        found.append((len(first) + len(second), _pairs(first) + _pairs(second), sent))
    return tuple(found)


def _pairs(span: range) -> int:
    """Pairs of a token in ``span`` and one up to it in its document."""
    return (span.stop * (span.stop + 1) - span.start * (span.start + 1)) // 2


@dataclass(frozen=True)
class Plan:
    """Where the documents of a row lie. ``homes[k]``: the rank of a whole document, or :data:`CUT`."""

    lengths: tuple[int, ...]
    ranks: int
    homes: tuple[int, ...]

    @property
    def cut(self) -> tuple[int, ...]:
        return tuple(k for k, home in enumerate(self.homes) if home == CUT)

    def pieces(self, rank: int) -> Iterator[tuple[int, range]]:
        """Of each document in order the stretches of its tokens that ``rank`` holds."""
        for k, (length, home) in enumerate(zip(self.lengths, self.homes, strict=True)):
            if home == rank:
                yield k, range(length)
            elif home == CUT:
                for span in chunks_of(length, self.ranks, rank):
                    if len(span):
                        yield k, span

    def _sums(self, which: int) -> list[int]:
        out = [0] * self.ranks
        for length, home in zip(self.lengths, self.homes, strict=True):
            if home == CUT:
                for rank, share in enumerate(_cut_shares(length, self.ranks)):
                    out[rank] += share[which]
            else:
                out[home] += (length, length * (length + 1) // 2, 0)[which]
        return out

    def tokens(self) -> list[int]:
        """Per rank."""
        return self._sums(0)

    def work(self) -> list[int]:
        """Per rank: pairs of tokens that attention looks at."""
        return self._sums(1)

    def sent(self) -> list[int]:
        """Per rank: tokens whose keys and values it sends, counted once per receiver."""
        return self._sums(2)

    @property
    def imbalance(self) -> float:
        """Largest work over mean work."""
        work = self.work()
        return max(work) * self.ranks / max(sum(work), 1)

    def digest(self) -> int:
        """63 bits that differ between plans; all ranks have to have the same."""
        text = repr((self.lengths, self.ranks, self.homes)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Costs:
    """Seconds on one rank, for the plan that takes the least time instead of sending the least."""

    pair: float  # attention of a pair of tokens
    token: float  # the linear layers, a token
    send: float  # keys and values of a token to one rank

    def of(self, plan: Plan) -> float:
        """The slowest rank, and what of its sends the attention within its own chunks does not hide."""
        compute = max(w * self.pair + t * self.token for w, t in zip(plan.work(), plan.tokens(), strict=True))
        local = [0] * plan.ranks
        for rank in range(plan.ranks):
            local[rank] = sum(len(s) * (len(s) + 1) // 2 for _, s in plan.pieces(rank))
        exposed = max(s * self.send - w * self.pair for s, w in zip(plan.sent(), local, strict=True))
        return compute + max(exposed, 0.0)


def check(lengths: Sequence[int], ranks: int, total: int | None = None) -> None:
    """Raises ValueError for lengths that are no row of ``total`` tokens."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks} should be at least 1")
    for k, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"document {k} has {length} tokens; leave empty documents out")
    if total is not None and sum(lengths) != total:
        raise ValueError(f"documents have {sum(lengths)} tokens together, the row has {total}")


def per_document(lengths: Sequence[int], ranks: int) -> Plan:
    """Every document is cut (q = K)."""
    check(lengths, ranks)
    return Plan(tuple(lengths), ranks, (CUT,) * len(lengths) if ranks > 1 else (0,) * len(lengths))


def make_plan(
    lengths: Sequence[int],
    ranks: int,
    *,
    total: int | None = None,
    imbalance: float = 1.05,
    slack: Sequence[float] = (0.0, 0.02, 0.05, 0.1),
    min_chunk: int = 128,
    costs: Costs | None = None,
) -> Plan:
    """The plan of a row of documents, see the module. The same on every rank that passes the same.

    total      tokens of the row, to be checked
    imbalance  largest over mean attention work that is even enough
    slack      eps: tokens of a rank beyond the mean, tried in turn
    min_chunk  tokens below which a chunk is not worth a call of the kernel
    costs      keep the plan that takes the least time; None: that sends least

    Raises ValueError for lengths, ranks or limits that make no sense.
    """
    check(lengths, ranks, total)
    if min(slack, default=-1.0) < 0:
        raise ValueError(f"slack={list(slack)} should be numbers of at least 0")
    if imbalance < 1:
        raise ValueError(f"imbalance={imbalance} is below 1, where all ranks have the same work")
    lengths = tuple(lengths)
    if ranks == 1 or not lengths:
        return Plan(lengths, ranks, (0,) * len(lengths))
    order = sorted(range(len(lengths)), key=lambda k: (-lengths[k], k))
    tried: list[Plan] = []
    for shortest in sorted({max(min_chunk, 1), 1}, reverse=True):  # below min_chunk only where nothing else is even
        can_cut = [k for k in order if lengths[k] >= 2 * ranks * shortest]
        for q in range(len(can_cut) + 1):
            cut = frozenset(can_cut[:q])
            plan = _best_slack(lengths, ranks, cut, order, slack, imbalance)
            if costs is not None:  # what a rank has beyond the mean is in its seconds
                tried += [p for p in [_spread(lengths, ranks, cut, order, None)] if p is not None]
            if plan is None:
                continue
            tried.append(plan)
            if costs is None and plan.imbalance <= imbalance:
                return _uncut(plan, order, slack, imbalance)
        if costs is not None and tried:
            return min(tried, key=costs.of)
    if not tried:  # documents too long for a rank and too short to cut: no limit of tokens
        tried = [p for p in [_spread(lengths, ranks, frozenset(), order, None)] if p is not None]
    return min(tried, key=lambda p: (p.imbalance, sum(p.sent())))


def _best_slack(
    lengths: tuple[int, ...],
    ranks: int,
    cut: frozenset[int],
    order: Sequence[int],
    slack: Sequence[float],
    imbalance: float,
) -> Plan | None:
    """The most even plan with these documents cut; the first that is even enough."""
    best: Plan | None = None
    for eps in slack:
        limit = int((1 + eps) * sum(lengths) / ranks)
        if -(-sum(lengths) // ranks) > limit:
            limit += 1  # lengths that the ranks do not divide
        plan = _spread(lengths, ranks, cut, order, limit)
        if plan is None:
            continue
        plan = _swapped(plan, limit, imbalance)
        if best is None or plan.imbalance < best.imbalance:
            best = plan
        if best.imbalance <= imbalance:
            break
    return best


def _spread(
    lengths: tuple[int, ...], ranks: int, cut: frozenset[int], order: Sequence[int], limit: int | None
) -> Plan | None:
    """Whole documents, longest first, to the rank with the least work that has room; None where none has."""
    homes = [CUT if k in cut else 0 for k in range(len(lengths))]
    start = Plan(tuple(lengths[k] for k in sorted(cut)), ranks, (CUT,) * len(cut))
    tokens, work = start.tokens(), start.work()
    for k in order:
        if k in cut:
            continue
        room = [r for r in range(ranks) if limit is None or tokens[r] + lengths[k] <= limit]
        if not room:
            return None
        home = min(room, key=lambda r: (work[r], tokens[r], r))
        homes[k] = home
        tokens[home] += lengths[k]
        work[home] += lengths[k] * (lengths[k] + 1) // 2
    return Plan(lengths, ranks, tuple(homes))


def _swapped(plan: Plan, limit: int, imbalance: float) -> Plan:
    """While the largest work is too much: trade a whole document of that rank for a smaller one, or give it away."""
    lengths, ranks = plan.lengths, plan.ranks
    homes, tokens, work = list(plan.homes), plan.tokens(), plan.work()
    pairs = [n * (n + 1) // 2 for n in lengths]
    enough = imbalance * sum(work) / ranks
    for _ in range(4 * len(lengths)):
        top = max(range(ranks), key=lambda r: (work[r], -r))
        if work[top] <= enough:
            break
        best: tuple[int, int, int, int] | None = None  # the larger of both works, then who
        for i in (k for k, h in enumerate(homes) if h == top):
            for j in (k for k, h in enumerate(homes) if h not in (top, CUT)):
                less = pairs[i] - pairs[j]
                other = homes[j]
                if less <= 0 or work[other] + less >= work[top]:
                    continue
                if tokens[other] + lengths[i] - lengths[j] <= limit and tokens[top] + lengths[j] - lengths[i] <= limit:
                    best = min(best or (work[top], 0, 0, 0), (max(work[top] - less, work[other] + less), i, j, other))
            for other in range(ranks):
                if other != top and work[other] + pairs[i] < work[top] and tokens[other] + lengths[i] <= limit:
                    best = min(
                        best or (work[top], 0, 0, 0),
                        (max(work[top] - pairs[i], work[other] + pairs[i]), i, -1, other),
                    )
        if best is None or best[0] >= work[top]:
            break
        _, i, j, other = best
        for k, to, back in ((i, other, top), (j, top, other)):
            if k >= 0:
                homes[k] = to
                tokens[to], tokens[back] = tokens[to] + lengths[k], tokens[back] - lengths[k]
                work[to], work[back] = work[to] + pairs[k], work[back] - pairs[k]
    return Plan(lengths, ranks, tuple(homes))


def _uncut(plan: Plan, order: Sequence[int], slack: Sequence[float], imbalance: float) -> Plan:
    """Cut documents made whole again, the longest first, where the work stays even."""
    for k in order:
        if k in plan.cut:
            fewer = _best_slack(plan.lengths, plan.ranks, frozenset(plan.cut) - {k}, order, slack, imbalance)
            if fewer is not None and fewer.imbalance <= imbalance:
                plan = fewer
    return plan
