"""The stages of this rank at work, under torch's schedules (torch.distributed.pipelining).

GPipe (arXiv:1811.06965), 1F1B (arXiv:2006.09503), interleaved 1F1B (arXiv:2104.04473) and zero bubble in its V shape
(arXiv:2401.10241). Shapes are known beforehand, so nothing is run to find them out.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_reduce_sum, local_tensor
from trainwright.core.divided import Division
from trainwright.core.errors import TrainwrightError
from trainwright.objectives.base import Loss, Objective
from trainwright.parallel.config import PipelineSection
from trainwright.parallel.context.host import split
from trainwright.parallel.pipeline.early_exit import ExitStage, FilledSchedule, TiedStages
from trainwright.parallel.pipeline.fill import (
    FillPlan,
    Normalisation,
    exits_by_stage,
    fill_plan,
    normalisation,
    unembedding_stages,
)
from trainwright.parallel.pipeline.layout import stage_layers
from trainwright.parallel.pipeline.legal import check_micro_batches
from trainwright.parallel.pipeline.stage import Stage, StageModel, Work
from trainwright.parallel.pipeline.tied import TiedHead

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}


class Pipeline:
    """This rank's stages.

    model    what the rank holds
    stages   its stages in order, wrapped by FSDP or not
    layout   the rank in ``group`` of each stage
    """

    def __init__(
        self,
        model: StageModel,
        stages: dict[int, Stage],
        section: PipelineSection,
        layout: list[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        self.model, self.stages, self.section, self.layout = model, stages, section, layout
        self.group, self.device = group, device
        self.rank, self.pp = dist.get_rank(group), dist.get_world_size(group)
        self.last = layout[-1]  # the rank that has the loss
        first_stage, last_stage = stages.get(0), stages.get(len(layout) - 1)
        self._tied: TiedHead | TiedStages | None = None
        elsewhere: frozenset[int] = frozenset()
        if model.arch.tie_embeddings:
            head = None if last_stage is None else last_stage.head if last_stage.own_head else last_stage.embed
            self._tied = TiedHead(first_stage.embed if first_stage else None, head, (layout[0], self.last), group)
            if first_stage is None and last_stage is not None and last_stage.embed is not None:
                elsewhere = frozenset([id(last_stage.embed.weight)])
        self._fills, settings = False, model.exit_settings
        if settings is not None:
            layers = stage_layers(model.arch.n_layers, len(layout), section.layers)
            self._exits = exits_by_stage(settings.positions, layers)
            self._fills = section.fill_warmup + section.fill_cooldown > 0
            holders = unembedding_stages(settings, self._exits, model.arch.tie_embeddings)
            if len(holders) > 1 and settings.tied:  # of single stages, whose numbers are the ranks
                shared: Any = None
                if self.rank in holders:
                    shared = model.embed if model.arch.tie_embeddings else model.head
                self._tied = TiedStages(shared, holders, group)
                elsewhere = frozenset([id(shared.weight)] if shared is not None and self.rank != holders[0] else [])
        self.division = Division(group, elsewhere)
        self._schedule: tuple[Any, Any] | None = None  # its key, and it: buffers are kept from step to step
        self._names: tuple[Objective, list[str]] | None = None  # of the figures of an objective

    # -- a training step ----------------------------------------------------------------------------------------

    def step(
        self, objective: Objective, micro_batches: list[Batch], inverse: Tensor, precision: Any, copies: int = 1
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward of micro-batches of one shape, their loss times ``inverse``. A collective.

        copies  ranks that hold the same loss weights
        Returns the sum of the losses and of their metrics: float64 scalars, on ranks other than the last stage's 0 but
        for the early exits there.
        """
        if self._tied is not None:
            self._tied.refresh()
        work = self._work(objective, micro_batches, precision)
        schedule = self._build(micro_batches, inverse)
        numbers = torch.arange(len(micro_batches))
        factors = self._fill(schedule, work, copies) if self._fills else None
        self._inverse = inverse if factors is None else inverse * factors.losses
        work.exit_scales = [inverse] * len(micro_batches)
        if factors is not None:
            work.exit_scales = self._scales(schedule.plan, factors, inverse)
        try:
            schedule.step(target=numbers, return_outputs=False)
        except RuntimeError as error:
            raise _ours(error) from error
        finally:
            for stage in self.stages.values():
                stage.work = None
                stage.taken.clear()
        if factors is not None:
            self._scale_gradients(factors.gradients)
        if self._tied is not None:
            self._tied.sum_gradients()
        losses = [work.losses[i] for i in sorted(work.losses)]
        total, metrics = _summed(losses, self.device)
        early, figures = _summed(work.exit_losses, self.device)
        if factors is not None:
            total, metrics = total * factors.finals, {n: v * factors.finals for n, v in metrics.items()}
            early, figures = early * factors.seen, {n: v * factors.seen for n, v in figures.items()}
        total, metrics = total + early, metrics | figures
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return total, {name: metrics.get(name, zero) for name in self._figures(objective, metrics)}

    def _figures(self, objective: Objective, metrics: dict[str, Tensor]) -> list[str]:
        """Names of the objective's figures, which all ranks have to know to add them up: those of its first step."""
        if self._names is None or self._names[0] is not objective:
            settings = self.model.exit_settings
            names: list[Any] = [[*metrics, *(n for n in (settings.names() if settings else []) if n not in metrics)]]
            dist.broadcast_object_list(names, group_src=self.last, group=self.group, device=torch.device("cpu"))
            self._names = objective, names[0]
        found = self._names[1]
        new = [name for name in metrics if name not in found]
        if new:
            raise TrainwrightError(
                f"the objective logs {', '.join(new)} and did not in its first step; the other stages of a pipeline "
                "know of that step's figures only"
            )
        return found

    def _build(self, micro_batches: list[Batch], inverse: Tensor) -> Any:
        rows, length = micro_batches[0].tokens.shape
        key = (len(micro_batches), rows, length)
        if self._schedule is not None and self._schedule[0] == key:
            return self._schedule[1]
        self._schedule = None  # frees its buffers first
        check_micro_batches(self.section, self.pp, len(micro_batches))
        built = []
        for number, stage in self.stages.items():
            stream = stage.stream(rows, length, grad=True)
            built.append(
                ExitStage(
                    stage,
                    number,
                    len(self.layout),
                    self.device,
                    input_args=() if stage.first else stream,
                    output_args=torch.empty((), device="meta", requires_grad=True) if stage.last else stream,
                    group=self.group,
                )
            )
        kind = cast(Any, FilledSchedule if self._fills else SCHEDULES[self.section.schedule])
        single = self.section.schedule in ("gpipe", "1f1b")
        schedule = kind(built[0] if single else built, len(micro_batches), loss_fn=self._loss, scale_grads=False)
        if self._fills:
            schedule.plan = self._plan(len(micro_batches))
        self._schedule = (key, schedule)
        return schedule

    def _loss(self, total: Tensor, number: Tensor) -> Tensor:
        return total * self._inverse.to(total.dtype)

    def _fill(self, schedule: Any, work: Work, copies: int) -> Normalisation:
        """Bubble filling of a step; a collective over all ranks."""
        plan: FillPlan = schedule.plan
        weights = all_reduce_sum(torch.stack([micro.weight() for micro in work.micro_batches])) / copies
        work.shallow = frozenset(plan.stream + i for i, d in enumerate(plan.deepest) if d == self.rank)
        return normalisation(plan, self.rank, weights)

    def _plan(self, micro_batches: int) -> FillPlan:
        s = self.section
        return fill_plan(micro_batches, s.backward_ratio, s.fill_warmup, s.fill_cooldown, self._exits)

    @staticmethod
    def _scales(plan: FillPlan, factors: Normalisation, inverse: Tensor) -> list[Tensor]:
        """What multiplies the exits' losses of each micro-batch."""
        whole, cool = inverse * factors.exits, inverse * factors.losses
        cooling = [cool] * len(plan.shallowest)
        return [whole] * plan.full + cooling + [whole] * len(plan.deepest)

    @torch.no_grad()
    def _scale_gradients(self, factor: Tensor) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                local_tensor(p.grad).mul_(factor.to(p.grad.dtype))

    def _work(self, objective: Objective, micro_batches: list[Batch], precision: Any) -> Work:
        work = Work(objective, micro_batches, precision)
        for stage in self.stages.values():
            stage.work = work
        return work

    # -- validation ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward_only(self, objective: Objective, batch: Batch, precision: Any, by_rows: bool = True) -> Loss:
        """The loss of a batch without gradients. A collective: sum and metrics are 0, or missing, on ranks other than
        the last stage's, the weight is there on all.

        by_rows  rows may be taken apart: the ranks of a context group have the same ones"""
        if self._tied is not None:
            self._tied.refresh()
        # One behind the other through the ranks, which keeps them busy; where a rank has several stages, the first
        # micro-batch would meet itself.
        apart = by_rows and len(self.stages) == 1
        pieces = split(batch, -(-batch.tokens.shape[0] // self.pp)) if apart else [batch]
        work = self._work(objective, pieces, precision)
        sent: list[Any] = []
        try:
            for index, micro in enumerate(pieces):
                stream: tuple[Tensor, ...] = ()
                for number, stage in self.stages.items():
                    if not stage.first and self.layout[number - 1] != self.rank:
                        stream = self._receive(stage, micro, self.layout[number - 1])
                    out = stage(*stream, index=index)
                    stream = out if isinstance(out, tuple) else (out,)
                    if not stage.last and self.layout[number + 1] != self.rank:
                        peer = dist.get_global_rank(self.group, self.layout[number + 1])
                        held = [t.contiguous() for t in stream]
                        sent += [(dist.isend(t, peer, self.group), t) for t in held]
            for message, _ in sent:
                message.wait()
        finally:
            for stage in self.stages.values():
                stage.work = None
                for module in stage.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # what is gathered now would miss a change of the weights
        losses = [work.losses[i] for i in sorted(work.losses)]
        total, metrics = _summed([*losses, *work.exit_losses], self.device)
        if work.exit_losses:
            metrics.setdefault("nll", torch.zeros_like(total))  # of the last layer's loss, what counts as a model's
        weight = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            weight += loss.weight
        dist.broadcast(weight, group_src=self.last, group=self.group)
        return Loss(total, weight, metrics)

    def _receive(self, stage: Stage, micro: Batch, source: int) -> tuple[Tensor, ...]:
        rows, length = micro.tokens.shape
        peer = dist.get_global_rank(self.group, source)
        buffers = tuple(torch.empty_like(t, device=self.device) for t in stage.stream(rows, length, grad=False))
        for buffer in buffers:
            dist.recv(buffer, peer, self.group)
        return buffers


def _summed(losses: list[Loss], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    total = torch.zeros((), dtype=torch.float64, device=device)
    metrics: dict[str, Tensor] = {}
    for loss in losses:
        total += loss.sum
        for name, value in loss.metrics.items():
            value = value.double()
            metrics[name] = metrics[name] + value if name in metrics else value
    return total, metrics


def _ours(error: BaseException) -> BaseException:
    """The error of ours that torch's pipelining has wrapped, if there is one."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, TrainwrightError):
            return found
        found = found.__cause__
    return error
