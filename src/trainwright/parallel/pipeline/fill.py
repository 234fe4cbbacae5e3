"""Which micro-batches fill the bubbles of a pipeline with early exits, and what they weigh: early_exit.py says how.

Plain numbers, so that a recipe can be checked before anything is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.models.early_exit import ExitSettings


def fill_counts(stages: int, beta: float, warmup: int, cooldown: int) -> tuple[list[int], list[int]]:
    """Partial micro-batches of each stage in warm-up and in cool-down, at most ``warmup`` and ``cooldown``."""
    before = [max(0, min(warmup, int((beta * (stages - r - 1) - r) / (1 + beta)))) for r in range(stages)]
    after = [max(0, min(cooldown, int(beta * r / (1 + beta)))) for r in range(stages)]
    return before, after


@dataclass(frozen=True)
class FillPlan:
    """Micro-batches by number: ``full`` whole ones, then those of the cool-down, then those of the warm-up.

    deepest      of each of the warm-up: the last stage that it reaches
    shallowest   of each of the cool-down: the first stage that takes it backward
    """

    full: int
    deepest: tuple[int, ...] = ()
    shallowest: tuple[int, ...] = ()

    @property
    def stream(self) -> int:
        """Those that go forward through everything: 0 .. stream - 1."""
        return self.full + len(self.shallowest)

    def warmup(self, stage: int) -> int:
        return sum(d >= stage for d in self.deepest)

    def cooldown(self, stage: int) -> int:
        return sum(s <= stage for s in self.shallowest)

    def backward(self, stage: int) -> int:
        """Of the stream, those that ``stage`` takes backward."""
        return self.full + self.cooldown(stage)


def fill_plan(micro_batches: int, beta: float, warmup: int, cooldown: int, exits: Sequence[int]) -> FillPlan:
    """``exits``: how many each stage has. Partial micro-batches beyond what the bubbles hold, or without an exit, stay
    whole. ``full`` may come out below 1: there are too few micro-batches."""
    stages = len(exits)
    before, after = fill_counts(stages, beta, warmup, cooldown)
    deepest = []
    for i in range(max(before)):
        reached = [r for r in range(stages) if before[r] > i and exits[r]]
        if reached:
            deepest.append(reached[-1])
    shallowest = [min(r for r in range(stages) if after[r] > j) for j in range(max(after))]
    return FillPlan(micro_batches - len(deepest) - len(shallowest), tuple(deepest), tuple(shallowest))


@dataclass
class Normalisation:
    """Of one stage: what multiplies the losses of a micro-batch and the gradients, and what sums are scaled by to stand
    for the whole batch. Scalars."""

    losses: Tensor  # of the last layer's
    exits: Tensor  # of the exits', in the full ones and the warm-up
    gradients: Tensor
    seen: Tensor  # exits: weight of the batch over the weight of what has gone backward here
    finals: Tensor  # the same of the last layer's loss


def normalisation(plan: FillPlan, stage: int, weights: Tensor) -> Normalisation:
    """``weights [M]`` of the micro-batches over all ranks, float64; factors are relative to 1 / their sum."""
    total, full = weights.sum(), weights[: plan.full].sum()
    warm = weights[plan.stream : plan.stream + plan.warmup(stage)].sum()
    cool = weights[plan.full : plan.full + plan.cooldown(stage)].sum()
    return Normalisation(
        _over(total, full),
        _over(total, full + warm),
        _over(full, full + cool),
        _over(total, full + warm + cool),
        _over(total, weights[: plan.stream].sum()),
    )


def _over(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, torch.zeros_like(a))


def exits_by_stage(positions: Sequence[int], layers: Sequence[range]) -> list[int]:
    """How many of the exits at ``positions`` (layers done) each stage has: one lies in front of the layer behind it."""
    ends = [*(r.stop for r in layers[:-1]), layers[-1].stop + 1]
    starts = [0, *ends[:-1]]
    return [sum(a <= p < b for p in positions) for a, b in zip(starts, ends, strict=True)]


def unembedding_stages(settings: ExitSettings, exits: Sequence[int], tied_embedding: bool) -> list[int]:
    """The stages that hold the model's unembedding: the last, with it the first where it is the embedding, and those
    with a tied exit."""
    last = len(exits) - 1
    found = {last} | ({0} if tied_embedding else set())
    return sorted(found | {r for r, n in enumerate(exits) if n and settings.tied})
