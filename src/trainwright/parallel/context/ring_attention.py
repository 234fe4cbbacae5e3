"""Attention over keys and values that go round a ring of ranks, exact, forward and backward.

Rank i holds some slots of every row. In step s it works on the keys and values of rank i - s while those of rank
i - s - 1 arrive; the partial results are merged by their log-sum-exps:

    o = sum_s exp(lse_s - lse) o_s,   lse = log sum_s exp(lse_s)

The backward pass goes round once more with the gradients of keys and values: with the final ``o`` and ``lse`` each
step's gradients are those of the whole softmax. Sums over steps are kept, and gradients travel, in float32 (float64 for
float64) and are rounded once, so that a longer ring is no coarser. Ring Attention, arXiv:2310.01889; the slots are
dealt out in zig-zag (i and 2n - 1 - i of 2n pieces), so that causal attention is the same work on every rank.

A pair of pieces without a visible pair of tokens (the keys come later, or no document lies in both) costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
PLAIN = False  # plain products on the CPU too: what other devices use


@dataclass
class Pair:
    """Queries ``q`` of this rank (a stretch of its slots) over keys ``k`` of another."""

    q: slice
    k: slice
    causal: bool = False  # equal stretches: a query sees the keys up to its own
    mask: Tensor | None = None  # bool [B or 1, 1, Tq, Tk], True where the query sees the key; None: all (or causal)


@dataclass
class RingPlan:
    """What this rank has to do with the keys of each rank, in the order in which they arrive."""

    pairs: list[list[Pair]] = field(default_factory=list)
    local: Any = None  # a plan of models.attention, where all keys are here


def block_forward(q: Tensor, k: Tensor, v: Tensor, pair: Pair, scale: float) -> tuple[Tensor, Tensor]:
    """``q [B, H, Tq, hd]`` over ``k, v [B, Hkv, Tk, hd]`` -> output, in the dtype it was computed in, and log-sum-exp
    ``[B, H, Tq]``.

    Queries that see nothing here give 0 and -inf."""
    if q.device.type == "cpu" and not PLAIN:
        bias = None if pair.mask is None else _bias(pair.mask, q.dtype)
        out, lse = _cpu_forward(q, k, v, 0.0, pair.causal, attn_mask=bias, scale=scale)
        if pair.mask is None:
            return out, lse
        blind = ~pair.mask.any(-1)  # [B or 1, 1, Tq]
        return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))
    scores = _scores(q, k, pair, scale)
    lse = scores.logsumexp(-1)  # [B, Hkv, G, Tq]
    p = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    out = torch.einsum("bhgqk,bhkd->bhgqd", p, v.to(p.dtype))
    return out.flatten(1, 2), lse.flatten(1, 2)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: Pair, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one pair, in the dtype they were computed in, given the final ``out`` and ``lse`` of its queries."""
    if q.device.type == "cpu" and not PLAIN:
        bias = None if pair.mask is None else _bias(pair.mask, q.dtype)
        found: tuple[Tensor, Tensor, Tensor] = _cpu_backward(
            grad, q, k, v, out, lse, 0.0, pair.causal, attn_mask=bias, scale=scale
        )
        return found
    groups = q.shape[1] // k.shape[1]
    p = (_scores(q, k, pair, scale) - lse.unflatten(1, (-1, groups)).unsqueeze(-1)).exp()  # [B, Hkv, G, Tq, Tk]
    g, o, x = (t.unflatten(1, (-1, groups)).to(p.dtype) for t in (grad, out, q))
    dv = torch.einsum("bhgqk,bhgqd->bhkd", p, g)
    dp = torch.einsum("bhgqd,bhkd->bhgqk", g, v.to(p.dtype))
    ds = p * (dp - (g * o).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bhgqk,bhkd->bhgqd", ds, k.to(p.dtype)).flatten(1, 2)
    dk = torch.einsum("bhgqk,bhgqd->bhkd", ds, x)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, pair: Pair, scale: float) -> Tensor:
    """``[B, Hkv, G, Tq, Tk]`` in at least float32, -inf where the query does not see the key."""
    wide = wider(q.dtype)
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q.unflatten(1, (k.shape[1], -1)).to(wide), k.to(wide)) * scale
    mask = pair.mask
    if pair.causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    return scores if mask is None else scores.masked_fill(~mask.unsqueeze(1), float("-inf"))


def wider(dtype: torch.dtype) -> torch.dtype:
    """What sums over several pairs are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


class Ring:
    """The ranks of a group in a circle; what one sends goes to the next."""

    def __init__(self, group: Any):
        self.group = group
        ranks = dist.get_process_group_ranks(group)
        self.size, self.rank = len(ranks), dist.get_rank(group)
        self.next, self.previous = ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]

    def start(self, sent: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Begin to send ``sent`` on, and to receive what has their shapes; wait for the returned works."""
        received = [torch.empty_like(t) for t in sent]
        works = []
        for out, into in zip(sent, received, strict=True):
            works.append(dist.P2POp(dist.isend, out, self.next, self.group))
            works.append(dist.P2POp(dist.irecv, into, self.previous, self.group))
        return received, dist.batch_isend_irecv(works)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


class RingAttention(torch.autograd.Function):
    """``q [B, T, H, hd]``, ``k, v [B, T, Hkv, hd]`` of this rank's slots -> ``[B, T, H, hd]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, ring: Ring) -> Tensor:
        ctx.plan, ctx.ring, ctx.scale = plan, ring, q.shape[-1] ** -0.5
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out, lse = _forward(q, k, v, plan, ring, ctx.scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        grads = _backward(grad.transpose(1, 2).contiguous(), q, k, v, out, lse, ctx.plan, ctx.ring, ctx.scale)
        return (*(g.transpose(1, 2) for g in grads), None, None)


def _forward(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, ring: Ring, scale: float) -> tuple[Tensor, Tensor]:
    wide = wider(q.dtype)
    out: Tensor = torch.zeros_like(q, dtype=wide)
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
    held = [k, v]
    for step in range(ring.size):
        works: list[Any] = []
        if step < ring.size - 1:
            arriving, works = ring.start(held)
        for pair in plan.pairs[step]:
            here, sums = block_forward(q[:, :, pair.q], held[0][:, :, pair.k], held[1][:, :, pair.k], pair, scale)
            _merge(out[:, :, pair.q], lse[:, :, pair.q], here, sums)
        _wait(works)
        if works:
            held = arriving
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, here: Tensor, sums: Tensor) -> None:
    """Add a partial result to ``out, lse``, in place; ``here`` may be narrower."""
    total = torch.logaddexp(lse, sums)
    # -inf - -inf: nothing seen yet
    before, added = ((part - total).exp().nan_to_num(0.0).unsqueeze(-1) for part in (lse, sums))
    out.mul_(before).addcmul_(here.to(out.dtype), added.to(out.dtype))
    lse.copy_(total)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: RingPlan,
    ring: Ring,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = wider(q.dtype)
    dq = torch.zeros_like(q, dtype=wide)
    held = [k, v]
    # Gradients of the keys at hand; they travel with them, and once more at the end, to where the keys are at home.
    carried = [torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)]
    # A query that sees nothing anywhere (padding) has no sum; any finite one gives it the gradient 0.
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    for step in range(ring.size):
        works: list[Any] = []
        if step < ring.size - 1:
            arriving, works = ring.start(held)
        for pair in plan.pairs[step]:
            gq, gk, gv = block_backward(
                grad[:, :, pair.q], q[:, :, pair.q], held[0][:, :, pair.k], held[1][:, :, pair.k],
                out[:, :, pair.q], lse[:, :, pair.q], pair, scale,
            )  # fmt: skip
            dq[:, :, pair.q] += gq
            carried[0][:, :, pair.k] += gk
            carried[1][:, :, pair.k] += gv
        if ring.size > 1:
            carried, sent = ring.start(carried)
            _wait(sent)
        _wait(works)
        if works:
            held = arriving
    return dq.to(q.dtype), carried[0].to(k.dtype), carried[1].to(v.dtype)
