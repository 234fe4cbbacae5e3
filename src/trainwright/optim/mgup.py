"""MGUP: larger steps where update and gradient agree most, small ones elsewhere, around another optimizer.

Per tensor of d entries, with u the inner optimizer's update, g the gradient and K = floor(tau d):
    score = u g (entry by entry);  phi = alpha on the K largest scores (ties: the first ones), gamma elsewhere
    w = w (1 - lr wd) - lr phi u
Muon: the score is taken with what it orthogonalises, and phi multiplies the orthogonalised update, whose spectral norm
may then exceed its bound by up to alpha. Cautious MGUP: phi = alpha where score >= 0, without sorting.
Tensors with tau d < 1, such as single numbers, are stepped as by the inner optimizer.
MGUP: A Momentum-Gradient Alignment Update Policy for Stochastic Optimization, NeurIPS 2025, arXiv:2606.17526. Its
settings: tau = 1/2, alpha = 1 / tau, gamma = tau; its code has gamma = 0.1; with a rate that is tuned already, or a
large model, the authors advise alpha in [1, 1.5] and gamma in [1/2, 1].

The mean of phi is tau alpha + (1 - tau) gamma, 1.25 with the paper's settings: compare with the inner optimizer at a
rate as much larger, or the gain of a larger rate is taken for one of the method.

Differences: the paper's text gives Cautious MGUP alpha where score > 0 and its code where score >= 0, which counts
entries without a gradient in this step (embeddings of absent tokens) as agreeing; we follow the code, ``strict``
follows the text. Of Muon only the matrices are changed, and not what its own inner optimizer steps, as in the code.
A sharded tensor is ranked as a whole, for which its scores are gathered; ``shard_local`` ranks every shard by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainwright.core.distributed import local_tensor
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.base import UpdateRule
from trainwright.optim.matrix import MatrixConfig, MatrixRule
from trainwright.optim.muon import Muon
from trainwright.optim.whole import BATCH_BYTES, gather, like
from trainwright.optim.wrapper import WrappedRule, WrapperConfig


def largest(scores: Tensor, count: int) -> Tensor:
    """Which of ``scores [n, d]`` are the ``count`` largest of their row, a bool; of equal ones the first."""
    d = scores.shape[-1]
    if count == d:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.kthvalue(d - count + 1, dim=-1, keepdim=True).values
    chosen = scores > least
    left = count - chosen.sum(-1, keepdim=True, dtype=torch.int32)
    ties = scores == least
    return chosen | (ties & (ties.cumsum(-1, dtype=torch.int32) <= left))


def selected(d: int, tau: float) -> int:
    """K, the entries of a tensor of ``d`` that get alpha; tau d is not rounded down for a last bit."""
    return math.floor(tau * d + 1e-6)


class MGUP(WrappedRule):
    """MGUP around an UpdateRule: AdamW, Lion, Muon or any other.

    tau           share of entries with the larger step, in (0, 1]
    alpha, gamma  factors on the step of these and of the others; None: 1 / tau and tau
    cautious      alpha where update and gradient have one sign, without ranking; tau then only sets the defaults
    strict        cautious: where the score is 0, it is gamma
    shard_local   rank each shard by itself: nothing is sent, and the result depends on the sharding
    Keeps no state. Raises ValueError for settings out of range.
    """

    kept = ("tau", "alpha", "gamma", "cautious", "strict", "shard_local")

    def __init__(
        self,
        inner: UpdateRule,
        tau: float = 0.5,
        alpha: float | None = None,
        gamma: float | None = None,
        cautious: bool = False,
        strict: bool = False,
        shard_local: bool = False,
    ):
        self.tau, (self.alpha, self.gamma) = tau, factors(tau, alpha, gamma)
        self.cautious, self.strict, self.shard_local = cautious, strict, shard_local
        super().__init__(inner)

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if isinstance(self.inner, Muon):
            directions = self.inner.directions(params, grads, group)
            updates = self.inner.orthogonalise(directions, group)
        else:
            updates = directions = self.inner.updates(params, grads, group)
        for some in _alike(updates):
            self._scale_([updates[i] for i in some], [directions[i] for i in some], [grads[i] for i in some])
        return updates

    def _scale_(self, updates: list[Tensor], directions: list[Tensor], grads: list[Tensor]) -> None:
        """Multiply ``updates``, of one shape and layout, by phi."""
        local = self.cautious or self.shard_local or not isinstance(updates[0], DTensor)
        shape = local_tensor(updates[0]).shape if local else updates[0].shape
        count = selected(shape.numel(), self.tau)
        if shape.numel() == 0 or (count == 0 and not self.cautious):
            return
        if local:
            directions, grads = [local_tensor(t) for t in directions], [local_tensor(t) for t in grads]
        scores = torch.stack([gather(s).flatten() for s in torch._foreach_mul(directions, grads)])
        if self.cautious:
            chosen = scores > 0 if self.strict else scores >= 0
        else:
            chosen = largest(scores, count)
        phi = scores.fill_(self.gamma).masked_fill_(chosen, self.alpha).view(-1, *shape)
        own = [local_tensor(u) for u in updates]
        parts = phi.unbind() if local else [local_tensor(like(f, u)) for f, u in zip(phi, updates, strict=True)]
        torch._foreach_mul_(own, list(parts))


def factors(tau: float, alpha: float | None, gamma: float | None) -> tuple[float, float]:
    """alpha and gamma, with the paper's defaults for None. ValueError for settings out of range."""
    if not 0 < tau <= 1:
        raise ValueError(f"tau={tau} should be above 0 and at most 1")
    alpha, gamma = 1 / tau if alpha is None else alpha, tau if gamma is None else gamma
    if gamma < 0:
        raise ValueError(f"gamma={gamma} should be at least 0: below it, steps go up the slope")
    if alpha < gamma:
        raise ValueError(f"alpha={alpha} is below gamma={gamma}: the entries that agree would get the smaller step")
    return alpha, gamma


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indexes of tensors of one shape, dtype and layout, in portions of at most BATCH_BYTES or one tensor."""
    found: dict[Any, list[list[int]]] = {}
    for i, t in enumerate(tensors):
        key = (t.shape, t.dtype, t.placements if isinstance(t, DTensor) else t.device)
        portions = found.setdefault(key, [[]])
        if portions[-1] and (len(portions[-1]) + 1) * t.numel() * t.element_size() > BATCH_BYTES:
            portions.append([])
        portions[-1].append(i)
    return [some for portions in found.values() for some in portions]


@register("optimizer", "mgup", paper="arXiv:2606.17526", seed_id="A14")
class MGUPConfig(WrapperConfig):
    """Larger steps where another optimizer's update agrees with the gradient, small ones elsewhere (MGUP)."""

    tau: PositiveFloat = Field(0.5, le=1, description="Share of each tensor's entries that get the larger step.")
    alpha: NonNegativeFloat | None = Field(None, description="Factor on the step of these entries; null: 1 / tau.")
    gamma: NonNegativeFloat | None = Field(
        None, description="Factor on the step of the others; null: tau (the authors' code: 0.1)."
    )
    cautious: bool = Field(
        False, description="Larger steps wherever update and gradient have one sign, without ranking."
    )
    strict: bool = Field(False, description="With cautious: entries without update or gradient get gamma, not alpha.")
    shard_local: bool = Field(
        False, description="Rank the shards of a tensor each by itself: no traffic, but another result per sharding."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> MGUPConfig:
        factors(self.tau, self.alpha, self.gamma)
        if self.strict and not self.cautious:
            raise ValueError("strict is about cautious: set cautious too, or leave it out")
        return self

    def wrapped(self, rule: UpdateRule, params: Sequence[NamedParam]) -> UpdateRule:
        if isinstance(self.inner, MatrixConfig) and not isinstance(rule, MatrixRule):
            return rule
        return MGUP(rule, self.tau, self.alpha, self.gamma, self.cautious, self.strict, self.shard_local)
