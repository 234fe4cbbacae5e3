"""SwiGLU (arXiv:2002.05202): ``y = silu(gate) * up``, ``silu(x) = x sigmoid(x)``.

Only the inputs are kept for the backward pass, which makes silu again: nothing of size ``[..., F]`` is saved besides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainwright.models.ops import native


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _rows(x: Tensor) -> Tensor:
    """``[n, F]`` with a contiguous last dimension; a view where the layout allows one."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.view(-1, x.shape[-1]) if x.ndim < 2 or x.is_contiguous() else x.flatten(0, -2)


def _backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    dy = _rows(dy.contiguous())
    n, f = gate.shape
    native.call("swiglu_backward", dy, gate, up, dgate, dup, n, f, gate.stride(0), up.stride(0), dgate.stride(0))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        y = gate.new_empty(gate.shape)
        g, u = _rows(gate), _rows(up)
        native.call("swiglu_forward", g, u, y, *g.shape, g.stride(0), u.stride(0))
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
        _backward(dy, _rows(gate), _rows(up), _rows(dgate), _rows(dup))
        return dgate, dup


class _FusedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        f = gate_up.shape[-1] // 2
        y = gate_up.new_empty(*gate_up.shape[:-1], f)
        rows = _rows(gate_up)
        native.call("swiglu_forward", rows, rows[:, f:], y, rows.shape[0], f, rows.stride(0), rows.stride(0))
        ctx.save_for_backward(gate_up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        f = gate_up.shape[-1] // 2
        grad = gate_up.new_empty(gate_up.shape)
        rows, out = _rows(gate_up), _rows(grad)
        _backward(dy, rows[:, :f], rows[:, f:], out[:, :f], out[:, f:])
        return grad


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two ``[..., F]`` tensors."""
    if native.usable(gate, up) and gate.shape == up.shape and gate.numel():
        return _SwiGLU.apply(gate, up)
    return swiglu_reference(gate, up)


def swiglu_fused(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of one ``[..., 2F]`` tensor that holds gate in its first half and up in its second."""
    if native.usable(gate_up) and gate_up.numel():
        return _FusedSwiGLU.apply(gate_up)
    return swiglu_reference(*gate_up.chunk(2, dim=-1))
