"""Exact attention of ranks that hold pieces of documents: each gets the keys that its queries see and no others.

A document lies on D neighbouring ranks: rank p of them has chunks p and 2 D - 1 - p of 2 D (planning/flashcp.py), for
D = 1 the document. A rank sends a chunk's keys and values, in one message with all that the other needs, to ranks that
hold a later chunk of the same document (within the window). It lays what comes in and its own in order of the document:

    keys     [ chunk 0 | chunk 1 | ... | chunk before its last ]     of each document that it shares
    queries  piece a:b sees keys 0:a all, then itself causally

so that every pair of pieces is one call of the kernel without a mask. Its own part is computed while the keys are under
way. Backward, the gradients of received keys and values go back to where they came from. Sums are kept in float32
(float64 for float64) and rounded once; so is what goes back, as it is sent.

Which piece a slot belongs to travels in ``doc_ids``, as one number per document: what :func:`encode` makes. Every rank
of a document knows from it what all others hold, so nothing is asked for and nothing waits but for keys. A document
that was padding in its row is laid out like others, with a number below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.core.batch import PADDING, Batch
from trainwright.core.distributed import all_gather_single
from trainwright.core.errors import ConfigError, ModelError
from trainwright.parallel.context.base import ContextParallel
from trainwright.parallel.context.host import moved, on_host
from trainwright.parallel.context.ring_attention import Pair, _merge, _wait, block_backward, block_forward, wider
from trainwright.planning.flashcp import chunks_of

_BITS = {"index": 21, "length": 22, "first": 10, "ranks": 10}  # 63 in all
LONGEST, MOST_RANKS = 2 ** _BITS["length"] - 1, 2 ** _BITS["ranks"] - 1


@dataclass(frozen=True)
class Document:
    """``index`` numbers the documents of a micro-batch, the same on all ranks; it lies on ``ranks`` ranks of the group
    from ``first`` on. ``padding``: no figure counts its tokens."""

    index: int
    length: int
    first: int = 0
    ranks: int = 1
    padding: bool = False

    def chunks(self, rank: int) -> list[range]:
        """What ``rank`` of the group holds, without empty chunks."""
        return [c for c in chunks_of(self.length, self.ranks, rank - self.first) if len(c)]


def encode(document: Document) -> int:
    """As a number of ``doc_ids`` (int64). Raises ConfigError for what does not fit."""
    code = 0
    for name, bits in _BITS.items():
        value = getattr(document, name)
        if not 0 <= value < 2**bits:
            raise ConfigError(f"documents here have {name} below {2**bits}, and this is {value}", key="parallel.cp")
        code = code << bits | value
    return PADDING - 1 - code if document.padding else code


def decode(code: int) -> Document:
    """Of a number other than ``PADDING``, which is of slots that hold nothing."""
    found: dict[str, int] = {}
    padding = code < PADDING
    code = PADDING - 1 - code if padding else code
    for name, bits in reversed(_BITS.items()):
        found[name] = code & (2**bits - 1)
        code >>= bits
    return Document(**found, padding=padding)


@dataclass
class PiecePlan:
    """What this rank sends, receives and computes in a layer. Slots count over the rows laid end to end; places count
    in the buffer of keys that are laid in order."""

    early: list[Pair] = field(default_factory=list)  # over its own slots
    late: list[Pair] = field(default_factory=list)  # queries: slots, keys: places
    size: int = 0  # places
    own: tuple[Tensor, Tensor] | None = None  # slots -> places
    send: list[tuple[int, Tensor]] = field(default_factory=list)  # rank of the group, slots
    receive: list[tuple[int, Tensor]] = field(default_factory=list)  # rank of the group, places

    def to(self, device: torch.device) -> PiecePlan:
        def all_moved(items: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
            return [(rank, moved(t, device)) for rank, t in items]

        own = None if self.own is None else (moved(self.own[0], device), moved(self.own[1], device))
        return PiecePlan(self.early, self.late, self.size, own, all_moved(self.send), all_moved(self.receive))


def piece_plan(codes: Sequence[int], counts: Sequence[int], rank: int, window: int, device: torch.device) -> PiecePlan:
    """Of ``rank``, whose slots are runs of ``counts[i]`` slots of ``doc_ids`` ``codes[i]``. ``window`` 0: none.

    Raises ModelError where a run is not what the rank should hold of that document."""
    plan = PiecePlan()
    sends: dict[int, list[int]] = {}
    receives: dict[int, list[int]] = {}
    own: tuple[list[int], list[int]] = ([], [])
    slot = 0
    for code, count in zip(codes, counts, strict=True):
        start, slot = slot, slot + count
        if code == PADDING:
            continue
        document = decode(code)
        mine = document.chunks(rank) if document.first <= rank < document.first + document.ranks else []
        if sum(map(len, mine)) != count:
            raise ModelError(
                f"rank {rank} got {count} tokens of document {document.index}, and holds {sum(map(len, mine))} of its "
                f"{document.length}: doc_ids have to come from the strategy's shard, unchanged"
            )
        slots = {}
        for c in mine:
            slots[c] = start
            plan.early.append(_pair(slice(start, start + len(c)), slice(start, start + len(c)), c, c, window, device))
            start += len(c)
        if document.ranks > 1:
            _share(document, rank, window, slots, plan, sends, receives, own, device)
    if own[0]:
        plan.own = torch.tensor(own[0]), torch.tensor(own[1])
    plan.send = [(r, torch.tensor(s)) for r, s in sorted(sends.items())]
    plan.receive = [(r, torch.tensor(s)) for r, s in sorted(receives.items())]
    return plan.to(device)


def _share(
    document: Document,
    rank: int,
    window: int,
    slots: dict[range, int],
    plan: PiecePlan,
    sends: dict[int, list[int]],
    receives: dict[int, list[int]],
    own: tuple[list[int], list[int]],
    device: torch.device,
) -> None:
    """Enter what this rank and the others of ``document`` need of each other."""
    places: dict[int, list[range]] = {}
    for other in range(document.first, document.first + document.ranks):
        theirs = document.chunks(other)
        places[other] = [c for c in theirs if _needed(c, slots, window)]
        if other != rank:
            for c, start in slots.items():
                if _needed(c, theirs, window):
                    sends.setdefault(other, []).extend(range(start, start + len(c)))
    needed = [c for chunks in places.values() for c in chunks]
    if not needed:
        return
    base = plan.size - min(c.start for c in needed)  # place of the document's token 0
    plan.size = base + max(c.stop for c in needed)
    for other, chunks in places.items():
        for c in chunks:
            into = range(base + c.start, base + c.stop)
            if other == rank:
                own[0].extend(range(slots[c], slots[c] + len(c)))
                own[1].extend(into)
            else:
                receives.setdefault(other, []).extend(into)
    for c, start in slots.items():
        keys = range(max(0, c.start - window + 1) if window else 0, c.start)
        if len(keys):
            q, k = slice(start, start + len(c)), slice(base + keys.start, base + keys.stop)
            plan.late.append(_pair(q, k, c, keys, window, device))


def _needed(keys: range, pieces: Any, window: int) -> bool:
    """Whether a query of any of ``pieces`` sees one of ``keys``, which are another piece of the document."""
    return any(p.start > keys.start and (not window or p.start - (keys.stop - 1) < window) for p in pieces)


def _pair(q: slice, k: slice, queries: range, keys: range, window: int, device: torch.device) -> Pair:
    """Queries and keys of one document, the same or the keys all earlier."""
    same = queries == keys
    if not window or queries.stop - 1 - keys.start < window:
        return Pair(q, k, causal=same)
    here, there = (torch.arange(r.start, r.stop, device=device) for r in (queries, keys))
    back = here[:, None] - there
    return Pair(q, k, mask=((back >= 0) & (back < window))[None, None])


class Exchange:
    """Messages between ranks of a group, at most one each way between two in an exchange."""

    def __init__(self, group: Any):
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)

    def start(
        self, x: Tensor, send: list[tuple[int, Tensor]], receive: list[tuple[int, Tensor]]
    ) -> tuple[list[Tensor], list[Any]]:
        """Begin to send ``x[:, :, i]`` of ``x [2, H, N, hd]`` for each ``(rank, i)`` and to receive as much as the
        indices of ``receive`` name; wait for the returned works."""
        ops, received = [], []
        for rank, index in send:
            ops.append(dist.P2POp(dist.isend, x.index_select(2, index), self.ranks[rank], self.group))
        for rank, index in receive:
            received.append(x.new_empty(*x.shape[:2], index.numel(), x.shape[3]))
            ops.append(dist.P2POp(dist.irecv, received[-1], self.ranks[rank], self.group))
        return received, dist.batch_isend_irecv(ops) if ops else []


class PieceAttention(torch.autograd.Function):
    """``q [B, T, H, hd]``, ``k, v [B, T, Hkv, hd]`` of this rank's slots -> ``[B, T, H, hd]``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: PiecePlan, exchange: Exchange | None, keep: bool
    ) -> Tensor:
        ctx.plan, ctx.exchange, ctx.scale = plan, exchange, q.shape[-1] ** -0.5
        shape = q.shape
        q = _laid(q)  # [1, H, B * T, hd]
        kv = torch.cat([_laid(k), _laid(v)])  # [2, Hkv, B * T, hd]
        arriving = _start_keys(kv, plan, exchange)
        wide = wider(q.dtype)
        out: Tensor = torch.zeros_like(q, dtype=wide)
        lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
        for pair in plan.early:  # the first, and for whole documents the only, keys of these queries
            here, sums = block_forward(q[:, :, pair.q], *_keys(kv, pair), pair, ctx.scale)
            out[:, :, pair.q], lse[:, :, pair.q] = here, sums
        buffer = _laid_in_order(kv, plan, *arriving)
        for pair in plan.late:
            here, sums = block_forward(q[:, :, pair.q], *_keys(buffer, pair), pair, ctx.scale)
            _merge(out[:, :, pair.q], lse[:, :, pair.q], here, sums)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, buffer if keep else None, out, lse)
        return out.transpose(1, 2).reshape(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, kv, buffer, out, lse = ctx.saved_tensors
        plan, exchange = ctx.plan, ctx.exchange
        rows = grad.shape[:2]
        grad = _laid(grad)
        if buffer is None:
            buffer = _laid_in_order(kv, plan, *_start_keys(kv, plan, exchange))
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # padding sees nothing; any finite sum gives gradient 0
        dq, dkv, dbuffer = (torch.zeros_like(x, dtype=wider(x.dtype)) for x in (q, kv, buffer))
        for pairs, keys, dkeys in ((plan.late, buffer, dbuffer), (plan.early, kv, dkv)):
            if pairs is plan.early:
                received, works = _start_gradients(dbuffer.to(kv.dtype), plan, exchange)
            for pair in pairs:
                gq, gk, gv = block_backward(
                    grad[:, :, pair.q], q[:, :, pair.q], *_keys(keys, pair), out[:, :, pair.q], lse[:, :, pair.q],
                    pair, ctx.scale,
                )  # fmt: skip
                dq[:, :, pair.q] += gq
                dkeys[:1, :, pair.k] += gk
                dkeys[1:, :, pair.k] += gv
        _wait(works)
        for (_, slots), part in zip(plan.send, received, strict=True):
            dkv.index_add_(2, slots, part.to(dkv.dtype))
        if plan.own is not None:
            dkv.index_add_(2, plan.own[0], dbuffer.index_select(2, plan.own[1]))
        dk, dv = dkv.to(kv.dtype).split(1)
        dq = dq.to(q.dtype)
        return (*(g.transpose(1, 2).unflatten(1, rows).squeeze(0) for g in (dq, dk, dv)), None, None, None)


def _laid(x: Tensor) -> Tensor:
    """``[B, T, H, hd]`` -> ``[1, H, B * T, hd]``: the rows laid end to end."""
    return x.flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous()


def _keys(kv: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    return kv[:1, :, pair.k], kv[1:, :, pair.k]


def _start_keys(kv: Tensor, plan: PiecePlan, exchange: Exchange | None) -> tuple[list[Tensor], list[Any]]:
    return ([], []) if exchange is None else exchange.start(kv, plan.send, plan.receive)


def _start_gradients(dbuffer: Tensor, plan: PiecePlan, exchange: Exchange | None) -> tuple[list[Tensor], list[Any]]:
    """What was received goes back, what was sent comes back."""
    return ([], []) if exchange is None else exchange.start(dbuffer, plan.receive, plan.send)


def _laid_in_order(kv: Tensor, plan: PiecePlan, received: list[Tensor], works: list[Any]) -> Tensor:
    """Keys and values of the documents that this rank shares, ``[2, Hkv, size, hd]``, when they are there."""
    buffer = kv.new_zeros(*kv.shape[:2], plan.size, kv.shape[3])
    if plan.own is not None:
        buffer.index_copy_(2, plan.own[1], kv.index_select(2, plan.own[0]))
    _wait(works)
    for (_, places), part in zip(plan.receive, received, strict=True):
        buffer.index_copy_(2, places, part)
    return buffer


class PieceContext(ContextParallel):
    """Attention for strategies whose ``shard`` writes :func:`encode` numbers into ``doc_ids``.

    group  process group of the ranks; None: one process
    keep   received keys and values are kept for the backward pass; else they are sent again
    """

    def __init__(self, group: Any, keep: bool = True):
        self.exchange = None if group is None else Exchange(group)
        self.rank = 0 if self.exchange is None else self.exchange.rank
        self.size = 1 if self.exchange is None else self.exchange.size
        self.keep = keep

    def as_rank(self, rank: int, size: int) -> Self:
        """Makes the shards and plans of ``rank`` of ``size`` without a group, for whoever counts what they send."""
        self.rank, self.size = rank, size
        return self

    def plan(self, doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> PiecePlan:
        """Reads ``doc_ids`` on the host; see host.py."""
        if doc_ids is None:
            raise ModelError("this way of spreading tokens needs the doc_ids of its shard, and got none")
        codes, counts = torch.unique_consecutive(on_host(doc_ids).flatten(), return_counts=True)
        return piece_plan(codes.tolist(), counts.tolist(), self.rank, window, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: PiecePlan) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)
        return cast(Tensor, PieceAttention.apply(q, k, v, plan, self.exchange, self.keep))

    def same_on_all(self, digest: int, device: torch.device) -> None:
        """Raises ModelError on every rank where ranks made different plans: they would wait for each other for ever.
        Of a pipeline, on every rank of the columns that meet in a context group."""
        if self.exchange is None:
            return
        found = _digests(digest, self.size, self.exchange.group, device)
        first = _other(found)
        where = f"ranks 0 and {first} of the context group" if first else ""
        if self.stages is not None and self.stages.group is not None:
            # The other stages are told, who would wait for this one.
            found = _digests(-1 if first else digest, self.stages.ranks, self.stages.group, device)
            if not where and _other(found):
                where = f"stages 0 and {_other(found)} of the pipeline"
            elif not where and -1 in found:
                where = "ranks of the context groups"
        if where:
            raise ModelError(
                f"{where} plan different layouts of the same rows; they need the same rows, settings and version"
            )


def _digests(mine: int, ranks: int, group: Any, device: torch.device) -> list[int]:
    every = torch.empty(ranks, dtype=torch.int64, device=device)
    all_gather_single(every, torch.tensor([mine], device=device), group)
    return cast(list[int], every.tolist())


def _other(digests: Sequence[int]) -> int:
    """The first place that has another one than place 0; 0: none has."""
    return next((r for r, d in enumerate(digests) if d != digests[0]), 0)


def taken(batch: Batch, slots: Tensor, codes: Tensor) -> Batch:
    """``slots [B', T']`` of the rows of ``batch`` laid end to end; -1: nothing, weight 0. ``codes`` are the new
    ``doc_ids``. Extras without a token dimension stay as they are."""
    length = batch.tokens.shape[1]
    slots, codes = slots.to(batch.tokens.device), codes.to(batch.tokens.device)
    nothing = slots < 0
    index = slots.clamp(min=0)

    def take(t: Tensor) -> Tensor:
        if t.ndim < 2 or t.shape[1] != length:
            return t
        found = t.flatten(0, 1)[index]
        return found.masked_fill(nothing.view(*nothing.shape, *[1] * (found.ndim - 2)), 0)

    out = batch._map(take)
    out.doc_ids = codes
    return out


def document_lengths(doc_ids: Tensor) -> list[list[int]]:
    """Tokens of each document of each row of ``doc_ids [B, T]``; a change of id ends one."""
    return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in doc_ids.cpu()]


def documents_of_padding(doc_ids: Tensor) -> list[list[bool]]:
    """Which of the :func:`document_lengths` are padding."""
    return [(torch.unique_consecutive(row) < 0).tolist() for row in doc_ids.cpu()]
