"""Rotary position embedding (arXiv:2104.09864), in the half-split convention of Hugging Face checkpoints.

``y = x * cos + rotate_half(x) * sin`` with ``rotate_half([a, b]) = [-b, a]`` over the head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainwright.models.ops import native


def apply_rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [B or 1, T, 1, hd]
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, transpose: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    per_row = cos.stride(0) if cos.shape[0] > 1 else 0
    native.call("rope", x, cos, sin, y, *x.shape, native.strides(x), native.strides(y), per_row, int(transpose))
    return y


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        b, t, h, hd = x.shape
        # laid out [B, H, T, hd], as attention wants it: its own copy into that order is saved
        return _rope(x, cos, sin, x.new_empty(b, h, t, hd).transpose(1, 2), transpose=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rope(dy, cos, sin, dy.new_empty(dy.shape), transpose=True), None, None


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x [B, T, H, hd]`` by the tables ``cos, sin [B or 1, T, hd]``; no gradient flows to the tables.

    The result has shape ``[B, T, H, hd]``; on the CPU its memory is laid out ``[B, H, T, hd]``.
    """
    if native.usable(x, cos, sin) and x.numel() and not (cos.requires_grad or sin.requires_grad):
        return _Rope.apply(x, cos, sin)
    return apply_rope_reference(x, cos, sin)
