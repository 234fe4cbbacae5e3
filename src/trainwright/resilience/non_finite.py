"""Non-finite loss or gradient: the step is skipped; several in a row stop the run.

One NaN or infinity in an update destroys every weight that it touches, so the step that would bring it is never
applied. A single one usually comes from one broken row or an overflow and training goes on without it; ``patience``
of them in a row mean that the weights or the settings are at fault, and more steps would change nothing.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, PositiveInt

from trainwright.core.registry import register
from trainwright.resilience.base import Monitor, MonitorConfig, StepInfo, Verdict


class NonFinite:
    """Verdict ``skip`` where loss or gradient norm is NaN or infinite, ``stop`` at the ``patience``-th in a row."""

    def __init__(self, patience: int = 10):
        self.patience = patience
        self.in_a_row = 0

    def inspect(self, step: StepInfo) -> Verdict:
        bad = [
            f"{name} is {value}"
            for name, value in (("loss", step.loss), ("gradient norm", step.grad_norm))
            if value is not None and not math.isfinite(value)
        ]
        if not bad:
            self.in_a_row = 0
            return Verdict()
        self.in_a_row += 1
        reason = " and ".join(bad)
        if self.in_a_row >= self.patience:
            reason += f" for {self.in_a_row} steps in a row; lower the learning rate or look at the data of these steps"
            return Verdict("stop", reason, "non_finite")
        return Verdict("skip", reason, "non_finite")

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row = int(state["in_a_row"])


@register("monitor", "non_finite")
class NonFiniteConfig(MonitorConfig):
    """Skip steps whose loss or gradient is not finite; stop after several in a row."""

    patience: PositiveInt = Field(
        10, description="Non-finite steps in a row that stop the run; those before are skipped."
    )

    def build(self) -> Monitor:
        return NonFinite(self.patience)
