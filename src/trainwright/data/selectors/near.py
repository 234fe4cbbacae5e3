"""NEAR: the rows nearest to a set of target texts, by a table of neighbours that was made beforehand.

The table ``[M, K]`` holds for each of M targets the ids of its K nearest rows, nearest first. Rows are taken column by
column (the first neighbour of every target, then the second, ...), each once. The selector of DataFlex (``near``).
:func:`neighbours` makes such a table from embeddings.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.data.selectors.base import Candidates, PoolSelectorConfig, StatelessSelector, check_n


def neighbours(targets: np.ndarray, pool: np.ndarray, k: int) -> np.ndarray:
    """int64 ``[M, k]``: the rows of ``pool [N, D]`` nearest to each of ``targets [M, D]`` by cosine, nearest first."""
    check_n(k, len(pool))

    def unit(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)

    return np.argsort(-(unit(targets) @ unit(pool).T), axis=1, kind="stable")[:, :k].astype(np.int64)


class NearSelector(StatelessSelector):
    """``table`` int ``[M, K]``. Raises ValueError for ids outside of the pool and for too few different ones."""

    def __init__(self, table: np.ndarray):
        table = np.asarray(table)
        if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer) or not table.size:
            raise ValueError(f"the table should be whole numbers [targets, k], got {table.dtype} {table.shape}")
        _, first = np.unique(table.T, return_index=True)  # flattened column by column
        self.order = table.T.ravel()[np.sort(first)].astype(np.int64)

    def select(self, model: Candidates, step: int, n: int) -> np.ndarray:
        check_n(n, model.size)
        if self.order.min() < 0 or self.order.max() >= model.size:
            raise ValueError(
                f"the table names rows {self.order.min()} .. {self.order.max()}, the pool holds 0 .. {model.size - 1}"
            )
        if len(self.order) < n:
            raise ValueError(f"the table names {len(self.order)} different rows, {n} are asked for; use a larger k")
        return self.order[:n]


@register("selector", "near", seed_id="B046")
class NearConfig(PoolSelectorConfig):
    """Rows nearest to target texts, by a table of neighbours made beforehand."""

    fixed_pool: ClassVar[bool] = True
    table: Path = Field(description="An .npy file of row ids [targets, k], nearest first.")

    def build(self, seed: int) -> NearSelector:
        try:
            table = np.load(self.table)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be read as an .npy table: {error}", key="table", value=str(self.table)) from None
        try:
            return NearSelector(table)
        except ValueError as error:
            raise ConfigError(str(error), key="table", value=str(self.table)) from None
