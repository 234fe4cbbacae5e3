"""S2-Attention (arXiv:2407.17678) in plain torch: a reference with a mask, and a CPU path that skips what is not seen.

The pattern is in s2_pattern.py. A query's visible keys are two parts without a common key, and so are those of ranks
that hold different keys; parts are merged by the log-sum-exp of their scores:

    o = sum_p exp(lse_p - lse) o_p        lse = log sum_p exp(lse_p)

On the CPU the near part goes band by band of queries. From afar a head sees blocks r, r + stride, ...: gathered, they
are a prefix that grows by one block every ``stride`` query blocks, so each such stretch of queries is one call of the
fused kernel without a mask. The backward pass goes over the same calls with the merged output and log-sum-exp.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.models.ops.s2_pattern import Pattern, check_blocks

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
BAND = 128  # queries of a near call: more save calls, fewer save masked products


# -- reference --------------------------------------------------------------------------------------------------------


def token_mask(pattern: Pattern, first: Tensor, slots: int) -> Tensor:
    """bool ``[B, heads, T, S]``: what the last T of ``slots`` = S slots see; ``first [B, T]`` is the slot at which the
    document of each starts."""
    queries = torch.arange(slots - first.shape[1], slots, device=first.device)[:, None]
    keys = torch.arange(slots, device=first.device)
    start = first[:, :, None]
    i = (queries - start) // pattern.block_size  # [B, T, 1]
    j = (keys - start) // pattern.block_size  # [B, T, S]
    seen = (keys <= queries) & (keys >= start)
    near = i - j < pattern.local_blocks
    return torch.stack([seen if r is None else seen & (near | (j % pattern.stride == r)) for r in pattern.residues], 1)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``q [B, T, H, hd]`` over ``k, v [B, S, Hkv, hd]`` with bool ``mask [B, Hkv, T, S]`` -> output and log-sum-exp
    ``[B, H, T]``; a query that sees nothing gives 0 and -inf."""
    wide = torch.promote_types(q.dtype, torch.float32)
    x = q.to(wide).unflatten(2, (k.shape[2], -1))  # [B, T, Hkv, G, hd]
    scores = torch.einsum("btkgd,bskd->bkgts", x, k.to(wide)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    out = torch.einsum("bkgts,bskd->btkgd", p, v.to(wide)).flatten(2, 3)
    return out.to(v.dtype), lse.flatten(1, 2)


def s2_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`s2_attention` with a mask over all pairs; ``first [B, T]`` as for :func:`token_mask`, None: 0."""
    if first is None:
        first = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
    return masked_attention(q, k, v, token_mask(pattern, first, k.shape[1]))


def block_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """As :func:`s2_attention_reference` with a pattern of the user's own, bool ``[Hkv, n, n]``; see check_blocks."""
    check_blocks(blocks)
    length = q.shape[1]
    mask = blocks.repeat_interleave(block_size, 1).repeat_interleave(block_size, 2)[:, :length, :length].tril()
    return masked_attention(q, k, v, mask.to(q.device).unsqueeze(0))


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, H, hd]`` with their log-sum-exps ``[B, H, T]`` over parts of the keys -> those over all."""
    lse = torch.stack([sums for _, sums in parts]).logsumexp(0)
    total = lse.masked_fill(lse == float("-inf"), 0.0)
    out = sum(o * (sums - total).exp().transpose(1, 2).unsqueeze(-1).to(o.dtype) for o, sums in parts)
    return cast(Tensor, out), lse


# -- CPU --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """A document in ``rows`` equal rows from ``row`` on: keys at slots ``start .. stop - 1``, of which those from
    ``first`` on are queries."""

    row: int
    rows: int
    start: int
    stop: int
    first: int


def whole_rows(batch: int, slots: int, queries: int) -> list[Segment]:
    return [Segment(0, batch, 0, slots, slots - queries)]


def segments_of(bounds: Sequence[int], length: int) -> list[Segment]:
    """Of documents ``bounds[i] : bounds[i + 1]`` in rows of ``length`` laid end to end; whole rows go together."""
    out: list[Segment] = []
    for a, b in itertools.pairwise(bounds):
        row, start = divmod(a, length)
        if b - a == length and out and out[-1].stop - out[-1].start == length and out[-1].row + out[-1].rows == row:
            last = out.pop()
            out.append(Segment(last.row, last.rows + 1, 0, length, 0))
        else:
            out.append(Segment(row, 1, start, start + b - a, start))
    return out


@dataclass
class _Call:
    """Queries at slots ``a .. b - 1`` over keys; positions in a segment's tensors."""

    a: int
    b: int
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


def _near(pattern: Pattern, length: int, first: int, dtype: torch.dtype) -> Iterator[_Call]:
    """Calls for the keys within ``local_blocks``, of queries ``first .. length - 1`` of a document."""
    size, reach = pattern.block_size, pattern.local_blocks * pattern.block_size
    band = max(BAND // size, 1) * size
    if first == 0:
        yield _Call(0, min(reach, length), slice(0, min(reach, length)), causal=True)
        first = reach
    while first < length:
        stop = min(first // band * band + band, length)
        low = max(first // size * size - reach + size, 0)
        i = torch.arange(first, stop)[:, None]
        j = torch.arange(low, stop)
        hidden = (j > i) | (i // size - j // size >= pattern.local_blocks)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]
        yield _Call(first, stop, slice(low, stop), mask=mask)
        first = stop


def _far(pattern: Pattern, residue: int, length: int, first: int) -> Iterator[_Call]:
    """Calls for the gathered keys of blocks ``residue``, ``residue + stride``, ..."""
    size, stretch = pattern.block_size, pattern.stride * pattern.block_size
    a = (pattern.local_blocks + residue) * size
    seen = size
    while a < length:
        if a + stretch > first:
            yield _Call(max(a, first), min(a + stretch, length), slice(0, seen))
        a, seen = a + stretch, seen + size


class _Heads:
    """Tensors of some key-value heads of a segment, heads first: ``[rows, heads, slots, hd]``."""

    def __init__(self, segment: Segment, heads: list[int], kv_heads: int, past: int):
        self.s, self.past, self.kv_heads = segment, past, kv_heads
        run = heads == list(range(heads[0], heads[-1] + 1))
        self.heads: slice | list[int] = slice(heads[0], heads[-1] + 1) if run else heads
        self.rows = slice(segment.row, segment.row + segment.rows)

    def queries(self, x: Tensor) -> Tensor:
        """Of ``x [B, H, T, ...]``, the queries of the segment: ``[rows, Hkv, G, queries, ...]``, a view."""
        own = x[self.rows, :, self.s.first - self.past : self.s.stop - self.past]
        return own.unflatten(1, (self.kv_heads, -1))

    def keys(self, x: Tensor) -> Tensor:
        """Of ``x [B, Hkv, S, hd]``: ``[rows, Hkv, length, hd]``, a view."""
        return x[self.rows, :, self.s.start : self.s.stop]


def _gather(x: Tensor, pattern: Pattern, residue: int) -> Tensor:
    """View ``[rows, heads, blocks, block_size, hd]`` of the blocks that are seen from afar."""
    whole = x.shape[2] // pattern.block_size
    return x[:, :, : whole * pattern.block_size].unflatten(2, (whole, pattern.block_size))[
        :, :, residue :: pattern.stride
    ]


def _work(pattern: Pattern) -> tuple[list[int], list[int], dict[int, list[int]]]:
    """Dense heads, sparse heads, and these by residue."""
    dense = [t for t, r in enumerate(pattern.residues) if r is None]
    by: dict[int, list[int]] = {}
    for t, r in enumerate(pattern.residues):
        if r is not None:
            by.setdefault(r, []).append(t)
    return dense, [t for t, r in enumerate(pattern.residues) if r is not None], by


def _sets(
    pattern: Pattern, segment: Segment, kv_heads: int, past: int, dtype: torch.dtype
) -> Iterator[tuple[_Heads, int | None, list[_Call]]]:
    """Heads, the residue whose blocks are gathered (None: all keys as they lie), and the calls."""
    dense, sparse, by = _work(pattern)
    length, first = segment.stop - segment.start, segment.first - segment.start
    if dense:
        whole = Pattern((None,), pattern.block_size, -(-length // pattern.block_size), 1)
        yield _Heads(segment, dense, kv_heads, past), None, list(_near(whole, length, first, dtype))
    if sparse:
        yield _Heads(segment, sparse, kv_heads, past), None, list(_near(pattern, length, first, dtype))
    for residue, heads in by.items():
        calls = list(_far(pattern, residue, length, first))
        if calls:
            yield _Heads(segment, heads, kv_heads, past), residue, calls


@torch.library.custom_op("trainwright::s2_attention", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, residues: list[int], block: int, local: int, stride: int
) -> tuple[Tensor, Tensor]:
    """``segments`` int64 ``[n, 5]`` on the CPU, the fields of :class:`Segment`; of ``residues``, -1 is a dense head."""
    pattern, scale = _pattern(residues, block, local, stride), q.shape[-1] ** -0.5
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
    kv_heads, past = k.shape[1], k.shape[2] - q.shape[2]
    for segment in _listed(segments):
        for heads, residue, calls in _sets(pattern, segment, kv_heads, past, q.dtype):
            queries, outs, sums = (heads.queries(x) for x in (q, out, lse))
            keys, values = (_keys(heads, x, pattern, residue) for x in (k, v))
            skipped = segment.first - segment.start
            for c in calls:
                at = slice(c.a - skipped, c.b - skipped)
                o, part = _forward_kernel(
                    queries[:, heads.heads, :, at].flatten(1, 2), keys[:, :, c.keys], values[:, :, c.keys], 0.0,
                    c.causal, attn_mask=c.mask, scale=scale,
                )  # fmt: skip
                o, part = (x.unflatten(1, (-1, queries.shape[2])) for x in (o, part))
                if residue is not None:  # what is near stands there already
                    before = sums[:, heads.heads, :, at]
                    total = torch.logaddexp(before, part)
                    o = o * (part - total).exp().unsqueeze(-1).to(o.dtype)
                    o += outs[:, heads.heads, :, at] * (before - total).exp().unsqueeze(-1).to(o.dtype)
                    part = total
                outs[:, heads.heads, :, at] = o
                sums[:, heads.heads, :, at] = part
    return out.transpose(1, 2), lse


@torch.library.custom_op("trainwright::s2_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor, residues: list[int],
    block: int, local: int, stride: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    pattern, scale = _pattern(residues, block, local, stride), q.shape[-1] ** -0.5
    q, k, v, out, grad = (x.transpose(1, 2).contiguous() for x in (q, k, v, out, grad))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kv_heads, past = k.shape[1], k.shape[2] - q.shape[2]
    for segment in _listed(segments):
        for heads, residue, calls in _sets(pattern, segment, kv_heads, past, q.dtype):
            queries, outs, sums, grads, into = (heads.queries(x) for x in (q, out, lse, grad, dq))
            keys, values = (_keys(heads, x, pattern, residue) for x in (k, v))
            gk, gv = torch.zeros_like(keys), torch.zeros_like(values)
            skipped = segment.first - segment.start
            for c in calls:
                at = slice(c.a - skipped, c.b - skipped)
                x, o, part, g = (t[:, heads.heads, :, at].flatten(1, 2) for t in (queries, outs, sums, grads))
                found = _backward_kernel(
                    g, x, keys[:, :, c.keys], values[:, :, c.keys], o, part, 0.0, c.causal, attn_mask=c.mask,
                    scale=scale,
                )  # fmt: skip
                into[:, heads.heads, :, at] += found[0].unflatten(1, (-1, queries.shape[2]))
                gk[:, :, c.keys] += found[1]
                gv[:, :, c.keys] += found[2]
            for total, part in ((dk, gk), (dv, gv)):
                own = heads.keys(total)
                if residue is None:
                    own[:, heads.heads] += part
                else:
                    _gather(own, pattern, residue)[:, heads.heads] += part.unflatten(2, (-1, block))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _pattern(residues: list[int], block: int, local: int, stride: int) -> Pattern:
    return Pattern(tuple(None if r < 0 else r for r in residues), block, local, stride)


def _listed(segments: Tensor) -> list[Segment]:
    return [Segment(*row) for row in segments.tolist()]


def _keys(heads: _Heads, x: Tensor, pattern: Pattern, residue: int | None) -> Tensor:
    own = heads.keys(x)[:, heads.heads]
    return own if residue is None else _gather(own, pattern, residue).flatten(2, 3)


def _like(x: Tensor) -> Tensor:
    """``[B, T, H, hd]`` laid out heads first, as what the operators return."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, residues: list[int], block: int, local: int, stride: int
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor, residues: list[int],
    block: int, local: int, stride: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _like(q), _like(k), _like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, *ctx.pattern = inputs
    ctx.save_for_backward(q, k, v, *output, segments)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, *ctx.pattern), *[None] * 5


_forward.register_autograd(_gradients, setup_context=_save)


def segment_table(segments: Sequence[Segment]) -> Tensor:
    """int64 ``[n, 5]``, CPU."""
    return torch.tensor([[s.row, s.rows, s.start, s.stop, s.first] for s in segments], dtype=torch.int64).view(-1, 5)


def s2_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, segments: Sequence[Segment] | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``q [B, T, H, hd]`` over ``k, v [B, S, Hkv, hd]``, the queries at the last T of S slots.

    Returns the output ``[B, T, H, hd]`` and the log-sum-exp of each query's scores ``[B, H, T]`` (no gradient); the
    work is in proportion to the visible blocks. CPU. ``segments`` (or their :func:`segment_table`) have every query
    once; None: a document a row.
    """
    if len(pattern.residues) != k.shape[2]:
        raise ValueError(f"the pattern is of {len(pattern.residues)} key-value heads, k has {k.shape[2]}")
    if segments is None:
        segments = whole_rows(q.shape[0], k.shape[1], q.shape[1])
    table = segments if isinstance(segments, Tensor) else segment_table(segments)
    residues = [-1 if r is None else r for r in pattern.residues]
    out, lse = _forward(
        q.to(v.dtype), k.to(v.dtype), v, table, residues, pattern.block_size, pattern.local_blocks, pattern.stride
    )
    return out, lse


# -- CUDA: FlexAttention ----------------------------------------------------------------------------------------------


def flex_block_mask(
    pattern: Pattern, n_heads: int, doc_ids: Tensor | None, batch: int, length: int, device: Any
) -> Any:
    """The pattern as a FlexAttention block mask, of ``doc_ids [B, T]`` (None: one document a row); no host sync."""
    from trainwright.models.attention import _create_block_mask

    slots = torch.arange(length, device=device)
    first = None
    if doc_ids is not None:
        changed = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)
        first = torch.where(changed, slots, 0).cummax(1).values
    group = n_heads // len(pattern.residues)
    own = torch.tensor([-1 if r is None else r for r in pattern.residues], device=device)
    size, local, stride = pattern.block_size, pattern.local_blocks, pattern.stride

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        start = 0 if first is None else first[b, i]
        query, key, residue = (i - start) // size, (j - start) // size, own[h // group]
        return (j <= i) & (j >= start) & ((query - key < local) | (key % stride == residue) | (residue < 0))

    rows = None if doc_ids is None else batch
    return _create_block_mask(device.type)(seen, rows, n_heads, length, length, device=device)
