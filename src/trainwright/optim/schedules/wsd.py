"""Warm-up, stable, decay: factor 1 until ``decay`` steps before the end, then a straight line to ``final``.

MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training Strategies, arXiv:2404.06395. The
paper decays exponentially; a straight line does as well and ends where it is told to (arXiv:2405.18392).
"""

from __future__ import annotations

from pydantic import Field

from trainwright.core.registry import register
from trainwright.optim.schedules._warmup import DecayConfig, Steps, in_steps, progress


@register("schedule", "wsd", paper="arXiv:2404.06395")
class WSDConfig(DecayConfig):
    """Warm-up, stable, decay: the peak rate until the last part of the run, then a straight line down."""

    decay: Steps = Field(0.2, gt=0, description="Steps of decay at the end; below 1: share of the run.")

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        length = max(in_steps(self.decay, total_steps), 1)
        return 1 - (1 - self.final) * progress(step, max(total_steps - length, warmup), total_steps)
