"""Each token counts alike. Training is that of a recipe without a weighter, bit for bit."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from trainwright.core.registry import register
from trainwright.data.weighters.base import WeighterConfig, evenly


class UniformWeighter:
    def weights(self, losses: Tensor) -> Tensor:
        return evenly(losses.detach())


@register("weighter", "uniform", seed_id="B046")
class UniformWeighterConfig(WeighterConfig):
    """Each token counts alike."""

    weighs: ClassVar[bool] = False

    def build(self) -> UniformWeighter:
        return UniformWeighter()
