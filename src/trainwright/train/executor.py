"""How a step's gradient is computed: the seam for pipelines, layer streaming and fused backward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_reduce_sum
from trainwright.objectives.base import Objective
from trainwright.parallel.apply import Parallelized


@dataclass
class StepResult:
    """Local sums of one step, still on the device. Gradients are on the parameters, reduced over the ranks."""

    loss_sum: Tensor  # float64 scalar
    weight: Tensor  # float64 scalar, over all ranks
    metrics: dict[str, Tensor]  # float64 scalars, local sums


class Executor(Protocol):
    def run(self, parallel: Parallelized, objective: Objective, batch: Batch) -> StepResult:
        """Forward and backward over this rank's part of the global batch, normalised by the global weight."""


class AutogradExecutor:
    """Plain autograd over micro-batches, with gradient synchronisation on the last one only.

    The gradient is that of (sum of weighted token losses over the global batch) / (global weight), so it does not
    depend on how rows are spread over micro-batches and ranks. A batch whose weights are all 0 gives gradient 0.
    """

    def __init__(self, micro_batch_size: int, precision: Any):
        self.micro_batch_size, self.precision = micro_batch_size, precision

    def run(self, parallel: Parallelized, objective: Objective, batch: Batch) -> StepResult:
        weight = all_reduce_sum(batch.weight())
        inverse = torch.where(weight > 0, parallel.loss_scale / weight, torch.zeros_like(weight)).float()
        micro_batches = batch.split(self.micro_batch_size)
        loss_sum = torch.zeros_like(weight)
        metrics: dict[str, Tensor] = {}
        for i, micro in enumerate(micro_batches):
            sync: AbstractContextManager[None] = parallel.no_sync(last_micro_batch=i == len(micro_batches) - 1)
            with sync:
                with self.precision.autocast():
                    loss = objective(parallel.module, micro)  # type: ignore[arg-type]
                self.precision.backward(loss.sum * inverse)
            loss_sum += loss.sum.detach()
            for name, value in loss.metrics.items():
                value = value.detach().double()
                metrics[name] = metrics[name] + value if name in metrics else value
        return StepResult(loss_sum, weight, metrics)


def forward_only(module: nn.Module, objective: Objective, batch: Batch, precision: Any) -> Any:
    with torch.no_grad(), precision.autocast():
        return objective(module, batch)  # type: ignore[arg-type]
