"""AdaPM: full momentum only where it matters, low-rank momentum or none in the other blocks of a Transformer.

Per block one of three momenta, divided by Adam's second moment; G is the gradient, t the step of the parameter:
full      M = b1 M + (1 - b1) G;  Mh = M / (1 - b1^t), which is AdamW
none      Mh = G
low_rank  M ~ L R^T, L [m, r] orthonormal, R [n, r], m <= n (other matrices are transposed), r = ceil(share m):
          T = b1 L R^T + (1 - b1) G, never formed;  Q = orth(T R), one warm power step;  L = Q, R = T^T Q
          Mh = L R^T / (1 - b1^t) + c (G - Q Q^T G)
v = b2 v + (1 - b2) G^2;  u = Mh / (sqrt(v / (1 - b2^t)) + eps);  w = w (1 - lr wd) - lr u
``second_moment: blockwise`` keeps the mean of G^2 over each row [..., out, 1] instead (Adam-mini, arXiv:2406.16793,
by row); vectors keep theirs.
AdaPM: a Partial Momentum Algorithm for LLM Training, arXiv:2510.09103.

What is the paper's: no momentum for embeddings and attention output, low-rank with correction of its bias for queries,
keys and MLP, full for values. How the momentum is kept at low rank and what corrects it is ours, since there is no
official code: what truncation drops is gone for good, so that L R^T is biased towards span Q; outside of it the
gradient of the step is an unbiased estimate, with more noise, and ``correction`` c = 1 puts it there. The output head
goes without momentum like the embedding it is often tied to.

Blocks are told apart by role and by name (adapm_blocks.py: our decoder's and the usual ones of transformers). A hidden
matrix whose name says nothing gets the policy of ``default``, full momentum: it costs memory and is otherwise AdamW.
All of that is logged at build; that no hidden matrix at all was recognised is a warning. A matrix that holds q, k and v
in one has no default, since these differ. ``roles: probe`` measures instead what each hidden matrix needs
(adapm_probe.py).

State per parameter: ``exp_avg_sq``; with full momentum ``exp_avg``; at low rank L, ``basis``, and R, ``factor`` (_0, _1
and so on after these names for fused matrices), laid out as in low_rank_parts.py: R is sharded along n. The power step
of a sharded matrix sends its thin products, of r numbers for each row and column, not its gradient.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainwright.core.errors import ConfigError, nearest
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamw import DECAYED, AdamW, adam_updates
from trainwright.optim.adapm_blocks import POLICY, PROBED, Momentum, block_of, is_pattern, momentum_parts, report
from trainwright.optim.base import OptimizerConfig
from trainwright.optim.grass_rows import projected_range
from trainwright.optim.low_rank import _gradient, _laid_out
from trainwright.optim.low_rank_parts import Part, local_of, place, share_out, state_zeros, sum_over_ranks
from trainwright.optim.whole import batches, beside, like

log = logging.getLogger("trainwright")


def power_product(grads: Tensor, left: Tensor, right: Tensor, beta: float) -> Tensor:
    """T R ``[..., m, r]`` of grads [..., m, n], left [..., m, r] and right [..., n, r]."""
    return (1 - beta) * (grads @ right) + beta * (left @ (right.mT @ right))


def low_rank_momentum(
    grads: Tensor, left: Tensor, right: Tensor, beta: float, step: int, correction: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of momentum at rank r: the estimate ``Mh [..., m, n]`` and the new ``left``, ``right``.

    grads [..., m, n], left [..., m, r], right [..., n, r]; left zero and right random at first; step counts from 1.
    """
    basis = torch.linalg.qr(power_product(grads, left, right, beta)).Q
    right, thin = turn(right, left.mT @ basis, grads.mT @ basis, beta, step, correction)
    return correction * grads + basis @ thin.mT, basis, right


def turn(
    right: Tensor, overlap: Tensor, seen: Tensor, beta: float, step: int, correction: float
) -> tuple[Tensor, Tensor]:
    """New R, T^T Q ``[..., n, r]``, and C of the estimate ``Q C^T + correction G``.

    overlap [..., r, r] is L^T Q, seen [..., n, r] is G^T Q.
    """
    right = beta * (right @ overlap) + (1 - beta) * seen
    return right, right / (1 - beta**step) - correction * seen


def row_mean_squares(t: Tensor) -> Tensor:
    """Mean of the squares over the last dimension ``[..., out, 1]``, whole even where that one is sharded."""
    total = t.square().sum(-1, keepdim=True)
    if isinstance(total, DTensor) and any(p.is_partial() for p in total.placements):
        total = total.redistribute(placements=[Replicate() if p.is_partial() else p for p in total.placements])
    return total / max(t.shape[-1], 1)


class AdaPM(AdamW):
    """AdaPM for parameters of any shape, plain or DTensor; the momentum is an entry of each group.

    momentum       "full", "low_rank" (matrices ``[out, in]`` and stacks of them) or "none"
    rank           of low_rank: a share of the shorter side, in (0, 1], or a number, at most the shorter side
    correction     c above, in [0, 1]
    second_moment  "full" or "blockwise"
    A group may hold ``splits``, rows of each matrix that was fused into its parameters.
    Raises ValueError for values out of range, a rank over the shorter side, and low rank for vectors.
    """

    shapes_state: ClassVar[tuple[str, ...]] = ("momentum", "rank", "second_moment", "splits")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: Momentum = "full",
        rank: int | float = 0.05,
        correction: Annotated[float, Field(ge=0, le=1)] = 1.0,
        second_moment: Literal["full", "blockwise"] = "full",
    ):
        torch.optim.Optimizer.__init__(
            self,
            params,
            {
                "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
                "rank": rank, "correction": correction, "second_moment": second_moment, "splits": (),
            },
        )  # fmt: skip

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["momentum"] not in ("low_rank", "probe"):
            return
        for p in group["params"]:
            if p.ndim < 2:
                raise ValueError(f"low-rank momentum takes matrices, got a parameter of shape {tuple(p.shape)}")
            momentum_parts(p, group["rank"], group["splits"])

    def state_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        found = super().state_settings(group)
        return found if group["momentum"] in ("low_rank", "probe") else {**found, "rank": None}

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if group["momentum"] == "full" and group["second_moment"] == "full":
            return super().updates(params, grads, group)
        by_step: dict[int, list[int]] = {}
        for i, p in enumerate(params):
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            by_step.setdefault(state["step"], []).append(i)
        out: list[Tensor] = [torch.empty(0)] * len(params)
        rule = self._by_number if group["second_moment"] == "full" else self._by_row
        for step, some in by_step.items():
            found = rule([params[i] for i in some], [grads[i] for i in some], group, step)
            for i, t in zip(some, found, strict=True):
                out[i] = t
        return out

    def _by_number(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any], step: int) -> list[Tensor]:
        """Updates without full momentum, by the fused kernel, whose first moment comes out as ``Mh`` (1 - beta^t)."""
        if group["momentum"] == "none":
            beta, moments = 0.0, [torch.zeros_like(p) for p in params]
        else:
            # Half of the gradient and half of these.
            beta, corrected = 0.5, 1 - 0.5**step
            moments = self._low_rank(params, grads, group, step, 2 * corrected, -1.0)
        counts = {d: torch.full((), step, dtype=torch.float32, device=d) for d in {p.device for p in params}}
        steps = [counts[p.device] for p in params]
        second = self.state_of(params, "exp_avg_sq")
        return adam_updates(params, grads, moments, second, steps, (beta, group["betas"][1]), group["eps"])

    def _by_row(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any], step: int) -> list[Tensor]:
        beta = group["betas"][0]
        if group["momentum"] == "none":
            estimates = [g.clone() for g in grads]
        elif group["momentum"] == "low_rank":
            estimates = self._low_rank(params, grads, group, step)
        else:
            momenta = self.state_of(params, "exp_avg")
            torch._foreach_lerp_(momenta, grads, 1 - beta)
            estimates = list(torch._foreach_div(momenta, 1 - beta**step))
        torch._foreach_div_(estimates, self._denominators(params, grads, group, step))
        return estimates

    def _low_rank(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        group: dict[str, Any],
        step: int,
        scale: float = 1.0,
        plus: float = 0.0,
    ) -> list[Tensor]:
        """``scale Mh + plus G`` of each, in fresh tensors; moves L and R."""
        beta, correction = group["betas"][0], group["correction"]
        of_param = [momentum_parts(p, group["rank"], group["splits"]) for p in params]
        parts = [part for own in of_param for part in own]
        if not parts:
            return [torch.zeros_like(p) for p in params]
        local = [
            _wide(part.of(_gradient(p, g, own)))
            for p, g, own in zip(params, grads, of_param, strict=True)
            for part in own
        ]
        bases, rights = self._factors(parts, "basis"), self._factors(parts, "factor")
        products = []
        for part, g, left, right in zip(parts, local, bases, rights, strict=True):
            whole = part.whole_reduced(right) if part.way in ("projected", "gathered") else right
            product = power_product(_upright(part, g), left, _tall(part, whole), beta)
            products.append(_in_place(part, product))
        products = sum_over_ranks(parts, products, ("kept", "projected"))
        turned = [_own_rows(part, q) for part, q in zip(parts, _orthonormal(products), strict=True)]
        overlaps = [left.mT @ q for left, q in zip(bases, turned, strict=True)]
        overlaps = sum_over_ranks(parts, overlaps, ("projected",))
        pieces = []
        for i, (part, g, q) in enumerate(zip(parts, local, turned, strict=True)):
            seen = _tall(part, part.project(g, q))
            right, thin = turn(_tall(part, rights[i]), overlaps[i], seen, beta, step, correction)
            self._factor(part, "basis").copy_(q)
            self._factor(part, "factor").copy_(_tall(part, right))
            back = part.back(_tall(part, thin * scale), q)
            pieces.append(back.add_(g, alpha=scale * correction + plus).to(part.param.dtype))
        found = iter(pieces)
        return [_laid_out(p, own, [next(found) for _ in own]) for p, own in zip(params, of_param, strict=True)]

    def _factors(self, parts: list[Part], key: str) -> list[Tensor]:
        return [_wide(self._factor(part, key)) for part in parts]

    def _factor(self, part: Part, key: str) -> Tensor:
        """This rank's shard of L ("basis") or of R ("factor", with the rank where R of low_rank_parts.py has it)."""
        state, name, dtype = self.state[part.param], key + part.key, part.param.dtype
        placements = part.projection_placements if key == "basis" else part.reduced_placements
        if name in state:
            state[name] = place(state[name], part, placements, dtype)
        elif key == "basis":
            state[name] = state_zeros(part, part.projection_shape, placements, dtype)
        else:
            # A start that is in general position to any gradient; the first power step forgets it.
            side = part.shape[part.kept]
            noise = torch.randn(side, part.rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            start = _tall(part, noise).expand(part.reduced_shape).to(part.param.device, dtype)
            # A fresh copy, with the strides of a loaded one: at rank 1 BLAS goes another way by them.
            start = start.clone(memory_format=torch.contiguous_format)
            state[name] = share_out(start, part, placements)
        return local_of(state[name])

    def _denominators(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any], step: int
    ) -> list[Tensor]:
        beta = group["betas"][1]
        rows = [i for i, p in enumerate(params) if p.ndim >= 2]
        squares = list(grads)
        wide = [g.to(self.state_dtype(p, "exp_avg_sq")) for g, p in zip(grads, params, strict=True)]
        for i in rows:
            squares[i] = row_mean_squares(wide[i])
            state = self.state[params[i]]
            if "exp_avg_sq" not in state:
                state["exp_avg_sq"] = torch.zeros_like(squares[i])
            state["exp_avg_sq"] = state["exp_avg_sq"].to(squares[i].dtype)  # of an older checkpoint
            if isinstance(squares[i], DTensor) and not isinstance(state["exp_avg_sq"], DTensor):
                state["exp_avg_sq"] = like(state["exp_avg_sq"], squares[i])  # from a checkpoint of another layout
        rest = sorted(set(range(len(params))) - set(rows))
        if rest:
            for i, t in zip(rest, torch._foreach_mul([wide[i] for i in rest], [wide[i] for i in rest]), strict=True):
                squares[i] = t
            self.state_of([params[i] for i in rest], "exp_avg_sq")
        found = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_lerp_(found, squares, 1 - beta)
        roots = torch._foreach_sqrt(found)
        torch._foreach_div_(roots, math.sqrt(1 - beta**step))
        torch._foreach_add_(roots, group["eps"])
        return [beside(r, p) for r, p in zip(roots, params, strict=True)]


def _wide(t: Tensor) -> Tensor:
    """In float32 at least."""
    return t.float() if t.element_size() < 4 else t


def _upright(part: Part, g: Tensor) -> Tensor:
    """The gradient as [..., m, n], the projected side first."""
    return g if part.left else g.mT


def _tall(part: Part, r: Tensor) -> Tensor:
    """R as [..., n, r], from how low_rank_parts.py has it, and back."""
    return r.mT if part.left else r


def _in_place(part: Part, product: Tensor) -> Tensor:
    """This rank's rows of T R where they belong in the whole, zeros elsewhere."""
    size, offset = projected_range(part)
    if size == part.shape[part.rank_dim]:
        return product
    whole = product.new_zeros(part.projection_shape)
    whole.narrow(-2, offset, size).copy_(product)
    return whole


def _own_rows(part: Part, basis: Tensor) -> Tensor:
    size, offset = projected_range(part)
    return basis.narrow(-2, offset, size)


def _orthonormal(products: list[Tensor]) -> list[Tensor]:
    """Q of each, those of one shape in one batch."""
    flat = [t.reshape(-1, *t.shape[-2:]) for t in products]
    found = list(products)
    for members in batches(flat):
        stack = torch.linalg.qr(torch.cat([flat[i] for i in members])).Q
        for i, q in zip(members, stack.split([flat[i].shape[0] for i in members]), strict=True):
            found[i] = q.reshape(products[i].shape)
    return found


@register("optimizer", "adapm", paper="arXiv:2510.09103", seed_id="B038")
class AdaPMConfig(OptimizerConfig):
    """AdamW with momentum per block of the Transformer: full, at low rank with its bias corrected, or none."""

    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay of the first and second moment, each in [0, 1).")
    eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment.")
    policy: dict[str, Momentum] = Field(
        dict(POLICY),
        description="Momentum by block (q, k, v, o, mlp, qkv: q, k and v in one matrix, expert, router, embedding, "
        "head, norm, bias, scalar, default: other matrices) or by pattern of parameter names (*.mixer.*): full, "
        "low_rank or none. What is left out keeps its default.",
    )
    rank: int | float = Field(0.05, description="Of low-rank momentum: a share of the shorter side or a number.")
    correction: float = Field(1.0, ge=0, le=1, description="Share of the gradient outside the low-rank part to add.")
    second_moment: Literal["full", "blockwise"] = Field(
        "full", description="Second moment by number, or by row of each matrix (as Adam-mini)."
    )
    roles: Literal["names", "probe"] = Field(
        "names",
        description="What decides on the momentum of hidden matrices: their names, or the spectrum of the momentum "
        "that they have after probe_steps steps. Patterns in policy come first.",
    )
    probe_steps: PositiveInt = Field(200, description="Steps with full momentum before the probe.")
    probe_energy: float = Field(
        0.8, gt=0, le=1, description="Share of the momentum that the rank has to hold for low-rank momentum."
    )
    probe_agreement: PositiveFloat = Field(
        0.5, description="Squared norm of the momentum over that of gradients from which none is needed."
    )

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each should be in [0, 1)")
        return betas

    @field_validator("rank")
    @classmethod
    def _is_rank(cls, rank: int | float) -> int | float:
        if rank < 1 if isinstance(rank, int) else not 0 < rank <= 1:
            raise ValueError("should be a share in (0, 1] or a whole number of at least 1")
        return rank

    @field_validator("policy", mode="before")
    @classmethod
    def _complete(cls, policy: Any) -> Any:
        if not isinstance(policy, dict):
            return policy
        unknown = [k for k in policy if k not in POLICY and k != "qkv" and not is_pattern(k)]
        if unknown:
            raise ValueError(
                f"unknown block {unknown[0]!r}; {nearest(unknown[0], [*POLICY, 'qkv'])}, or a pattern of parameter "
                "names with a dot or a star in it"
            )
        return {**POLICY, **policy}

    @model_validator(mode="after")
    def _one_says_it(self) -> AdaPMConfig:
        given = [k for k in PROBED if self.policy.get(k) != POLICY.get(k)]
        if self.roles == "probe" and given:
            raise ValueError(
                f"policy.{given[0]} says which momentum the probe is to find; leave it out, give a pattern of names "
                "instead (*.mixer.*), or set roles=names"
            )
        return self

    def for_run(self, total_steps: int | None) -> AdaPMConfig:
        if self.roles == "probe" and total_steps is not None and self.probe_steps >= total_steps:
            raise ConfigError(
                f"is not below the {total_steps} steps of the run: the probe would decide on nothing; lower it",
                key="probe_steps",
                value=self.probe_steps,
            )
        return self

    def build_rule(self, params: Sequence[NamedParam]) -> AdaPM:
        if self.roles == "probe":
            raise ConfigError(
                "needs the optimizer's own step; where another method takes that or the backward pass does, set names",
                key="roles",
                value=self.roles,
            )
        return self.build(params)

    def build(self, params: Sequence[NamedParam]) -> AdaPM:
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        blocks: dict[str, list[NamedParam]] = {}
        unused = {k for k in self.policy if is_pattern(k)}
        for n in params:
            pattern = next((k for k in self.policy if is_pattern(k) and fnmatch.fnmatchcase(n.name, k)), None)
            unused -= {k for k in unused if fnmatch.fnmatchcase(n.name, k)}
            block = pattern or block_of(n.name, n.role)
            probed = self.roles == "probe" and pattern is None and n.role in ("matrix", "expert")
            if not probed:
                blocks.setdefault(block, []).append(n)
            if block not in self.policy and not probed:
                raise ConfigError(
                    f"{n.name} holds q, k and v in one matrix, for which the paper keeps different momenta; "
                    f"set policy.{block} to full, low_rank or none",
                    key="policy",
                )
            momentum = "probe" if probed else self.policy[block]
            if momentum in ("low_rank", "probe"):
                self._check_matrix(n, block)
            decay = self.weight_decay if n.role in DECAYED else 0.0
            group = {"momentum": momentum, "splits": tuple(n.splits), "weight_decay": decay}
            groups.setdefault(tuple(group.values()), {"params": [], **group})["params"].append(n.param)
        if unused:
            raise ConfigError(f"no parameter's name matches {sorted(unused)[0]!r}", key="policy")
        report(blocks, self.policy, self.rank)
        settings: dict[str, Any] = {
            "lr": self.lr, "betas": self.betas, "eps": self.eps, "rank": self.rank, "correction": self.correction,
            "second_moment": self.second_moment,
        }  # fmt: skip
        if self.roles == "names":
            return AdaPM(list(groups.values()), **settings)
        from trainwright.optim.adapm_probe import ProbedAdaPM

        count = sum(len(g["params"]) for g in groups.values() if g["momentum"] == "probe")
        log.info("adapm: full momentum for %d hidden matrices until step %d, then by probe", count, self.probe_steps)
        return ProbedAdaPM(
            list(groups.values()), probe_steps=self.probe_steps, agreement=self.probe_agreement,
            energy=self.probe_energy, names=params, **settings,
        )  # fmt: skip

    def _check_matrix(self, n: NamedParam, block: str) -> None:
        if n.param.ndim < 2:
            raise ConfigError(
                f"{n.name} is no matrix and cannot have low-rank momentum; set it to full or none",
                key=f"policy.{block}",
                value="low_rank",
            )
        sides = [min(part.shape[-2:]) for part in momentum_parts(n.param, 1, n.splits)]
        if isinstance(self.rank, int) and sides and self.rank > min(sides):
            raise ConfigError(
                f"is larger than the shorter side ({min(sides)}) of {n.name}; set rank <= {min(sides)} or a share",
                key="rank",
                value=self.rank,
            )
