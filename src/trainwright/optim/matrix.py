"""What matrix methods share: they step the hidden matrices, and a nested optimizer steps everything else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import torch
from pydantic import Field, model_validator

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import Slot
from trainwright.optim.base import OptimizerConfig, UpdateRule
from trainwright.optim.composite import CompositeOptimizer

MATRICES = ("matrix", "expert")  # roles


class MatrixRule(UpdateRule):
    """An update rule for matrices ``[out, in]`` and stacks of them ``[..., out, in]``, plain or DTensor.

    A group may hold ``splits``: rows (negative: columns) of each matrix that was fused into its parameters.
    Raises ValueError for parameters with fewer than two dimensions and for splits that do not add up.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]):
        super().__init__(params, {"splits": (), **defaults})

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        splits = group["splits"]
        for p in group["params"]:
            if p.ndim < 2:
                raise ValueError(f"{type(self).__name__} takes matrices, got a parameter of shape {tuple(p.shape)}")
            if splits and sum(splits) not in (p.shape[-2], -p.shape[-1]):
                raise ValueError(
                    f"{splits=} do not add up to the rows, or negative to the columns, of {tuple(p.shape)}"
                )


class MatrixConfig(OptimizerConfig):
    """Base of configs of matrix methods."""

    inner: Annotated[OptimizerConfig, Slot("optimizer", default="adamw")] = Field(
        cast(OptimizerConfig, {"name": "adamw"}),
        description="Optimizer of embeddings, head, norms and biases, at a rate of its own.",
    )

    @model_validator(mode="after")
    def _inner_steps_anything(self) -> MatrixConfig:
        if isinstance(self.inner, MatrixConfig):
            raise ValueError(
                f"inner has to step embeddings, norms and biases, which {self.inner.name} cannot; use adamw or sgd"
            )
        return self

    @model_validator(mode="after")
    def _inner_has_a_rate(self) -> MatrixConfig:
        if (rate := self.inner_rate()) is not None:
            try:
                self.inner = self.inner.at_rate(rate)
            except ConfigError as error:
                raise error.under("inner") from None
        return self

    def inner_rate(self) -> float | None:
        """Learning rate of an inner optimizer that was given none; None: its own default.

        That is for methods whose rate is of another kind than AdamW's, such as the length of a step over the weights'.
        """
        return None

    @abstractmethod
    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The method over hidden matrices: ``groups`` to give to its class; ``params``, the same ones with names."""

    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        return self._combined(params, self.inner.build)

    def build_rule(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        return self._combined(params, self.inner.build_rule)

    def _combined(
        self, params: Sequence[NamedParam], inner: Callable[[Sequence[NamedParam]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        members = [n for n in params if n.role in MATRICES]
        if not members:
            raise ConfigError(
                f"there are no hidden matrices for {self.name} to step; use adamw", key="name", value=self.name
            )
        rest = [n for n in params if n.role not in MATRICES]
        matrices = self.build_matrices(members, matrix_groups(members))
        return CompositeOptimizer([matrices, inner(rest)]) if rest else matrices


class OneRateConfig(MatrixConfig):
    """Base of configs of matrix methods with one rate for all parameters.

    Their papers' runs have one, since the update is of the size of AdamW's or scaled beside the rate: so a sweep of it
    moves all parameters, as a sweep of AdamW's does.
    """

    inner: Annotated[OptimizerConfig, Slot("optimizer", default="adamw")] = Field(
        cast(OptimizerConfig, {"name": "adamw"}),
        description="Optimizer of embeddings, head, norms and biases; without an lr it has this one.",
    )

    def inner_rate(self) -> float | None:
        return self.lr


def matrix_groups(params: Sequence[NamedParam]) -> list[dict[str, Any]]:
    """Parameter groups of equal ``splits``."""
    groups: dict[tuple[int, ...], list[NamedParam]] = {}
    for n in params:
        groups.setdefault(tuple(n.splits), []).append(n)
    return [{"params": [n.param for n in some], "splits": splits} for splits, some in groups.items()]
