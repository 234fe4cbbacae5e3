"""RMSNorm (arXiv:1910.07467): ``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

On the CPU in float32 the forward pass and the backward pass are one kernel each; elsewhere torch's own formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainwright.models.ops import native


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain formula. Statistics in float32 for half precision, as the Llama family has it."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        dim = weight.shape[0]
        y, rstd = torch.empty_like(x), x.new_empty(x.numel() // dim)
        native.call("rms_norm_forward", x, weight, y, rstd, rstd.shape[0], dim, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dy, dim = dy.contiguous(), weight.shape[0]
        dx, partial = torch.empty_like(x), x.new_empty(torch.get_num_threads(), dim)
        native.call("rms_norm_backward", dy, x, weight, rstd, dx, partial, rstd.shape[0], dim)
        return dx, partial.sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``x [..., D]`` over its root mean square, times ``weight [D]``; ``eps`` adds to the mean square."""
    if native.usable(x, weight) and x.numel():
        return _RMSNorm.apply(x, weight, eps)
    return rms_norm_reference(x, weight, eps)
