"""No selection: rows in their order. Training is that of a recipe without a selector, bit for bit."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trainwright.core.registry import register
from trainwright.data.selectors.base import Candidates, SelectorConfig, StatelessSelector, check_n


class InOrder(StatelessSelector):
    def select(self, model: Candidates, step: int, n: int) -> np.ndarray:
        check_n(n, model.size)
        return np.arange(n)


@register("selector", "none", seed_id="B046")
class NoSelectorConfig(SelectorConfig):
    """All rows, in their order."""

    selects: ClassVar[bool] = False

    def build(self, seed: int) -> InOrder:
        return InOrder()
