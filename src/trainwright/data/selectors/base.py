"""What every selector offers: the ids of the rows to train on, out of a pool, by what the model says of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from trainwright.core.registry import MethodConfig
from trainwright.core.seeds import derive


class Candidates(Protocol):
    """The pool, as the model of the moment sees it. Row ids are ``0 .. size - 1``."""

    size: int
    updates: int  # selections over the whole run

    def losses(self) -> np.ndarray:
        """Mean loss of each row in nats a token, float64 ``[size]``; NaN for a row without a trained token."""

    def gradients(self, dim: int, kind: Literal["adam", "sgd"]) -> tuple[np.ndarray, np.ndarray]:
        """Projected gradients of the pool's rows ``[size, dim]`` (of ``kind``) and of validation rows ``[n, dim]``."""


class Selector(Protocol):
    """Usable alone with any object that has what :class:`Candidates` has."""

    def select(self, model: Candidates, step: int, n: int) -> np.ndarray:
        """``n`` different ids of the pool, int64, in the order to train on them. The same arguments (and losses) give
        the same ids. Raises ValueError for n above the pool."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StatelessSelector:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class SelectorConfig(MethodConfig):
    """Base of selector configs."""

    selects: ClassVar[bool] = True

    @abstractmethod
    def build(self, seed: int) -> Selector: ...


class PoolSelectorConfig(SelectorConfig):
    """Base of those that select."""

    fixed_pool: ClassVar[bool] = False  # ids have to mean the same row at every selection
    warmup_step: NonNegativeInt = Field(0, description="Steps on rows in order before the first selection.")
    update_step: PositiveInt = Field(100, description="Steps between selections; each chooses the rows of so many.")
    pool_rows: PositiveInt | None = Field(
        None, description="Rows to choose from; null: those of one epoch. All of them are looked at each time."
    )
    renew: bool = Field(
        False, description="Choose from the next pool_rows rows each time, so that a run goes through all of its data."
    )


def check_n(n: int, size: int) -> None:
    if not 0 <= n <= size:
        raise ValueError(f"{n} rows cannot be chosen from a pool of {size}; use a larger pool or a smaller update_step")


def draw(weights: np.ndarray, n: int, seed: int, step: int) -> np.ndarray:
    """``n`` ids without replacement, one after the other with chances in proportion to ``weights [N]`` (>= 0).

    By the n largest of log weight + Gumbel noise, which has that distribution (Efraimidis and Spirakis, 2006). Rows of
    weight 0 come last, when no other is left.
    """
    check_n(n, len(weights))
    rng = np.random.Generator(np.random.PCG64(derive(seed, "select", step)))
    with np.errstate(divide="ignore"):
        keys = np.log(weights)
    keys = np.where(np.isneginf(keys), -1e300, keys) + rng.gumbel(size=len(weights))
    # Equal keys only among rows of weight 0: those in a random order too.
    order = np.lexsort((rng.permutation(len(weights)), -keys))
    return order[:n].astype(np.int64)
