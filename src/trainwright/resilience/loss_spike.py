"""Loss spike: a step whose loss stands far above the recent ones, by a robust z-score.

With ``m`` the median and ``MAD = median(|l_i - m|)`` of the last ``window`` accepted losses, in nats::

    z = (loss - m) / (1.4826 * MAD)          spike  <=>  z > threshold  and  loss - m > min_rise

1.4826 makes MAD the standard deviation of Gaussian noise. Median and MAD do not move for the very outliers that they
are to find, as a mean and a standard deviation would; losses judged as spikes stay out of the window too. ``min_rise``
keeps a nearly noiseless curve (MAD near 0) from calling every ripple a spike. Only rises count: a falling loss has
z < 0.

A single spike is a bad batch and gets ``action``. ``patience`` spikes in a row while steps are being skipped mean that
the weights were damaged earlier or that the data moved to another level: then ``sustained`` decides. After a rollback
nothing is judged until the window holds 16 losses again. A slow divergence, which the window follows, is not a spike,
and a non-finite loss is not judged here (see ``non_finite``).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from trainwright.core.registry import register
from trainwright.resilience.base import Action, Monitor, MonitorConfig, StepInfo, Verdict

MIN_HISTORY = 16  # fewer values give no usable MAD


def robust_z(value: float, history: list[float]) -> tuple[float, float]:
    """``(z, rise)`` of ``value`` over the median of ``history``; z is inf for a rise over values without spread."""
    m = median(history)
    mad = median([abs(x - m) for x in history])
    rise = value - m
    if mad == 0:
        return (math.inf if rise > 0 else 0.0), rise
    return rise / (1.4826 * mad), rise


class LossSpike:
    """Verdict ``action`` at a spike, ``sustained`` at the ``patience``-th in a row."""

    def __init__(
        self,
        threshold: float = 8.0,
        min_rise: float = 0.3,
        window: int = 128,
        warmup: int = 100,
        action: Action = "skip",
        patience: int = 10,
        sustained: Literal["accept", "rollback", "stop"] = "rollback",
    ):
        self.threshold, self.min_rise, self.warmup = threshold, min_rise, warmup
        self.action, self.patience, self.sustained = action, patience, sustained
        self.history: deque[tuple[int, float]] = deque(maxlen=window)  # (step, loss), accepted ones only
        self.streak: list[tuple[int, float]] = []  # the spikes in a row up to now

    def inspect(self, step: StepInfo) -> Verdict:
        if not math.isfinite(step.loss):
            return Verdict()
        self._forget_from(step.step)
        if step.step <= self.warmup or len(self.history) < MIN_HISTORY:
            return self._accept(step)
        z, rise = robust_z(step.loss, [loss for _, loss in self.history])
        if z <= self.threshold or rise <= self.min_rise:
            return self._accept(step)
        self.streak.append((step.step, step.loss))
        since = self.streak[0][0]
        reason = (
            f"loss {step.loss:.4g} is {rise:.3g} nats (robust z {z:.1f}) above the median of {len(self.history)} steps"
        )
        if len(self.streak) < self.patience or self.action == "stop":
            return Verdict(self.action, reason, "loss_spike", since)
        reason += f", since step {since}"
        if self.sustained == "accept":
            self.history.clear()
            self.history.extend(self.streak)
            self.streak = []
            return Verdict()
        self.streak = []
        return Verdict(self.sustained, reason, "loss_spike", since)

    def _accept(self, step: StepInfo) -> Verdict:
        self.history.append((step.step, step.loss))
        self.streak = []
        return Verdict()

    def _forget_from(self, step: int) -> None:
        """After a rollback steps come again: later ones would make the earlier, higher level look like a spike."""
        while self.history and self.history[-1][0] >= step:
            self.history.pop()
        while self.streak and self.streak[-1][0] >= step:
            self.streak.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"history": [list(x) for x in self.history], "streak": [list(x) for x in self.streak]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history.clear()
        self.history.extend((int(s), float(x)) for s, x in state["history"])
        self.streak = [(int(s), float(x)) for s, x in state["streak"]]


@register("monitor", "loss_spike")
class LossSpikeConfig(MonitorConfig):
    """Find steps whose loss stands far above the recent ones (median and MAD), and skip, roll back or stop."""

    threshold: PositiveFloat = Field(8.0, description="Robust z-score above which a loss is a spike.")
    min_rise: NonNegativeFloat = Field(0.3, description="Smallest rise over the median that can be a spike, in nats.")
    window: int = Field(128, ge=MIN_HISTORY, description="Accepted steps that median and MAD are taken over.")
    warmup: NonNegativeInt = Field(100, description="Steps at the start of the run that are never judged.")
    action: Literal["skip", "rollback", "stop"] = Field("skip", description="Verdict on a spike.")
    patience: PositiveInt = Field(10, description="Spikes in a row after which `sustained` decides.")
    sustained: Literal["accept", "rollback", "stop"] = Field(
        "rollback", description="After `patience` spikes in a row: accept the new level, roll back, or stop."
    )

    def build(self) -> Monitor:
        return LossSpike(
            self.threshold, self.min_rise, self.window, self.warmup, self.action, self.patience, self.sustained
        )
