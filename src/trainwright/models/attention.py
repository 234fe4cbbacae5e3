"""Attention over packed documents: one function, and a plan made once per forward pass.

A query at slot i of a row sees the keys at slots j <= i of the same document, and with a sliding window of w tokens
only those with i - j < w. The plan says how to do that on this device:

- ``causal``: one document a row and no window in reach; plain causal SDPA.
- ``segments``: CPU. The fused causal kernel is called document by document, so that pairs across documents cost
  nothing, and documents longer than the window go in bands of queries. A dense mask costs as much as one document.
- ``flex``: CUDA. A compiled FlexAttention kernel that skips blocks without a visible pair; made without a host sync.
- ``mask``: everywhere else and with a key-value cache: SDPA with a boolean mask.

On a CPU in float32, the first two go to our own kernel (:mod:`trainwright.models.ops.causal_attention`): at 256 to 512
tokens a row it takes 5 to 30 % less time than what stands here.

To swap the implementation (context parallelism, another kernel), set ``attend`` of the attention modules.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.models.ops import native
from trainwright.models.ops.causal_attention import causal_attention, first_visible

Kind = Literal["causal", "segments", "flex", "mask"]


@dataclass
class AttentionPlan:
    """How the queries of one forward pass see its keys."""

    kind: Kind
    window: int = 0  # tokens a query sees, itself included; 0: all
    # segments: int64 [documents + 1], CPU; starts in the rows laid end to end, then the end
    bounds: Tensor | None = None
    first: Tensor | None = None  # segments: int32 [B, T], CPU; the first slot that each query sees
    mask: Tensor | None = None  # mask: bool [B or 1, 1, T, S], True where the query sees the key
    block_mask: Any = None  # flex: its BlockMask


def plan_attention(doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> AttentionPlan:
    """The plan for ``batch`` rows of ``length`` tokens with ``doc_ids [B, T]`` (None: one document a row).

    On CUDA, pass None where every row is one document: finding that out here would cost a host sync.
    """
    window = 0 if window >= length else window
    if device.type == "cpu":
        starts = document_starts(doc_ids) if doc_ids is not None else None
        if window == 0 and (starts is None or starts.numel() == batch):
            return AttentionPlan("causal")
        if starts is None:
            starts = torch.arange(batch, device="cpu") * length
        bounds = F.pad(starts, (0, 1), value=batch * length)
        return AttentionPlan("segments", window, bounds, first_visible(bounds, batch, length, window))
    if doc_ids is None and window == 0:
        return AttentionPlan("causal")
    if device.type == "cuda":
        return AttentionPlan("flex", window, block_mask=_block_mask(doc_ids, batch, length, window, device))
    return AttentionPlan("mask", window, mask=document_mask(doc_ids, length, window, device))


def document_starts(doc_ids: Tensor) -> Tensor:
    """Where documents start in the rows of ``doc_ids [B, T]`` laid end to end; int64, a row always starts one."""
    changes = torch.ones_like(doc_ids, dtype=torch.bool)
    torch.ne(doc_ids[:, 1:], doc_ids[:, :-1], out=changes[:, 1:])
    return changes.flatten().nonzero().flatten()


def document_mask(doc_ids: Tensor | None, length: int, window: int, device: torch.device) -> Tensor:
    """bool ``[B or 1, 1, T, T]``: causal, same document, inside the window (0: none)."""
    slots = torch.arange(length, device=device)
    seen = slots[:, None] >= slots
    if window:
        seen &= slots[:, None] - slots < window
    if doc_ids is None:
        return seen[None, None]
    # A change of id ends a document even where the id comes back later in the row.
    runs = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0)).cumsum(1)
    return (seen & (runs[:, :, None] == runs[:, None, :])).unsqueeze(1)


def attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """``q [B, T, H, hd]`` over ``k, v [B, S, Hkv, hd]`` -> ``[B, T, H, hd]``; H is a multiple of Hkv."""
    if plan.kind in ("causal", "segments") and native.usable(q, k, v):
        return causal_attention(q, k, v, plan.first)
    if plan.kind == "segments":
        # Autocast does not reach into a custom operator: bring all three to what the projections were computed in.
        return segment_attention(q.to(v.dtype), k.to(v.dtype), v, plan.bounds, plan.window)[0]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if plan.kind == "flex":
        q, k = q.to(v.dtype), k.to(v.dtype)
        out = _flex_attention(q.device.type)(q, k, v, block_mask=plan.block_mask, enable_gqa=grouped)
    elif plan.kind == "causal":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, enable_gqa=grouped)
    return out.transpose(1, 2)


# -- CUDA: FlexAttention ----------------------------------------------------------------------------------------------


@functools.cache
def _flex_attention(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention


@functools.cache
def _create_block_mask(device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiled, the [T, T] mask is never held.
    return torch.compile(create_block_mask) if device == "cuda" else create_block_mask


def _block_mask(doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> Any:
    runs = None if doc_ids is None else F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0)).cumsum(1, dtype=torch.int32)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ok = i >= j
        if window:
            ok = ok & (i - j < window)
        return ok if runs is None else ok & (runs[b, i] == runs[b, j])

    rows = None if runs is None else batch
    return _create_block_mask(device.type)(seen, rows, None, length, length, device=device)


# -- CPU: the fused kernel, document by document ----------------------------------------------------------------------

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class _Piece:
    """One call of the kernel: queries ``[stop - queries, stop)`` over keys ``[stop - keys, stop)`` of equal rows."""

    row: int
    rows: int
    stop: int  # slot in the row
    keys: int
    queries: int  # fewer than keys: a band of the sliding window

    def of_queries(self, x: Tensor) -> Tensor:
        """``[rows, H, queries, hd]`` view of ``x [B, T, H, hd]``."""
        return x[self.row : self.row + self.rows, self.stop - self.queries : self.stop].transpose(1, 2)

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.row : self.row + self.rows, self.stop - self.keys : self.stop].transpose(1, 2)

    def of_sums(self, lse: Tensor) -> Tensor:
        return lse[self.row : self.row + self.rows, :, self.stop - self.queries : self.stop]

    def mask(self, window: int, dtype: torch.dtype) -> Tensor | None:
        """Additive ``[1, 1, queries, keys]`` mask of a band; None: plain causal."""
        if self.queries == self.keys:
            return None
        i = torch.arange(self.keys - self.queries, self.keys)[:, None]
        j = torch.arange(self.keys)
        hidden = (j > i) | (i - j >= window)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]


def _pieces(bounds: list[int], length: int, window: int) -> list[_Piece]:
    """The calls for documents ``bounds[i]:bounds[i + 1]`` in rows of ``length`` laid end to end."""
    out: list[_Piece] = []
    for start, stop in itertools.pairwise(bounds):
        row, first = divmod(start, length)
        end = first + stop - start
        last = out[-1] if out else None
        if not window or stop - start <= window:
            if last and stop - start == length == last.queries and last.row + last.rows == row:
                last.rows += 1  # whole rows go in one call
            else:
                out.append(_Piece(row, 1, end, stop - start, stop - start))
            continue
        out.append(_Piece(row, 1, first + window, window, window))
        # Bands of up to `window` queries see at most 2 * window - 1 keys: the cost grows with length * window.
        for s in range(first + window, end, window):
            queries = min(window, end - s)
            out.append(_Piece(row, 1, s + queries, queries + window - 1, queries))
    return out


@torch.library.custom_op("trainwright::segment_attention", mutates_args=(), device_types="cpu")
def segment_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Causal attention inside each stretch ``bounds[i]:bounds[i + 1]`` of the rows ``[B, T, ...]`` laid end to end.

    No stretch crosses the end of a row. Returns the output ``[B, T, H, hd]`` and, for the backward pass, the
    log-sum-exp of the scores ``[B, H, T]``.
    """
    out, lse = _like(q), _log_sums(q)
    for p in _pieces(bounds.tolist(), q.shape[1], window):
        mask = p.mask(window, q.dtype)
        o, sums = _forward(p.of_queries(q), p.of_keys(k), p.of_keys(v), 0.0, mask is None, attn_mask=mask)
        p.of_queries(out).copy_(o)
        p.of_sums(lse).copy_(sums)
    return out, lse


@torch.library.custom_op("trainwright::segment_attention_backward", mutates_args=(), device_types="cpu")
def _segment_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _like(q), _like(k), _like(v)
    if window:  # bands share keys
        dk.zero_()
        dv.zero_()
    for p in _pieces(bounds.tolist(), q.shape[1], window):
        mask = p.mask(window, q.dtype)
        queries, keys, values = p.of_queries(q), p.of_keys(k), p.of_keys(v)
        gq, gk, gv = _backward(
            p.of_queries(grad),
            queries,
            keys,
            values,
            p.of_queries(out),
            p.of_sums(lse),
            0.0,
            mask is None,
            attn_mask=mask,
        )
        p.of_queries(dq).copy_(gq)
        if window:
            p.of_keys(dk).add_(gk)
            p.of_keys(dv).add_(gv)
        else:
            p.of_keys(dk).copy_(gk)
            p.of_keys(dv).copy_(gv)
    return dq, dk, dv


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _log_sums(q: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype, device=q.device)


@segment_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int) -> tuple[Tensor, Tensor]:
    return _like(q), _log_sums(q)


@_segment_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, bounds = ctx.saved_tensors
    return *_segment_attention_backward(grad, q, k, v, out, lse, bounds, ctx.window), None, None


segment_attention.register_autograd(_gradients, setup_context=_save)
