"""Inverse square root after a linear warm-up of w steps: factor sqrt((w + 1) / (step + 1)).

Attention Is All You Need, arXiv:1706.03762. Needs no end of the run, so that training can go on.
"""

from __future__ import annotations

import math

from trainwright.core.registry import register
from trainwright.optim.schedules._warmup import WarmupConfig


@register("schedule", "inverse_sqrt", paper="arXiv:1706.03762")
class InverseSqrtConfig(WarmupConfig):
    """Warm-up, then falling with one over the root of the step."""

    def after(self, step: int, warmup: int, total_steps: int) -> float:
        return math.sqrt((warmup + 1) / (step + 1))
