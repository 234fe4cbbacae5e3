"""Random selection from the pool: the baseline that other selectors have to beat, at the same number of rows."""

from __future__ import annotations

import numpy as np

from trainwright.core.registry import register
from trainwright.data.selectors.base import Candidates, PoolSelectorConfig, StatelessSelector, draw


class RandomSelector(StatelessSelector):
    """``n`` rows, each with the same chance, anew at each selection."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def select(self, model: Candidates, step: int, n: int) -> np.ndarray:
        return draw(np.ones(model.size), n, self.seed, step)


@register("selector", "random", seed_id="B046")
class RandomSelectorConfig(PoolSelectorConfig):
    """Rows drawn from the pool, each with the same chance."""

    def build(self, seed: int) -> RandomSelector:
        return RandomSelector(seed)
