"""Linear decay after a linear warm-up: factor 1 - (1 - final) x, x in [0, 1] the way from warm-up to the end."""

from __future__ import annotations

from trainwright.core.registry import register
from trainwright.optim.schedules._warmup import DecayConfig, progress


@register("schedule", "linear")
class LinearConfig(DecayConfig):
    """Warm-up, then a straight line to the final rate."""

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        return 1 - (1 - self.final) * progress(step, warmup, total_steps)
