"""Causal attention over packed documents on the CPU, block of queries by block of queries.

torch's fused CPU kernel runs at a third of the matrix-multiply peak at training shapes (head width 64, rows of 256 to
1024 tokens). Here a block of queries takes the scores with all the keys it can see in one batched product, which runs
near the peak; keys after the block, before the first visible document or outside the window are never touched. The
masked softmax and its backward pass are fused kernels. As in FlashAttention (arXiv:2205.14135) only the log-sum-exp
is kept, and the backward pass makes the weights again::

    P = exp(scale Q K^T - lse)     dV = P^T dO     dP = dO V^T     dS = scale P (dP - rowsum(P dP))
    dQ = dS K                      dK = dS^T Q
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainwright.models.ops import native

QUERIES = 64  # per block: smaller wastes less beyond the diagonal, larger products run faster
SCORES_BYTES = 2 << 20  # scores of a block of a few rows stay in the cache between its products


def first_visible(bounds: Tensor | None, batch: int, length: int, window: int = 0) -> Tensor | None:
    """First slot that each position of ``batch`` rows of ``length`` tokens may attend to, int32 ``[B, T]``.

    ``bounds`` int64 holds the starts of the documents in the rows laid end to end (each row starts one), and may end
    with ``batch * length``; None: one document a row. ``window`` counts the tokens that a query sees, itself
    included; 0: all. None where every position may attend to the whole row before it.
    """
    if bounds is None and not window:
        return None
    slots = torch.arange(length, dtype=torch.int32).expand(batch, length)
    first = torch.zeros(batch, length, dtype=torch.int32)
    if bounds is not None:
        starts = bounds[bounds < batch * length]
        marks = torch.zeros(batch * length, dtype=torch.int32)
        marks[starts] = (starts % length).int()
        first = marks.view(batch, length).cummax(1).values
    return torch.maximum(first, slots - (window - 1)) if window else first


def causal_attention_reference(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None = None) -> Tensor:
    """:func:`causal_attention` by SDPA with a boolean mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None
    if first is not None:
        slots = torch.arange(q.shape[2], device=q.device)
        mask = ((slots <= slots[:, None]) & (slots >= first[:, :, None])).unsqueeze(1)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    ).transpose(1, 2)


def _heads_first(x: Tensor) -> Tensor:
    """``[B, T, H, hd]`` as contiguous ``[B, H, T, hd]``; no copy of what :func:`apply_rope` gives."""
    return x.transpose(1, 2).contiguous()


class _Block:
    """One block of queries ``[i, e)`` of the rows ``[b, b_end)``, with the keys ``[lo, e)`` that any of them sees."""

    def __init__(self, shape: tuple[int, int, int, int, int], rows: slice, i: int, e: int, lo: int):
        self.heads, self.kv_heads, self.length, self.width = shape[1:]
        self.rows, self.i, self.e, self.lo = rows, i, e, lo
        self.batch = rows.stop - rows.start
        self.groups = self.batch * self.kv_heads  # batch of the products: query heads that share keys go together

    def queries(self, q: Tensor) -> Tensor:
        """``q [B, H, T, hd]`` -> ``[b K, G R, hd]``; a view without grouped heads."""
        x = q[self.rows, :, self.i : self.e]
        if self.heads == self.kv_heads:
            return x.flatten(0, 1)
        return x.reshape(self.groups, -1, self.width)

    def keys(self, k: Tensor) -> Tensor:
        """``k [B, K, T, hd]`` -> view ``[b K, C, hd]``."""
        return k[self.rows, :, self.lo : self.e].flatten(0, 1)

    def scores(self, buffer: Tensor) -> Tensor:
        """A contiguous ``[b K, G R, C]`` of ``buffer``."""
        rows, columns = self.heads // self.kv_heads * (self.e - self.i), self.e - self.lo
        return buffer[: self.groups * rows * columns].view(self.groups, rows, columns)

    def sizes(self) -> tuple[int, ...]:
        """b, h, r, c, i, lo, t of the kernels."""
        return self.batch, self.heads, self.e - self.i, self.e - self.lo, self.i, self.lo, self.length


def _blocks(q: Tensor, kv_heads: int, first: Tensor | None) -> Iterator[_Block]:
    batch, heads, length, width = q.shape
    low = None if first is None else first.amin(0) if batch == 1 else first
    per_row = heads * min(QUERIES, length) * length * q.element_size()
    step = max(1, min(batch, SCORES_BYTES // per_row))
    for b in range(0, batch, step):
        rows = slice(b, min(b + step, batch))
        starts = None if low is None else (low if batch == 1 else low[rows].amin(0)).tolist()
        for i in range(0, length, QUERIES):
            e = min(i + QUERIES, length)
            # What the first query of a block sees bounds what the others see: starts never go back. Whole vectors.
            lo = 0 if starts is None else starts[i] & ~15
            yield _Block((batch, heads, kv_heads, length, width), rows, i, e, lo)


def _buffer(blocks: list[_Block], q: Tensor) -> Tensor:
    return q.new_empty(max(b.groups * (b.heads // b.kv_heads) * (b.e - b.i) * (b.e - b.lo) for b in blocks))


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None) -> Tensor:
        out = q.new_empty(q.shape)
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        lse = q.new_empty(q.shape[:3])
        scale = 1 / math.sqrt(q.shape[-1])
        blocks = list(_blocks(q, k.shape[1], first))
        buffer = _buffer(blocks, q)
        for b in blocks:
            p = torch.bmm(b.queries(q), b.keys(k).transpose(1, 2), out=b.scores(buffer))
            seen = None if first is None else first[b.rows]
            native.call("attention_weights", p, lse[b.rows], seen, *b.sizes(), scale)
            o = torch.bmm(p, b.keys(v)).view(b.batch, b.heads, b.e - b.i, b.width)
            out[b.rows, b.i : b.e] = o.transpose(1, 2)
        ctx.save_for_backward(q, k, v, lse, first)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, lse, first = ctx.saved_tensors
        grad = _heads_first(grad)
        scale = 1 / math.sqrt(q.shape[-1])
        dq = q.new_empty(grad.transpose(1, 2).shape)  # [B, T, H, hd]
        dk, dv = (k.new_zeros(k.transpose(1, 2).shape) for _ in range(2))  # [B, T, K, hd]
        blocks = list(_blocks(q, k.shape[1], first))
        buffers = [_buffer(blocks, q) for _ in range(2)]
        for b in blocks:
            queries, keys, go = b.queries(q), b.keys(k), b.queries(grad)
            p = torch.bmm(queries, keys.transpose(1, 2), out=b.scores(buffers[0]))
            ds = torch.bmm(go, b.keys(v).transpose(1, 2), out=b.scores(buffers[1]))
            seen = None if first is None else first[b.rows]
            native.call("attention_weights_backward", p, ds, lse[b.rows], seen, *b.sizes(), scale)
            kv = (b.batch, b.kv_heads, b.e - b.lo, b.width)
            dv[b.rows, b.lo : b.e] += torch.bmm(p.transpose(1, 2), go).view(kv).transpose(1, 2)
            dk[b.rows, b.lo : b.e] += torch.bmm(ds.transpose(1, 2), queries).view(kv).transpose(1, 2)
            part = torch.bmm(ds, keys).view(b.batch, b.heads, b.e - b.i, b.width)
            dq[b.rows, b.i : b.e] = part.transpose(1, 2)
        return dq, dk, dv, None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None = None) -> Tensor:
    """``q [B, T, H, hd]`` over ``k, v [B, T, K, hd]``, H a multiple of K -> ``[B, T, H, hd]``; scores / sqrt(hd).

    The query at slot i sees the keys at slots ``first[b, i] .. i``; ``first`` int32 ``[B, T]`` comes from
    :func:`first_visible`, never falls along a row and never exceeds i; None: all slots up to i.
    """
    if native.usable(q, k, v) and q.numel() and q.shape[1] == k.shape[1]:
        return _CausalAttention.apply(q, k, v, first)
    return causal_attention_reference(q, k, v, first)
