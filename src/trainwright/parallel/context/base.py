"""What a way of spreading a row's tokens over ranks offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from trainwright.core.batch import Batch
from trainwright.core.registry import MethodConfig

if TYPE_CHECKING:
    from trainwright.parallel.mesh import Mesh


@dataclass(frozen=True)
class Stages:
    """The pipeline that micro-batches go through, where there is one. Its ranks are a column: each context group lies
    in one stage, and the same place of every stage's group gets the same parts of the same rows.

    group  its ranks, this one among them; None for whoever only counts
    ranks  how many
    legal  the least number of micro-batches, from a number on, that its schedule takes

    No deadlock: all columns run as many micro-batches (:meth:`ContextParallel.micro_batches`) and one schedule, so the
    ranks of a stage do the same list of actions: forward of i, backward of j, weights of j. What a context group
    exchanges for an action, each of its ranks does within that action, and there starts all its messages before it
    waits. So map every event to the one of the same stage and action in a column that is alone: exchanges are mapped to
    themselves, waits for a neighbouring stage to such waits. Columns that are alone come to the end (the schedules of
    torch do), which orders the actions of all stages; and with events in this order nobody waits for a later one. It
    holds for any schedule, and whoever shares documents with whom in a micro-batch. It needs equal numbers of
    micro-batches: of two stages a rank, interleaved does the second's forward 0 before the first's forward 2 with four
    of them, behind it with three. What FSDP gathers in a first forward, and what it adds up behind the last backward,
    belongs to an action just so.
    """

    group: Any
    ranks: int
    legal: Callable[[int], int]


class ContextParallel(ABC):
    """A strategy on this rank. The model calls ``plan`` once per forward pass and window, and ``attend`` in each layer.

    Nothing is kept between calls, so several micro-batches may be under way and a layer may be computed twice.
    """

    # Ranks have parts of the same rows; else documents are dealt out, and micro-batch i of all ranks together is one.
    together: ClassVar[bool] = True

    # Set where the model has experts, which count every token that is there, also one of weight 0.
    experts: bool = False

    # Set where layers are shared over a pipeline, which hands on one shape.
    stages: Stages | None = None

    @abstractmethod
    def shard(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch that all ranks of the group hold: some slots of every row, ``[B, T / cp]``,
        or other rows. Every position of weight > 0 is on exactly one rank. ``positions`` and ``doc_ids`` keep the
        values that they have in the whole row; ``doc_ids`` may be renumbered, and are below 0 where they were and for
        what a strategy fills up with."""

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
        many micro-batches, and with :attr:`stages` all of a rank's have one shape and their number is legal."""
        return [self.shard(micro) for micro in batch.split(rows)]

    def saving(self, micro: Batch, module: nn.Module) -> AbstractContextManager[None]:
        """Around the forward pass of ``micro``, one of :meth:`micro_batches`: where its saved activations go."""
        return nullcontext()

    def figures(self) -> dict[str, float]:
        """Of the newest step, for its log."""
        return {}

    def close(self) -> None:
        """End what it has started."""
        return


class ContextConfig(MethodConfig):
    """Base of context-parallel configs."""

    # ``plan`` and ``attend`` also take some rows of a micro-batch at a time (parallel.tensor=domino).
    by_rows: ClassVar[bool] = False

    @abstractmethod
    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        """The strategy over ``mesh.submesh("cp")`` for ``n_heads`` query heads on this rank. Called by every rank."""

    def check_pipeline(self) -> None:
        """Raises ConfigError where a setting does not go with ``parallel.pp``."""

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        """Raises ConfigError where ``cp`` ranks cannot spread rows of a model with so many heads on a rank, before any
        process group is made."""
