"""Mano: momentum made tangent to the weights, then normalised by columns and by rows in turn; no matrix products.

Matrix W [m, n], step t = 0, 1, ...; M = mu M + G;  Q = G + mu M (Nesterov) or M;  k = t mod 2: columns, then rows
v1: W^ = W / max(|W|_k, eps);  T = Q - W^ <Q, W^>_k;  U = T / max(|T|_k, eps)
v2: T = Q - W <Q, W>_k;  U = T / (|T|_k + eps)
W = W (1 - lr wd) - lr 0.2 sqrt(length of a slice) U
|.|_k and <., .>_k are of each column (k = 0) or row (k = 1), so the update's RMS is 0.2 whatever the shape; the
weights themselves are not constrained.
Mano: Restriking Manifold Optimization for LLM Training, arXiv:2601.23000, and the authors' repository for v2.

The default is v2: the authors measured it better than v1 in final convergence at 1.3B and 3B. It is no projection: of
the radial part of a slice w it keeps the fraction 1 - |w|^2, so for small weights v2 is normalised momentum, and
beyond |w|^2 = 2 it overshoots; ``mean_slice_norms`` tells where a model stands. ``both`` is the form that the authors
call better without shipping it: both projections, then both normalisations, in every step, the one of the turn last.

A row-sharded matrix is never gathered: normalising columns takes two all-reduces of one float per column (v1: three,
in two rounds), normalising rows none. Fused matrices are taken apart, since a column would run through all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.matrix import MatrixRule, OneRateConfig
from trainwright.optim.slices import Slices, local_norms, local_sums, rounds

Stacks = list[Tensor]  # [n, rows, columns] each
Sums = Callable[..., list[Stacks]]  # (dim, *columns of stacks) -> sums over dim, kept as length 1
Norms = Callable[[int, Stacks], Stacks]


def tangent(w: Stacks, q: Stacks, dim: int, version: str = "v2", eps: float = 1e-8, sums: Sums = local_sums) -> Stacks:
    """``q`` less its part along ``w``, for each slice along ``dim`` (-2: columns, -1: rows)."""
    products = list(torch._foreach_mul(q, w))
    if version == "v1":
        inner, squares = sums(dim, products, torch._foreach_mul(w, w))
        inner = [x / s.clamp(min=eps * eps) for x, s in zip(inner, squares, strict=True)]
    else:
        (inner,) = sums(dim, products)
    return [a.addcmul(b, x, value=-1) for a, b, x in zip(q, w, inner, strict=True)]


def normalised(
    t: Stacks,
    dim: int,
    version: str = "v2",
    eps: float = 1e-8,
    norms: Norms = local_norms,
    lengths: Sequence[float] | None = None,
) -> Stacks:
    """``t`` with slices along ``dim`` of norm 1, or of that of ``lengths`` in each stack; zero slices stay zero."""
    return [
        x * (length / (s.clamp(min=eps) if version == "v1" else s + eps))
        for x, s, length in zip(t, norms(dim, t), lengths or [1.0] * len(t), strict=True)
    ]


def mano_direction(
    w: Stacks,
    q: Stacks,
    turn: int,
    version: str = "v2",
    both: bool = False,
    eps: float = 1e-8,
    sums: Sums = local_sums,
    norms: Norms = local_norms,
    lengths: Sequence[float] | None = None,
) -> Stacks:
    """``U`` of stacks ``[n, rows, columns]`` of weights ``w`` and momenta ``q``; ``turn`` 0: columns, 1: rows.

    ``sums`` and ``norms`` are those of a Slices where ranks hold parts of the matrices; ``lengths`` those of the slices
    of U in each stack, 1 if not given.
    """
    dims = (-1 - turn, turn - 2) if both else (turn - 2,)
    for dim in dims:
        q = tangent(w, q, dim, version, eps, sums)
    for dim in dims:
        q = normalised(q, dim, version, eps, norms, lengths if dim == dims[-1] else None)
    return q


class Mano(MatrixRule):
    """Mano for parameters with two or more dimensions; the last two are the matrix, those before it a batch.

    params    matrices ``[out, in]`` or stacks ``[E, out, in]``, plain or DTensor; no embeddings, no head
    lr        step size; the update's RMS is 0.2 lr
    version   "v1" (normalised weights in the projection, clamped norms) or "v2"
    nesterov  None: as the version was published (v1 without, v2 with)
    both      project and normalise along both dimensions in every step
    State: ``momentum`` (shape of the parameter); in the group ``step``, whose parity chooses rows or columns.
    Raises ValueError for parameters with fewer than two dimensions and for an unknown version.
    """

    group_state = ("step",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        version: Literal["v1", "v2"] = "v2",
        nesterov: bool | None = None,
        both: bool = False,
        eps: float = 1e-8,
    ):
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "version": version, "both": both, "eps": eps,
            "nesterov": version == "v2" if nesterov is None else nesterov, "step": 0,
        }  # fmt: skip
        super().__init__(params, defaults)

    def start(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        mu, turn = group["momentum"], (group["step"] - 1) % 2
        momenta = self.state_of(params, "momentum")
        torch._foreach_mul_(momenta, mu)
        torch._foreach_add_(momenta, grads)
        directions = torch._foreach_add(grads, momenta, alpha=mu) if group["nesterov"] else momenta
        found: list[Tensor] = []
        for some in rounds(params):
            slices = Slices([params[i] for i in some], group["splits"])
            w = slices.stacks(slices.params)
            q = slices.stacks([directions[i] for i in some])
            lengths = [0.2 * math.sqrt(shape[turn]) for shape in slices.shapes]
            u = mano_direction(
                w, q, turn, group["version"], group["both"], group["eps"], slices.sums, slices.norms, lengths
            )
            found += slices.join(u)
        return found

    @torch.no_grad()
    def mean_slice_norms(self) -> list[tuple[Tensor, Tensor]]:
        """Mean ``|w|^2`` of the columns and of the rows of each parameter: v2 keeps 1 - that of the radial part."""
        squares = [p.square().sum() for group in self.param_groups for p in group["params"]]
        squares = [s.full_tensor() if hasattr(s, "full_tensor") else s for s in squares]
        shapes = [p.shape for group in self.param_groups for p in group["params"]]
        return [
            (s * max(n[-2], 1) / max(n.numel(), 1), s * max(n[-1], 1) / max(n.numel(), 1))
            for s, n in zip(squares, shapes, strict=True)
        ]


@register("optimizer", "mano", paper="arXiv:2601.23000", seed_id="B081")
class ManoConfig(OneRateConfig):
    """Momentum projected on the tangent space of the weights, then normalised by columns and rows in turn."""

    lr: PositiveFloat = Field(1e-3, description="Peak learning rate of the matrices; the update's RMS is 0.2 of it.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of the momentum, which is a sum, not a mean.")
    version: Literal["v1", "v2"] = Field("v2", description="v1: as in the paper; v2: weights not normalised.")
    nesterov: bool | None = Field(None, description="Nesterov's look-ahead; null: as published, in v2 alone.")
    both: bool = Field(False, description="Project and normalise along both dimensions in every step.")
    eps: PositiveFloat = Field(1e-8, description="Floor of norms (v1) or added to them (v2).")

    @model_validator(mode="after")
    def _makes_sense(self) -> ManoConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum > 0")
        return self

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> Mano:
        return Mano(
            groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            version=self.version,
            nesterov=self.nesterov,
            both=self.both,
            eps=self.eps,
        )
