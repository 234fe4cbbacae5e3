"""SinkGD: stateless descent on gradients normalised by several norms in turn; by default rows and columns (Sinkhorn).

G [m, n] of one linear layer; X = G; L times, for each norm g: X = argmax over g(Z) <= 1 of <X, Z>, times what makes
its Frobenius norm sqrt(m n):
row        X = sqrt(n) X / |rows|                  column   X = sqrt(m) X / |columns|
frobenius  X = sqrt(m n) X / |X|_F                 sign     X = sign(X)
spectral   X = sqrt(m n) P / |P|_F, P the polar factor of X (whitening)
W = W (1 - lr wd) - lr scale X
SinkGD is row, column with L = 5 (square-root Sinkhorn); SWAN without centring is row, spectral with L = 1.
Gradient Multi-Normalization for Stateless and Scalable LLM Training, arXiv:2502.06742.

The last norm of the list is exact, those before it within what L passes leave. lr 0.02 and scale 0.05 are the paper's
as third parties took them over, no code of the authors is public. ``momentum`` is an addition: of the gradient before
or of the update after normalisation, at the cost of one tensor per matrix.
Norms are taken in float32 or wider. Of a sharded matrix a pass of column norms takes one all-reduce of one float per
column, row norms take none; with "spectral" whole matrices go to one rank each. Fused matrices are taken apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.matrix import MatrixConfig, MatrixRule
from trainwright.optim.settings import Count
from trainwright.optim.slices import Slices, local_norms, rounds
from trainwright.optim.swan import FLOOR, of_norm, whiten
from trainwright.optim.whole import map_whole

Shape = tuple[int, int]  # of the whole matrices in a stack
Norms = Callable[[int, Sequence[Tensor]], list[Tensor]]  # of whole columns (-2), rows (-1) or matrices (0)
NormName = Literal["row", "column", "frobenius", "sign", "spectral"]


# Each may write to x.


def _divided(x: list[Tensor], norms: list[Tensor], lengths: list[float]) -> list[Tensor]:
    return [t.mul_(length / s.clamp(min=FLOOR)) for t, s, length in zip(x, norms, lengths, strict=True)]


def _row(x: list[Tensor], shapes: Sequence[Shape], norms: Norms) -> list[Tensor]:
    return _divided(x, norms(-1, x), [math.sqrt(n) for _, n in shapes])


def _column(x: list[Tensor], shapes: Sequence[Shape], norms: Norms) -> list[Tensor]:
    return _divided(x, norms(-2, x), [math.sqrt(m) for m, _ in shapes])


def _frobenius(x: list[Tensor], shapes: Sequence[Shape], norms: Norms) -> list[Tensor]:
    return _divided(x, norms(0, x), [math.sqrt(m * n) for m, n in shapes])


def _sign(x: list[Tensor], shapes: Sequence[Shape], norms: Norms) -> list[Tensor]:
    return list(torch._foreach_sign(x))


def _spectral(x: list[Tensor], shapes: Sequence[Shape], norms: Norms) -> list[Tensor]:
    return [of_norm(whiten(t), math.sqrt(m * n)) for t, (m, n) in zip(x, shapes, strict=True)]


NORMS: dict[str, Callable[[list[Tensor], Sequence[Shape], Norms], list[Tensor]]] = {
    "row": _row,
    "column": _column,
    "frobenius": _frobenius,
    "sign": _sign,
    "spectral": _spectral,  # of whole matrices alone
}


def multi_normalise(
    stacks: Sequence[Tensor],
    names: Sequence[str] = ("row", "column"),
    passes: int = 5,
    shapes: Sequence[Shape] | None = None,
    norms: Norms = local_norms,
) -> list[Tensor]:
    """Matrices ``[..., rows, columns]`` in float32 or wider, normalised by each of ``names``, ``passes`` times over.

    ``shapes`` and ``norms`` are those of a Slices where ranks hold parts of the matrices. Zero slices stay zero.
    """
    x = [t.clone() for t in stacks]
    shapes = shapes or [(t.shape[-2], t.shape[-1]) for t in x]
    for _ in range(passes):
        for name in names:
            x = NORMS[name](x, shapes, norms)
    return x


class SinkGD(MatrixRule):
    """SinkGD for parameters with two or more dimensions; the last two are the matrix, those before it a batch.

    params       matrices ``[out, in]`` or stacks ``[E, out, in]``, plain or DTensor
    lr, scale    the update's RMS is their product
    passes       L, through all of ``norms``: any of "row", "column", "frobenius", "sign", "spectral", in this order
    momentum     decay of a running mean; 0: none is kept
    momentum_at  "before" (of gradients) or "after" normalisation
    State: none, or ``momentum`` (shape of the parameter).
    Raises ValueError for parameters with fewer than two dimensions, passes < 1, unknown norms.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        scale: float = 0.05,
        norms: Sequence[str] = ("row", "column"),
        passes: Count = 5,
        momentum: float = 0.0,
        momentum_at: Literal["before", "after"] = "before",
    ):
        if not norms or set(norms) - set(NORMS):
            raise ValueError(f"norms={list(norms)} should name one or more of {', '.join(NORMS)}")
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "scale": scale, "norms": tuple(norms), "passes": passes,
            "momentum": momentum, "momentum_at": momentum_at,
        }  # fmt: skip
        super().__init__(params, defaults)

    def state_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_at": group["momentum_at"]} if group["momentum"] else {}

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        for p in params:
            self.state.setdefault(p, {})  # torch's set_optimizer_state_dict wants an entry for all that was stepped
        mu = group["momentum"]
        if mu and group["momentum_at"] == "before":
            momenta = self.state_of(params, "momentum")
            torch._foreach_lerp_(momenta, grads, 1 - mu)
            return self.normalised(momenta, group)
        found = self.normalised(grads, group)
        if mu:
            momenta = self.state_of(params, "momentum")
            torch._foreach_lerp_(momenta, found, 1 - mu)
            found = list(torch._foreach_mul(momenta, 1.0))  # the caller may write to them
        return found

    def normalised(self, directions: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """``scale X`` of ``directions``, which are laid out as parameters are."""
        names, passes, scale = group["norms"], group["passes"], group["scale"]
        if "spectral" in names:

            def function(stack: Tensor) -> Tensor:
                x = stack.float() if stack.element_size() < 4 else stack
                return multi_normalise([x], names, passes)[0] * scale

            return map_whole(function, directions, splits=group["splits"])
        found: list[Tensor] = []
        for some in rounds(directions):
            slices = Slices([directions[i] for i in some], group["splits"])
            x = multi_normalise(slices.stacks(slices.params), names, passes, slices.shapes, slices.norms)
            torch._foreach_mul_(x, scale)
            found += slices.join(x)
        return found


@register("optimizer", "sinkgd", paper="arXiv:2502.06742", seed_id="B037")
class SinkGDConfig(MatrixConfig):
    """Stateless: gradients of hidden matrices with balanced rows and columns; another optimizer for the rest."""

    lr: PositiveFloat = Field(0.02, description="Peak learning rate; on the matrices scale times that.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay of the matrices, by lr alone.")
    scale: PositiveFloat = Field(0.05, description="RMS of the update before the learning rate.")
    norms: tuple[NormName, ...] = Field(
        ("row", "column"), description="Norms in their order: row, column, frobenius, sign, spectral."
    )
    passes: PositiveInt = Field(5, le=100, description="How often to go through the norms.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Decay of a running mean; 0: none, and no state.")
    momentum_at: Literal["before", "after"] = Field(
        "before", description="Whether the running mean is of gradients or of normalised updates."
    )

    @field_validator("norms")
    @classmethod
    def _has_some(cls, norms: tuple[NormName, ...]) -> tuple[NormName, ...]:
        if not norms:
            raise ValueError(f"should name one or more of {', '.join(NORMS)}")
        return norms

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> SinkGD:
        return SinkGD(
            groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            scale=self.scale,
            norms=self.norms,
            passes=self.passes,
            momentum=self.momentum,
            momentum_at=self.momentum_at,
        )
