"""What a way of spreading a row's tokens over ranks offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.core.batch import Batch
from trainwright.core.registry import MethodConfig

if TYPE_CHECKING:
    from trainwright.parallel.mesh import Mesh


class SummedOverRanks(torch.autograd.Function):
    """The sum over the ranks of ``group``, whole on each; so is its gradient, as each has a loss of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class ContextParallel(ABC):
    """A strategy on this rank. The model calls ``plan`` once per forward pass and window, and ``attend`` in each layer.

    Nothing is kept between calls, so several micro-batches may be under way and a layer may be computed twice.
    """

    # Micro-batch i of each rank is a part of one micro-batch; else ranks have micro-batches of their own.
    together: ClassVar[bool] = True

    @abstractmethod
    def shard(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch that all ranks of the group hold: some slots of every row, ``[B, T / cp]``,
        or other rows. Every position of weight > 0 is on exactly one rank. ``positions`` and ``doc_ids`` keep the
        values that they have in the whole row; ``doc_ids`` may be renumbered."""

    @abstractmethod
    def plan(self, doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> Any:
        """In place of models.attention.plan_attention; gets the ``doc_ids`` of :meth:`shard`. May communicate."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        """In place of models.attention.attention: ``q [B, T / cp, H, hd]``, ``k, v [B, T / cp, Hkv, hd]`` of this
        rank's slots -> ``[B, T / cp, H, hd]``, as if the group's slots lay on one rank. Differentiable."""

    def micro_batches(self, batch: Batch, rows: int) -> list[Batch]:
        """This rank's parts of a step's micro-batches, at most ``rows`` rows of ``batch`` in each. ``batch`` holds the
        rows that all ranks of the group have. A strategy may group rows otherwise; every rank of the run has to get as
        many micro-batches."""
        return [self.shard(micro) for micro in batch.split(rows)]

    def saving(self, micro: Batch, module: nn.Module) -> AbstractContextManager[None]:
        """Around the forward pass of ``micro``, one of :meth:`micro_batches`: where its saved activations go."""
        return nullcontext()


class ContextConfig(MethodConfig):
    """Base of context-parallel configs."""

    @abstractmethod
    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        """The strategy over ``mesh.submesh("cp")`` for ``n_heads`` query heads on this rank. Called by every rank."""

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        """Raises ConfigError where ``cp`` ranks cannot spread rows of a model with so many heads on a rank, before any
        process group is made."""
