"""The backward pass of Grass (grass.py) that computes the gradient of selected rows of a weight alone.

y = x W^T;  with D the gradient of y:  that of W is D^T x [out, in], that of its rows i is D[:, i]^T x [r, in]
Grass: Compute Efficient Low-Memory LLM Training with Structured Sparse Gradients, arXiv:2406.17660.

A plain layer, which the training loop does not use. Between processes only [r, in] has to be averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _SlicedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, sliced: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, rows)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        (grad,) = grads
        x, weight, rows = ctx.saved_tensors
        to_x = grad @ weight if ctx.needs_input_grad[0] else None
        to_rows = None
        if ctx.needs_input_grad[3]:
            to_rows = grad.index_select(-1, rows).flatten(0, -2).mT @ x.flatten(0, -2)  # [r, in]
        return to_x, None, None, to_rows


class GrassLinear(nn.Module):
    """A linear layer whose backward pass computes the gradient of selected rows of the weight alone, [r, in].

    weight [out, in] takes no gradient; ``sliced`` [r, in], zero, is the parameter: its gradient is that of
    ``weight[rows]``, any optimizer may step it, and :meth:`fold` adds what it became to these rows. :meth:`select`
    changes the rows; for the norms that it needs, run a backward pass inside ``full_gradient=True``.
    The norm of such a gradient is that of a part: do not mix it with full ones in clipping by the global norm.
    """

    def __init__(self, linear: nn.Linear, rows: Tensor):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        self.bias = linear.bias
        self.rows: Tensor
        self.register_buffer("rows", rows)
        self.sliced = nn.Parameter(torch.zeros_like(self.weight[rows]))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad:
            y = F.linear(x, self.weight)
        else:
            y = _SlicedLinear.apply(x, self.weight, self.rows, self.sliced)
        return y if self.bias is None else y + self.bias

    def full_gradient(self, wanted: bool) -> None:
        """Whether the next backward passes compute the whole gradient, in ``weight.grad``."""
        self.weight.requires_grad_(wanted)
        if not wanted:
            self.weight.grad = None

    @torch.no_grad()
    def fold(self) -> None:
        """Add the step that ``sliced`` took to the weight."""
        self.weight.index_add_(0, self.rows, self.sliced)
        self.sliced.zero_()

    def select(self, rows: Tensor) -> None:
        """Take other rows, as many. ValueError for another number, and while a gradient of the old rows is there."""
        if rows.shape != self.rows.shape:
            raise ValueError(f"{rows.numel()} rows for a layer that was made for {self.rows.numel()}")
        if self.sliced.grad is not None:
            raise ValueError("there is a gradient of the rows selected before; step and clear it first")
        self.rows.copy_(rows)
