"""Triton kernels of S2-Attention: a tile is a block of the pattern, and hidden blocks are never looked at.

Same contract as :func:`trainwright.models.ops.s2_attention.s2_attention`, without queries that follow a cache. Forward,
a program owns a block of queries of one head and goes over the visible blocks of keys with a running maximum and a
rescaled sum (online softmax, arXiv:1805.02867). Backward, one kernel does the same again for dQ, and in another a
program owns a block of keys and goes over the blocks of queries that see it, for all query heads that share it. Runs on
the CPU under ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainwright.models.ops.s2_attention import Segment
from trainwright.models.ops.s2_pattern import Pattern


@dataclass
class BlockTable:
    """The blocks of all documents: int32 ``[n, 3]`` of the slot (rows laid end to end) at which the block's document
    starts, the one after its end, and the number of the block in it; and of each head its residue, -1 for dense."""

    blocks: Tensor
    residues: Tensor
    pattern: Pattern


def block_table(pattern: Pattern, segments: Sequence[Segment], length: int, device: torch.device) -> BlockTable:
    rows = []
    for s in segments:
        for row in range(s.row, s.row + s.rows):
            start, stop = row * length + s.start, row * length + s.stop
            rows += [(start, stop, i) for i in range(-(-(stop - start) // pattern.block_size))]
    residues = [-1 if r is None else r for r in pattern.residues]
    return BlockTable(
        torch.tensor(rows, dtype=torch.int32).to(device), torch.tensor(residues, dtype=torch.int32).to(device), pattern
    )


@triton.jit
def _load(base: Any, first: Any, stop: Any, stride: Any, width: Any, SIZE: tl.constexpr, WIDTH: tl.constexpr) -> Any:
    """``[SIZE, WIDTH]`` of the slots ``first ..`` of a head, 0 outside."""
    slots = first + tl.arange(0, SIZE)
    columns = tl.arange(0, WIDTH)
    inside = (slots[:, None] < stop) & (columns[None, :] < width)
    return tl.load(base + slots[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _scores(q: Any, k: Any, i: Any, j: Any, start: Any, stop: Any, scale: Any, SIZE: tl.constexpr) -> Any:
    """Of query block i over key block j <= i, -inf where a query does not see a key."""
    queries = start + i * SIZE + tl.arange(0, SIZE)
    keys = start + j * SIZE + tl.arange(0, SIZE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return tl.where((keys[None, :] <= queries[:, None]) & (keys[None, :] < stop), scores, float("-inf"))


@triton.jit
def _visible(n: Any, i: Any, residue: Any, LOCAL: tl.constexpr, STRIDE: tl.constexpr) -> Any:
    """Number of the n-th visible key block of query block i: those from afar first."""
    far = tl.maximum(i - LOCAL + 1, 0)
    count = (tl.maximum(far - residue, 0) + STRIDE - 1) // STRIDE
    return tl.where(residue < 0, n, tl.where(n < count, residue + n * STRIDE, far + n - count))


@triton.jit
def _count(i: Any, residue: Any, LOCAL: tl.constexpr, STRIDE: tl.constexpr) -> Any:
    far = tl.maximum(i - LOCAL + 1, 0)
    count = (tl.maximum(far - residue, 0) + STRIDE - 1) // STRIDE
    return tl.where(residue < 0, i + 1, count + i + 1 - far)


@triton.jit
def _forward_kernel(
    q: Any, k: Any, v: Any, out: Any, lse: Any,  # [N, H, hd], [N, Hkv, hd] twice, [N, H, hd], [H, N]
    table: Any, residues: Any, slots: Any, heads: Any, kv_heads: Any, width: Any, scale: Any,
    SIZE: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    start, stop, i = tl.load(table + block * 3), tl.load(table + block * 3 + 1), tl.load(table + block * 3 + 2)
    kv = head // (heads // kv_heads)
    residue = tl.load(residues + kv)
    stride, kv_stride = heads * width, kv_heads * width
    first = start + i * SIZE
    x = _load(q + head * width, first, stop, stride, width, SIZE, WIDTH)
    top = tl.full([SIZE], float("-inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    acc = tl.zeros([SIZE, WIDTH], tl.float32)
    for n in range(0, _count(i, residue, LOCAL, STRIDE)):
        j = _visible(n, i, residue, LOCAL, STRIDE)
        keys = _load(k + kv * width, start + j * SIZE, stop, kv_stride, width, SIZE, WIDTH)
        values = _load(v + kv * width, start + j * SIZE, stop, kv_stride, width, SIZE, WIDTH)
        scores = _scores(x, keys, i, j, start, stop, scale, SIZE)
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        top = new_top
    rows = first + tl.arange(0, SIZE)
    columns = tl.arange(0, WIDTH)
    tl.store(lse + head.to(tl.int64) * slots + rows, top + tl.log(total), mask=rows < stop)
    at = out + rows[:, None].to(tl.int64) * stride + head * width + columns[None, :]
    acc = acc / total[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(rows[:, None] < stop) & (columns[None, :] < width))


@triton.jit
def _grad_scores(
    x: Any, keys: Any, values: Any, g: Any, sums: Any, delta: Any, i: Any, j: Any, start: Any, stop: Any, scale: Any,
    SIZE: tl.constexpr,
) -> Any:  # fmt: skip
    """Weights and the gradient of the scores of query block i over key block j."""
    p = tl.exp(_scores(x, keys, i, j, start, stop, scale, SIZE) - sums[:, None])
    dp = tl.dot(g, tl.trans(values), input_precision="ieee")
    return p, p * (dp - delta[:, None]) * scale


@triton.jit
def _query_kernel(
    q: Any, k: Any, v: Any, grad: Any, lse: Any, delta: Any, dq: Any,
    table: Any, residues: Any, slots: Any, heads: Any, kv_heads: Any, width: Any, scale: Any,
    SIZE: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    start, stop, i = tl.load(table + block * 3), tl.load(table + block * 3 + 1), tl.load(table + block * 3 + 2)
    kv = head // (heads // kv_heads)
    residue = tl.load(residues + kv)
    stride, kv_stride = heads * width, kv_heads * width
    first = start + i * SIZE
    rows = first + tl.arange(0, SIZE)
    x = _load(q + head * width, first, stop, stride, width, SIZE, WIDTH)
    g = _load(grad + head * width, first, stop, stride, width, SIZE, WIDTH)
    sums = tl.load(lse + head.to(tl.int64) * slots + rows, mask=rows < stop, other=0.0)
    products = tl.load(delta + head.to(tl.int64) * slots + rows, mask=rows < stop, other=0.0)
    acc = tl.zeros([SIZE, WIDTH], tl.float32)
    for n in range(0, _count(i, residue, LOCAL, STRIDE)):
        j = _visible(n, i, residue, LOCAL, STRIDE)
        keys = _load(k + kv * width, start + j * SIZE, stop, kv_stride, width, SIZE, WIDTH)
        values = _load(v + kv * width, start + j * SIZE, stop, kv_stride, width, SIZE, WIDTH)
        _, ds = _grad_scores(x, keys, values, g, sums, products, i, j, start, stop, scale, SIZE)
        acc += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
    columns = tl.arange(0, WIDTH)
    at = dq + rows[:, None].to(tl.int64) * stride + head * width + columns[None, :]
    tl.store(at, acc.to(dq.dtype.element_ty), mask=(rows[:, None] < stop) & (columns[None, :] < width))


@triton.jit
def _key_kernel(
    q: Any, k: Any, v: Any, grad: Any, lse: Any, delta: Any, dk: Any, dv: Any,
    table: Any, residues: Any, slots: Any, heads: Any, kv_heads: Any, width: Any, scale: Any,
    SIZE: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    block, kv = tl.program_id(0), tl.program_id(1)
    start, stop, j = tl.load(table + block * 3), tl.load(table + block * 3 + 1), tl.load(table + block * 3 + 2)
    residue = tl.load(residues + kv)
    group = heads // kv_heads
    stride, kv_stride = heads * width, kv_heads * width
    first = start + j * SIZE
    keys = _load(k + kv * width, first, stop, kv_stride, width, SIZE, WIDTH)
    values = _load(v + kv * width, first, stop, kv_stride, width, SIZE, WIDTH)
    key_acc = tl.zeros([SIZE, WIDTH], tl.float32)
    value_acc = tl.zeros([SIZE, WIDTH], tl.float32)
    last = (stop - start + SIZE - 1) // SIZE
    near = (residue >= 0) & (j % STRIDE != residue)
    last = tl.where(near, tl.minimum(last, j + LOCAL), last)
    for member in range(0, group):
        head = kv * group + member
        for i in range(j, last):
            rows = start + i * SIZE + tl.arange(0, SIZE)
            x = _load(q + head * width, start + i * SIZE, stop, stride, width, SIZE, WIDTH)
            g = _load(grad + head * width, start + i * SIZE, stop, stride, width, SIZE, WIDTH)
            sums = tl.load(lse + head.to(tl.int64) * slots + rows, mask=rows < stop, other=float("inf"))
            products = tl.load(delta + head.to(tl.int64) * slots + rows, mask=rows < stop, other=0.0)
            p, ds = _grad_scores(x, keys, values, g, sums, products, i, j, start, stop, scale, SIZE)
            value_acc += tl.dot(tl.trans(p).to(g.dtype), g, input_precision="ieee")
            key_acc += tl.dot(tl.trans(ds).to(x.dtype), x, input_precision="ieee")
    rows = first + tl.arange(0, SIZE)
    columns = tl.arange(0, WIDTH)
    at = rows[:, None].to(tl.int64) * kv_stride + kv * width + columns[None, :]
    inside = (rows[:, None] < stop) & (columns[None, :] < width)
    tl.store(dk + at, key_acc.to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, value_acc.to(dv.dtype.element_ty), mask=inside)


class _S2Triton(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: BlockTable) -> tuple[Tensor, Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, length, heads, width = q.shape
        out = torch.empty_like(q)
        lse = q.new_empty(heads, batch * length, dtype=torch.float32)
        ctx.table, ctx.sizes = table, (batch * length, heads, k.shape[2], width, width**-0.5)
        grid = (table.blocks.shape[0], heads)
        _forward_kernel[grid](q, k, v, out, lse, table.blocks, table.residues, *ctx.sizes, **_tiles(table, width))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse.view(heads, batch, length).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        table, sizes = ctx.table, ctx.sizes
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1).flatten(0, 1).T.contiguous()  # [H, N]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        blocks, tiles = table.blocks.shape[0], _tiles(table, q.shape[-1])
        shared = (q, k, v, grad, lse, delta)
        _query_kernel[(blocks, q.shape[2])](*shared, dq, table.blocks, table.residues, *sizes, **tiles)
        _key_kernel[(blocks, k.shape[2])](*shared, dk, dv, table.blocks, table.residues, *sizes, **tiles)
        return dq, dk, dv, None


def _tiles(table: BlockTable, width: int) -> dict[str, int]:
    pattern = table.pattern
    return {
        "SIZE": pattern.block_size,
        "LOCAL": pattern.local_blocks,
        "STRIDE": pattern.stride,
        "WIDTH": max(16, triton.next_power_of_2(width)),
    }


def s2_attention_triton(q: Tensor, k: Tensor, v: Tensor, table: BlockTable) -> tuple[Tensor, Tensor]:
    """``q [B, T, H, hd]``, ``k, v [B, T, Hkv, hd]`` of one dtype -> output ``[B, T, H, hd]``, log-sum-exp ``[B, H, T]``
    (float32, no gradient). Every slot lies in one document of ``table``."""
    return cast(tuple[Tensor, Tensor], _S2Triton.apply(q.to(v.dtype), k.to(v.dtype), v, table))
