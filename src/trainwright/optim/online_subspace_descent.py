"""Online Subspace Descent: GaLore whose projection follows the gradients by online PCA, without SVDs on the way.

Of a matrix projected from the left (from the right alike, on G^T), G [m, n], P [m, r] from the SVD of the first G
    R = P^T G;  N = the inner rule on R;  w = w (1 - lr wd) - lr scale P N          as GaLore (galore.py)
then one step of Adam without decay (or another rule) on P, with  G^ = G / |G|_F,  A = P^T G^,  C = P^T P
    L(P) = |P P^T G^ - G^|_F^2 + kappa |C - I|_F^2
    grad L = 2 (P A A^T - 2 G^ A^T + G^ A^T C) + 4 kappa P (C - I)
The last line is [(E G^T + G^ E^T) P] with E = P P^T G^ - G^, multiplied out: one product with G beside those of GaLore.
It is computed as P (2 A A^T + 4 kappa (C - I)) + G^ A^T (2 C - 4 I), two products of m r r.
Memory-Efficient LLM Training with Online Subspace Descent, arXiv:2408.12857.

State of m x n with m <= n: m r of projection, 2 m r of its moments, 2 n r: more than GaLore's.

Where paper and code differ, and what is here:
- kappa: in the paper; the code drops it, and the scale of P then drifts into the step size. Here 0.1.
- Rate of P: the code has 1 / 200 times the schedule's factor, the paper 5 lr. Here the first.
- The code's AdamW shrinks P by a decay of 0.01. Here there is none.
A matrix whose gradient is all zero keeps its projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim import low_rank_inner
from trainwright.optim.low_rank import PRODUCTS, Inner, LowRankConfig, LowRankRule, Products, product_dtype
from trainwright.optim.low_rank_parts import Part, product, sum_over_ranks


def projection_loss(p: Tensor, g: Tensor, kappa: float) -> Tensor:
    """L of projections ``p [..., m, r]`` of gradients ``g [..., m, n]`` from the left, [...]."""
    g = g / g.square().sum((-2, -1), keepdim=True).sqrt()
    identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    error = (p @ (p.mT @ g) - g).square().sum((-2, -1))
    return error + kappa * (p.mT @ p - identity).square().sum((-2, -1))


def projection_gradient(p: Tensor, gr: Tensor, rr: Tensor, pp: Tensor, squared_norm: Tensor, kappa: float) -> Tensor:
    """grad L, [..., m, r], with one product with G left to the caller: L may be of shards of ``p`` and ``gr``.

    gr            G R^T [..., m, r]
    rr            R R^T [..., r, r]
    pp            P^T P [..., r, r]
    squared_norm  of G, [..., 1, 1]; where it vanishes (see :func:`seen`), only the term of kappa is left
    """
    scale = torch.where(seen(squared_norm), 1 / squared_norm, 0.0)
    identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    # 2 (P rr - 2 gr + gr pp) + 4 kappa P (pp - I), with what P and gr are multiplied by put together first
    return p @ (2 * scale * rr + 4 * kappa * (pp - identity)) + gr @ (scale * (2 * pp - 4 * identity))


def _squared_norm(g: Tensor) -> Tensor:
    return torch.linalg.vector_norm(g, dim=(-2, -1), keepdim=True).square_()  # makes no tensor of the size of g


def seen(squared_norm: Tensor) -> Tensor:
    """Whether there is a gradient: its squared norm is neither 0 nor so small that the inverse overflows."""
    return squared_norm > torch.finfo(squared_norm.dtype).tiny


class OnlineSubspaceDescent(LowRankRule):
    """Online Subspace Descent as a plain optimizer; parameters, state and errors as LowRankRule, and

    projection_lr    rate of the projection at the rate ``lr``; it follows ``lr`` as that is scheduled. 0: P stays
    projection_rule  rule of the projection: adam, adam_8bit, lion or sgd
    kappa            weight of the pull of P towards orthonormal columns
    State: ``projection_exp_avg``, ``projection_exp_avg_sq`` beside that of LowRankRule.
    Raises ValueError for ``lr`` of 0 at the start, a ``projection_lr`` outside [0, 0.1] and a negative ``kappa``.
    """

    shapes_state = (*LowRankRule.shapes_state, "projection_rule")
    wide_state = (*LowRankRule.wide_state, "projection_exp_avg_sq", "projection_exp_avg_scale")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        rank: int | float = 0.25,
        scale: float = 0.25,
        subspace: Inner = "adam",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        projection_lr: float = 5e-3,
        projection_rule: Inner = "adam",
        kappa: float = 0.1,
        products: Products = "full",
    ):
        if lr <= 0:
            raise ValueError(f"{lr=} should be more than 0: the rate of the projection is a share of it")
        if not 0 <= projection_lr <= 0.1:
            raise ValueError(f"{projection_lr=} should be in [0, 0.1]: the columns of the projection have length 1")
        if kappa < 0:
            raise ValueError(f"{kappa=} should be 0 or more")
        more = {"projection_share": projection_lr / lr, "projection_rule": projection_rule, "kappa": kappa}
        super().__init__(
            params,
            lr,
            weight_decay,
            rank=rank,
            scale=scale,
            subspace=subspace,
            betas=betas,
            eps=eps,
            gap=None,
            products=products,
            more=more,
        )

    def learn(
        self,
        parts: list[Part],
        grads: list[Tensor],
        projections: list[Tensor],
        reduced: list[Tensor],
        group: dict[str, Any],
    ) -> None:
        if not group["projection_share"]:
            return
        # Both with the kept side as columns; R whole where the ranks do not hold it by the shard of G that they hold.
        gs = [g if part.left else g.mT for part, g in zip(parts, grads, strict=True)]
        rs = [
            part.whole_reduced(r) if part.way in ("projected", "gathered") else r
            for part, r in zip(parts, reduced, strict=True)
        ]
        rs = [r if part.left else r.mT for part, r in zip(parts, rs, strict=True)]
        dtype = product_dtype([part.param for part in parts], group)
        gr = sum_over_ranks(parts, [product(g, r.mT, dtype) for g, r in zip(gs, rs, strict=True)], ("kept",))
        rr = sum_over_ranks(parts, [r @ r.mT for r in rs], ("kept",))
        pp = sum_over_ranks(parts, [p.mT @ p for p in projections], ("projected",))
        norms = sum_over_ranks(parts, [_squared_norm(g) for g in gs], ("kept", "projected"))
        slopes = [
            projection_gradient(*terms, group["kappa"]) for terms in zip(projections, gr, rr, pp, norms, strict=True)
        ]
        updates = self._projection_updates(parts, slopes, group)
        updates = list(torch._foreach_mul(updates, [seen(n).to(n.dtype) for n in norms]))
        rate = -group["lr"] * group["projection_share"]
        factors = [rate * self.correction(group["projection_rule"], part.param, group) for part in parts]
        torch._foreach_mul_(updates, factors)
        torch._foreach_add_(projections, updates)

    def _projection_updates(self, parts: list[Part], slopes: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        def states(key: str, scales: bool, dtype: torch.dtype | None) -> list[Tensor]:
            found = []
            for part in parts:
                shape: Sequence[int] = part.projection_shape
                shape = low_rank_inner.scales_shape(shape, -1) if scales else shape
                found.append(self.part_state(part, "projection_" + key, shape, part.projection_placements, dtype))
            return found

        return self.inner_update(group["projection_rule"], slopes, states, [-1] * len(parts), group)


@register("optimizer", "online_subspace_descent", paper="arXiv:2408.12857", seed_id="B026")
class OnlineSubspaceDescentConfig(LowRankConfig):
    """Adam in a low-rank subspace of the gradient that online PCA keeps up to date, without repeated SVDs."""

    projection_lr: float = Field(
        5e-3, ge=0, le=0.1, description="Peak rate of the projection; the schedule multiplies it. 0: it stays."
    )
    projection_rule: Inner = Field("adam", description="Update rule of the projection.")
    kappa: NonNegativeFloat = Field(0.1, description="Weight of the pull towards orthonormal columns.")
    products: Products = Field("full", description=PRODUCTS)

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> OnlineSubspaceDescent:
        self.check_ranks(params)
        return OnlineSubspaceDescent(
            groups,
            **self.shared_settings(),
            projection_lr=self.projection_lr,
            projection_rule=self.projection_rule,
            kappa=self.kappa,
            products=self.products,
        )
