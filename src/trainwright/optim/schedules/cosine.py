"""Cosine decay after a linear warm-up: factor final + (1 - final) (1 + cos(pi x)) / 2.

x in [0, 1] is the way from warm-up to the end of the run.

SGDR: Stochastic Gradient Descent with Warm Restarts, arXiv:1608.03983; one period, without restarts.
"""

from __future__ import annotations

import math

from pydantic import Field

from trainwright.core.registry import register
from trainwright.optim.schedules._warmup import DecayConfig, progress


@register("schedule", "cosine", paper="arXiv:1608.03983")
class CosineConfig(DecayConfig):
    """Warm-up, then half a cosine to the final rate."""

    final: float = Field(0.1, ge=0, le=1, description="Factor at the end of the run.")

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress(step, warmup, total_steps)))
