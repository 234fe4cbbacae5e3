"""What the schedules share: a linear warm-up, a final factor, and amounts given in steps or as a share of the run."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat

from trainwright.optim.base import Factor, ScheduleConfig

log = logging.getLogger("trainwright")


def _whole(amount: float) -> float:
    if amount >= 1 and amount != int(amount):
        raise ValueError("should be a whole number of steps, or below 1 as a share of the run")
    return amount


Steps = Annotated[NonNegativeFloat, AfterValidator(_whole)]  # 1 or more: steps; below 1: share of the run


def in_steps(amount: float, total_steps: int) -> int:
    """``amount`` as steps: below 1 it is a share of the run."""
    return round(amount * total_steps) if amount < 1 else int(amount)


def progress(step: int, start: int, total_steps: int) -> float:
    """Share of the way from ``start`` to the end of the run, in [0, 1].

    The last step of a run of n stands at 1 - 1/n, so that it still trains.
    """
    return min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)


class WarmupConfig(ScheduleConfig):
    """Base of schedules with a linear warm-up."""

    warmup: Steps = Field(0.02, description="Steps of linear warm-up; below 1: share of the run.")

    @abstractmethod
    def after(self, step: int, warmup: int, total_steps: int) -> float:
        """Factor at ``step >= warmup``; 1 at ``step == warmup``."""

    def build(self, total_steps: int) -> Factor:
        warmup = in_steps(self.warmup, total_steps)
        if warmup >= total_steps > 1:
            log.warning(
                "schedule.warmup=%g: the run of %d steps ends before the rate has reached its peak",
                self.warmup,
                total_steps,
            )

        def factor(step: int) -> float:
            # Step 0 trains too: it gets the first of `warmup` rungs, not a rate of 0.
            return (step + 1) / (warmup + 1) if step < warmup else self.after(step, warmup, total_steps)

        return factor


class DecayConfig(WarmupConfig):
    """Base of schedules that end at ``final``."""

    final: float = Field(0.0, ge=0, le=1, description="Factor at the end of the run.")
