"""Selection by loss bands: rows are split at two quantiles of their loss, and one band is drawn more often.

With q1, q2 the 33 % and 66 % quantiles of the pool's losses: low (l <= q1), medium (q1 < l <= q2), high (l > q2).
Rows of the focus band have weight 5, all others 1; n are drawn without replacement, chances in proportion to weight.
The selector of DataFlex (OpenDCAI/DataFlex, ``loss``). Two things are otherwise here: rows without a trained token are
never drawn while others are left, and where n is more than the pool it is an error, not a draw with replacement.
High focus drifts to noise, which has the highest loss of all; medium leaves both noise and the long learnt aside.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, PositiveFloat, field_validator

from trainwright.core.registry import register
from trainwright.data.selectors.base import Candidates, PoolSelectorConfig, StatelessSelector, draw

Band = Literal["low", "medium", "high"]


def band_weights(losses: np.ndarray, focus: Band, weight: float, quantiles: tuple[float, float]) -> np.ndarray:
    """Chances ``[N]`` of rows by their losses ``[N]``; 0 where a loss is not finite."""
    finite = np.isfinite(losses)
    if not finite.any():
        return np.ones(len(losses))
    q1, q2 = np.quantile(losses[finite], quantiles)
    inside = {"low": losses <= q1, "medium": (losses > q1) & (losses <= q2), "high": losses > q2}[focus]
    return np.where(finite, np.where(inside, weight, 1.0), 0.0)


class LossSelector(StatelessSelector):
    """See the module. Raises ValueError for quantiles out of order or a weight that is not above 0."""

    def __init__(
        self, focus: Band = "medium", weight: float = 5.0, quantiles: tuple[float, float] = (0.33, 0.66), seed: int = 0
    ):
        if focus not in ("low", "medium", "high"):
            raise ValueError(f"focus={focus!r} should be low, medium or high")
        if not 0 <= quantiles[0] < quantiles[1] <= 1 or not weight > 0:
            raise ValueError(f"quantiles={quantiles} should rise within 0..1, and weight={weight} be above 0")
        self.focus, self.weight, self.quantiles, self.seed = focus, weight, quantiles, seed

    def select(self, model: Candidates, step: int, n: int) -> np.ndarray:
        return draw(band_weights(model.losses(), self.focus, self.weight, self.quantiles), n, self.seed, step)


@register("selector", "loss", seed_id="B046")
class LossSelectorConfig(PoolSelectorConfig):
    """Rows by the band that their loss is in, one band five times as often."""

    focus: Band = Field("medium", description="The band drawn more often.")
    focus_weight: PositiveFloat = Field(5.0, description="How much more often.")
    quantiles: tuple[float, float] = Field((0.33, 0.66), description="Where low ends and high begins.")

    @field_validator("quantiles")
    @classmethod
    def _rise(cls, quantiles: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= quantiles[0] < quantiles[1] <= 1:
            raise ValueError("should be two numbers in 0..1, the second larger")
        return quantiles

    def build(self, seed: int) -> LossSelector:
        return LossSelector(self.focus, self.focus_weight, self.quantiles, seed)
