"""A step's gradient through a pipeline: micro-batches of one shape, passed from stage to stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.core.batch import Batch, as_padding
from trainwright.core.distributed import all_reduce_sum
from trainwright.core.errors import ConfigError
from trainwright.objectives.base import Objective
from trainwright.parallel.apply import Parallelized
from trainwright.parallel.context.base import ContextParallel
from trainwright.parallel.context.host import sent
from trainwright.train.executor import AutogradExecutor, StepResult


class PipelineExecutor(AutogradExecutor):
    """The gradient of the :class:`AutogradExecutor`; each rank of a pipeline gets that of its own parameters.

    All ranks of a pipeline get the same batch. Sums and metrics are those of the last stage, 0 on the others.
    """

    def micro_batches(self, batch: Batch, context: ContextParallel | None = None) -> list[Batch]:
        if context is not None and not context.together:  # of documents, not of rows
            return context.micro_batches(batch, self.micro_batch_size)
        rows = batch.tokens.shape[0]
        count = -(-rows // self.micro_batch_size)
        size = -(-rows // count)
        if rows % count:
            batch = _padded(batch, count * size)
        found = batch.split(size) if context is None else context.micro_batches(batch, size)
        shapes = {tuple(micro.tokens.shape) for micro in found}
        if len(shapes) > 1:
            raise ConfigError(
                f"makes micro-batches of shapes {sorted(shapes)}, and a pipeline passes on one; use ring or ulysses",
                key="parallel.context",
            )
        return found

    def run(self, parallel: Parallelized, objective: Objective, batch: Batch) -> StepResult:
        context = parallel.context
        if self.device is not None and context is None:
            batch = batch.to(self.device)
        copies = parallel.weight_copies * parallel.context_size
        weight = batch.weight()
        weight = all_reduce_sum(weight if self.device is None else weight.to(self.device)) / copies
        inverse = torch.where(weight > 0, parallel.loss_scale / weight, torch.zeros_like(weight)).float()
        micro_batches = self.micro_batches(batch, context)
        if self.device is not None and context is not None:  # planned on the host
            micro_batches = [sent(micro, self.device) for micro in micro_batches]
        with parallel.one_gradient():
            loss_sum, metrics = parallel.pipeline.step(
                objective, micro_batches, inverse, self.precision, parallel.weight_copies
            )
        has_loss = parallel.pipeline.rank == parallel.pipeline.last
        positions = sum(micro.tokens.numel() for micro in micro_batches) if has_loss else 0
        return StepResult(loss_sum, weight, metrics, positions)


def executor_kind(parallel: Parallelized) -> type[AutogradExecutor]:
    """What computes the step's gradient of a model made parallel that way."""
    if parallel.pipeline is not None:
        return PipelineExecutor
    if parallel.chunks is not None:
        from trainwright.train.sppo_executor import SppoExecutor

        return SppoExecutor
    return AutogradExecutor


def _padded(batch: Batch, rows: int) -> Batch:
    """``batch`` with its last row again, as padding, so that there are ``rows``."""
    more = rows - batch.tokens.shape[0]

    def extend(t: Tensor) -> Tensor:
        return torch.cat([t, t[-1:].expand(more, *t.shape[1:])])

    out = batch._map(extend)
    out.weights = F.pad(batch.weights, (0, 0, 0, more))
    out.doc_ids = torch.cat([batch.doc_ids, as_padding(out.doc_ids[rows - more :])])
    return out
