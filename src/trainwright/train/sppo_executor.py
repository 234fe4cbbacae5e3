"""A step's gradient from chunks of rows on one stage: forward 1..n, backward n..1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_reduce_sum
from trainwright.objectives.base import Loss, Objective
from trainwright.parallel.apply import Parallelized
from trainwright.parallel.sppo.rows import ChunkedRows, tell_last
from trainwright.train.executor import AutogradExecutor, StepResult


class SppoExecutor(AutogradExecutor):
    """The gradient of the :class:`AutogradExecutor`, with one chunk of each row at a time."""

    def run(self, parallel: Parallelized, objective: Objective, batch: Batch) -> StepResult:
        if self.device is not None:
            batch = batch.to(self.device)
        weight = all_reduce_sum(batch.weight()) / parallel.weight_copies
        inverse = torch.where(weight > 0, parallel.loss_scale / weight, torch.zeros_like(weight)).float()
        micro_batches = batch.split(self.micro_batch_size)
        loss_sum = torch.zeros_like(weight)
        metrics: dict[str, Tensor] = {}
        with parallel.one_gradient():
            for i, micro in enumerate(micro_batches):
                for loss in self._micro_batch(parallel, objective, micro, inverse, last=i == len(micro_batches) - 1):
                    loss_sum += loss.sum.detach()
                    for name, value in loss.metrics.items():
                        value = value.detach().double()
                        metrics[name] = metrics[name] + value if name in metrics else value
        return StepResult(loss_sum, weight, metrics, batch.tokens.numel())

    def _micro_batch(
        self, parallel: Parallelized, objective: Objective, micro: Batch, inverse: Tensor, last: bool
    ) -> list[Loss]:
        rows: ChunkedRows = parallel.chunks
        chunks = rows.begin(micro, [parallel.model])
        losses: list[Any] = []
        # One region around all of them: weights are cast once, not once a chunk.
        with self.precision.autocast():
            for c, chunk in enumerate(chunks):
                with rows.forward(c), self.precision.autocast():
                    losses.append(objective(parallel.module, chunk))  # type: ignore[arg-type]
        for c in reversed(range(len(chunks))):
            complete = last and c == 0
            rows.before_backward(c)
            tell_last(parallel.module, complete)
            with parallel.no_sync(last_micro_batch=complete):
                self.precision.backward(losses[c].sum * inverse)
            losses[c] = Loss(losses[c].sum.detach(), losses[c].weight, losses[c].metrics)
        return losses
