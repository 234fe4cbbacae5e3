"""Sums over the ranks of a group that autograd goes through.

    what            forward   backward   x                         what is made of it
    shared          x         sum        whole on every rank       a summand of every rank
    total           sum       x          a summand of every rank   the same on every rank
    total_of_each   sum       sum        a summand of every rank   each rank's own part of the loss

Which of them a place needs follows from who has which part of the loss.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: bool, back: bool) -> Tensor:
        ctx.group, ctx.back = group, back
        return _summed(x, group) if there else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return (_summed(grad, ctx.group) if ctx.back else grad), None, None, None


def _summed(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def shared(x: Tensor, group: Any) -> Tensor:
    """``x``, a weight or the stream, that every rank holds whole and uses in part: its gradient is summed."""
    return cast(Tensor, _Sum.apply(x, group, False, True))


def total(x: Tensor, group: Any) -> Tensor:
    """The sum of ``x`` over the ranks, whole on each, which all compute the same of it."""
    return cast(Tensor, _Sum.apply(x, group, True, False))


def total_of_each(x: Tensor, group: Any) -> Tensor:
    """The sum of ``x`` over the ranks, whole on each; so is its gradient, as each has a loss of its own."""
    return cast(Tensor, _Sum.apply(x, group, True, True))
