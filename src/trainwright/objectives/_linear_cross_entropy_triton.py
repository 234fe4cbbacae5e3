"""Triton kernel of the fused cross-entropy: one pass for the loss of a row, one that overwrites it with its gradient.

Same contract as :func:`trainwright.objectives.linear_cross_entropy.row_loss`, its plain torch reference. A program
owns one row of the ``[C, V]`` logits: the first pass keeps a running maximum and a rescaled sum of exponentials
(online softmax, arXiv:1805.02867), the second writes ``w * d loss / d logit``. Softcap, z-loss, label smoothing and
the row's weight cost no pass of their own. Runs on the CPU under ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from trainwright.objectives.linear_cross_entropy import LossOptions

MAX_BLOCK = 8192  # columns held by a program at a time; 32 KiB of float32 spread over its threads' registers


@triton.jit
def _softcap(x: Any, cap: Any) -> Any:
    """``cap * tanh(x / cap)``, tanh by way of the sigmoid, which every back end has."""
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)


@triton.jit
def _row_loss_kernel(
    logits: Any,  # [C, V]
    out: Any,  # [C, V], may be logits
    targets: Any,  # [C] int64
    weights: Any,  # [C]
    terms: Any,  # [4, C]: nll, lse, lse - mean logit, hit
    rows: Any,
    vocab: Any,
    logits_stride: Any,
    out_stride: Any,
    softcap: Any,
    z_loss: Any,
    smoothing: Any,
    HAS_SOFTCAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    out += row * out_stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)

    own = tl.load(logits + target).to(tl.float32)
    if HAS_SOFTCAP:
        own = _softcap(own, softcap)
    top = float("-inf")
    total = 0.0
    sum_logits = 0.0
    better = 0  # entries that argmax prefers to the target: larger ones, and equal ones before it
    for start in range(0, vocab, BLOCK):
        at = start + columns
        inside = at < vocab
        y = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_SOFTCAP:
            y = _softcap(y, softcap)
        if SMOOTH:
            sum_logits += tl.sum(tl.where(inside, y, 0.0))
        better += tl.sum((inside & ((y > own) | ((y == own) & (at < target)))).to(tl.int32))
        y = tl.where(inside, y, float("-inf"))
        new_top = tl.maximum(top, tl.max(y))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(y - new_top))
        top = new_top
    lse = top + tl.log(total)
    tl.store(terms + row, lse - own)
    tl.store(terms + rows + row, lse)
    if SMOOTH:
        tl.store(terms + 2 * rows + row, lse - sum_logits / vocab)
    tl.store(terms + 3 * rows + row, tl.where(better == 0, 1.0, 0.0))

    if WANT_GRAD:
        weight = tl.load(weights + row).to(tl.float32)
        prob_scale = weight * (1.0 + 2.0 * z_loss * lse)
        for start in range(0, vocab, BLOCK):
            at = start + columns
            inside = at < vocab
            y = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
            if HAS_SOFTCAP:
                y = _softcap(y, softcap)
            g = prob_scale * tl.exp(y - lse)
            g = tl.where(at == target, g - weight * (1.0 - smoothing), g)
            if SMOOTH:
                g -= weight * smoothing / vocab
            if HAS_SOFTCAP:
                g *= 1.0 - (y / softcap) * (y / softcap)
            tl.store(out + at, g.to(out.dtype.element_ty), mask=inside)


def row_loss_triton(
    logits: Tensor, targets: Tensor, weights: Tensor, options: LossOptions, out: Tensor | None
) -> Tensor:
    """As ``row_loss``; ``out`` may have another dtype than the float32 logits (half precision for the products)."""
    rows, vocab = logits.shape
    terms = logits.new_zeros(4, rows)
    if rows == 0:
        return terms
    gradient = logits if out is None else out
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab))
    _row_loss_kernel[(rows,)](
        logits,
        gradient,
        targets.contiguous(),
        weights.contiguous(),
        terms,
        rows,
        vocab,
        logits.stride(0),
        gradient.stride(0),
        options.softcap or 1.0,
        options.z_loss,
        options.label_smoothing,
        HAS_SOFTCAP=options.softcap is not None,
        SMOOTH=options.label_smoothing > 0,
        WANT_GRAD=out is not None,
        BLOCK=block,
        num_warps=max(4, min(16, block // 512)),
    )
    return terms
