"""Constant rate after a linear warm-up: factor 1."""

from __future__ import annotations

from trainwright.core.registry import register
from trainwright.optim.schedules._warmup import WarmupConfig


@register("schedule", "constant")
class ConstantConfig(WarmupConfig):
    """Warm-up, then the peak rate."""

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        return 1.0
