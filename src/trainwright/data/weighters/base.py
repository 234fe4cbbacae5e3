"""What every weighter offers: a weight for each row of the global batch, by its loss."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor

from trainwright.core.registry import MethodConfig


class Weighter(Protocol):
    """Usable alone: ``(weights(losses) * losses).sum()`` in place of ``losses.mean()``."""

    def weights(self, losses: Tensor) -> Tensor:
        """Weights >= 0 that sum to 1, ``[N]``, by the mean loss of each row, ``[N]``; no gradient goes through.

        Rows whose loss is not finite (padding) get 0. Equal losses give equal weights.
        """


class WeighterConfig(MethodConfig):
    """Base of weighter configs."""

    weighs: ClassVar[bool] = True

    @abstractmethod
    def build(self) -> Weighter: ...


def evenly(losses: Tensor) -> Tensor:
    """1 / n for each of the n rows that have a loss."""
    has = losses.isfinite().to(losses.dtype)
    return has / has.sum().clamp(min=1)


def row_scales(weights: Tensor, tokens: Tensor) -> Tensor:
    """What each row's token weights are multiplied by, ``[N]``, so that rows count by ``weights [N]``.

    ``tokens [N]`` is the sum of each row's token weights. The sum over all rows stays what it was, and equal weights
    give 1 everywhere: the plain mean over tokens.
    """
    total = (weights * tokens).sum()
    return weights * (tokens.sum() / total) if bool(total > 0) else weights.new_ones(weights.shape)
