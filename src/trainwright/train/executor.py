"""How a step's gradient is computed: the seam for pipelines, layer streaming and fused backward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_reduce_sum, max_over_ranks
from trainwright.memory.fused_backward import FusedBackward
from trainwright.objectives.base import Loss, Objective
from trainwright.parallel.apply import Parallelized
from trainwright.parallel.context.base import ContextParallel
from trainwright.parallel.context.host import sent


@dataclass
class StepResult:
    """Local sums of one step, still on the device. Gradients are on the parameters, reduced over the ranks."""

    loss_sum: Tensor  # float64 scalar
    weight: Tensor  # float64 scalar, over all ranks
    metrics: dict[str, Tensor]  # float64 scalars, local sums
    positions: int = 0  # that this rank computed, padding included


class Executor(Protocol):
    def run(self, parallel: Parallelized, objective: Objective, batch: Batch) -> StepResult:
        """Forward and backward over this rank's part of the global batch, normalised by the global weight."""


class AutogradExecutor:
    """Plain autograd over micro-batches, with gradient synchronisation on the last one only.

    The gradient is that of (sum of weighted token losses over the global batch) / (global weight), so it does not
    depend on how rows are spread over micro-batches and ranks. A batch whose weights are all 0 gives gradient 0.

    budget  positions of a micro-batch: rows are grouped by length and trimmed (data/odb_rows.py). The batch then has to
            lie on the CPU, since shapes depend on its weights. None: ``micro_batch_size`` rows, as they are
    device  where micro-batches go. With a context the batch should lie on the CPU, where it is planned: else each
            micro-batch waits for the device
    fused   steps the parameters within the backward pass, which then has to be one
    """

    def __init__(
        self,
        micro_batch_size: int,
        precision: Any,
        budget: int | None = None,
        device: torch.device | None = None,
        fused: FusedBackward | None = None,
    ):
        self.fused = fused
        self.micro_batch_size, self.precision = micro_batch_size, precision
        self.budget, self.device = budget, device

    def micro_batches(self, batch: Batch, context: ContextParallel | None = None) -> list[Batch]:
        if context is not None:
            return context.micro_batches(batch, self.micro_batch_size)
        if self.budget is None:
            return batch.split(self.micro_batch_size)
        from trainwright.data.odb_rows import micro_batches

        found = micro_batches(batch, self.budget)
        wanted = max_over_ranks(len(found), self.device or batch.tokens.device)
        return found if wanted == len(found) else micro_batches(batch, self.budget, wanted)

    def run(self, parallel: Parallelized, objective: Objective, batch: Batch) -> StepResult:
        weight = batch.weight()
        if self.device is not None:
            weight = weight.to(self.device)
        # Ranks of one context group hold the same rows: all of them count the whole, and it is divided again.
        weight = all_reduce_sum(weight) / (parallel.weight_copies * parallel.context_size)
        inverse = torch.where(weight > 0, parallel.loss_scale / weight, torch.zeros_like(weight)).float()
        micro_batches = self.micro_batches(batch, parallel.context)
        if parallel.context is not None and self.device is not None:
            # Before anything is computed, which a copy from memory that is not pinned would wait for.
            micro_batches = [sent(micro, self.device) for micro in micro_batches]
        loss_sum = torch.zeros_like(weight)
        metrics: dict[str, Tensor] = {}
        positions = 0
        with parallel.one_gradient():
            for i, micro in enumerate(micro_batches):
                if self.device is not None and parallel.context is None:
                    micro = micro.to(self.device)
                sync: AbstractContextManager[None] = parallel.no_sync(last_micro_batch=i == len(micro_batches) - 1)
                with sync:
                    saving = (
                        nullcontext() if parallel.context is None else parallel.context.saving(micro, parallel.module)
                    )
                    with self.precision.autocast(), saving:
                        loss = objective(parallel.module, micro)  # type: ignore[arg-type]
                    with self.fused.step() if self.fused is not None else nullcontext():
                        self.precision.backward(loss.sum * inverse)
                loss_sum += loss.sum.detach()
                positions += micro.tokens.numel()
                for name, value in loss.metrics.items():
                    value = value.detach().double()
                    metrics[name] = metrics[name] + value if name in metrics else value
        return StepResult(loss_sum, weight, metrics, positions)


def forward_only(module: Parallelized | nn.Module, objective: Objective, batch: Batch, precision: Any) -> Loss:
    """The loss of a batch without gradients; of what is made parallel, of this rank's part (``shard``) of a batch."""
    if isinstance(module, Parallelized):
        if module.pipeline is not None:
            by_rows = module.context is None or module.context.together
            found: Loss = module.pipeline.forward_only(objective, batch, precision, by_rows)
            return found
        module = module.module
    try:
        with torch.no_grad(), precision.autocast():
            return objective(module, batch)  # type: ignore[arg-type]
    finally:
        _let_go(module)


def _let_go(module: nn.Module) -> None:
    """Free what FSDP2 has gathered and no backward pass will: kept, it would miss a change of the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
