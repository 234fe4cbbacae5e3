"""Rows count by their loss: those of low loss less, and those of high loss no more than the middle ones.

Over the rows of the global batch, with losses l [N]::

    x = 2 delta (l - min l) / (max l - min l) - delta                 in [-delta, delta]; 0 where all are equal
    s = min(x + delta, delta)        linupper: rises to the middle of the range, then flat
        1 - x^2 / delta^2            quadratic: the middle counts most
        |x|                          extremes: both ends count most
    w = softmax(s / r);   loss = sum_i w_i l_i

Dynamic Loss-Based Sample Reweighting for Improved Large Language Model Pretraining, arXiv:2502.06733. In the trainer a
row's token weights are multiplied by w (see base.row_scales), so that equal losses give the plain mean over tokens. The
losses are needed before the gradient, so each step costs one more forward pass, a third of a step.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from trainwright.core.registry import register
from trainwright.data.weighters.base import WeighterConfig, evenly

Strategy = Literal["linupper", "quadratic", "extremes"]


def scores(losses: Tensor, strategy: Strategy, delta: float) -> Tensor:
    """s of the module's equations, of finite ``losses [N]``."""
    low, high = losses.min(), losses.max()
    span = high - low
    x = torch.where(span > 0, 2 * delta * (losses - low) / span.clamp(min=torch.finfo(losses.dtype).tiny) - delta, 0.0)
    if strategy == "linupper":
        return (x + delta).clamp(max=delta)
    return 1 - x.square() / delta**2 if strategy == "quadratic" else x.abs()


class LossWeighter:
    """See the module. Raises ValueError for a strategy that there is not, or delta or temperature not above 0."""

    def __init__(self, strategy: Strategy = "linupper", delta: float = 1.0, temperature: float = 1.0):
        if strategy not in ("linupper", "quadratic", "extremes"):
            raise ValueError(f"strategy={strategy!r} should be linupper, quadratic or extremes")
        if not (delta > 0 and temperature > 0):
            raise ValueError(f"delta={delta} and temperature={temperature} should be above 0")
        self.strategy, self.delta, self.temperature = strategy, delta, temperature

    @torch.no_grad()
    def weights(self, losses: Tensor) -> Tensor:
        has = losses.isfinite()
        if not bool(has.any()):
            return evenly(losses)
        out = torch.zeros_like(losses)
        out[has] = torch.softmax(scores(losses[has], self.strategy, self.delta) / self.temperature, 0)
        return out


@register("weighter", "loss", paper="arXiv:2502.06733", seed_id="B046")
class LossWeighterConfig(WeighterConfig):
    """Rows of low loss count less; costs one more forward pass a step."""

    warmup_step: NonNegativeInt = Field(0, description="Steps in which each token counts alike.")
    strategy: Strategy = Field("linupper", description="Which losses count most; see the method's equations.")
    delta: PositiveFloat = Field(1.0, description="Half the range that losses are stretched to.")
    temperature: PositiveFloat = Field(1.0, description="Of the softmax over the rows; larger is more alike.")

    def build(self) -> LossWeighter:
        return LossWeighter(self.strategy, self.delta, self.temperature)
