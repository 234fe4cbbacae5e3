"""Learning-rate schedules: a 0-based step gives a factor on the peak rate. Each starts with a linear warm-up.

constant; linear and cosine decay to ``final`` (cosine: arXiv:1608.03983); wsd, warm-up, stable, decay
(arXiv:2404.06395); inverse square root (arXiv:1706.03762).
"""

from __future__ import annotations

import math
from abc import abstractmethod

from pydantic import Field, NonNegativeFloat

from trainwright.core.registry import register
from trainwright.optim.base import Factor, ScheduleConfig


def in_steps(amount: float, total_steps: int) -> int:
    """``amount`` as steps: below 1 it is a share of the run."""
    return round(amount * total_steps) if amount < 1 else int(amount)


class WarmupConfig(ScheduleConfig):
    """Base of schedules with a linear warm-up."""

    warmup: NonNegativeFloat = Field(0.02, description="Steps of linear warm-up; below 1: share of the run.")

    @abstractmethod
    def after(self, step: int, warmup: int, total_steps: int) -> float:
        """Factor at ``step >= warmup``."""

    def build(self, total_steps: int) -> Factor:
        warmup = min(in_steps(self.warmup, total_steps), total_steps)

        def factor(step: int) -> float:
            # Step 0 trains too: it gets the first of `warmup` rungs, not a rate of 0.
            return (step + 1) / (warmup + 1) if step < warmup else self.after(step, warmup, total_steps)

        return factor


class DecayConfig(WarmupConfig):
    """Base of schedules that end at ``final``."""

    final: float = Field(0.0, ge=0, le=1, description="Factor at the end of the run.")


def progress(step: int, start: int, total_steps: int) -> float:
    """Share of the way from ``start`` to the end of the run, in [0, 1]; the last step stands at 1 - 1/n, so that it still trains."""
    return min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)


@register("schedule", "constant")
class ConstantConfig(WarmupConfig):
    """Warm-up, then the peak rate."""

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        return 1.0


@register("schedule", "linear")
class LinearConfig(DecayConfig):
    """Warm-up, then a straight line to the final rate."""

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        return 1 - (1 - self.final) * progress(step, warmup, total_steps)


@register("schedule", "cosine", paper="arXiv:1608.03983")
class CosineConfig(DecayConfig):
    """Warm-up, then half a cosine to the final rate."""

    final: float = Field(0.1, ge=0, le=1, description="Factor at the end of the run.")

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress(step, warmup, total_steps)))


@register("schedule", "wsd", paper="arXiv:2404.06395")
class WSDConfig(DecayConfig):
    """Warm-up, stable, decay: the peak rate until the last part of the run, then a straight line down."""

    decay: float = Field(0.2, gt=0, description="Steps of decay at the end; below 1: share of the run.")

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        start = max(total_steps - in_steps(self.decay, total_steps), warmup)
        return 1 - (1 - self.final) * progress(step, start, total_steps)


@register("schedule", "inverse_sqrt", paper="arXiv:1706.03762")
class InverseSqrtConfig(WarmupConfig):
    """Warm-up, then falling with one over the root of the step."""

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        return math.sqrt((warmup + 1) / (step + 1))
