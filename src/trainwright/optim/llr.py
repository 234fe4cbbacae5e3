"""LLR: every hidden matrix has its own rate, the larger the lighter the tail of its spectrum; around another optimizer.

At steps 1, 1 + every, 1 + 2 every, ... up to ``until``, for each matrix with both sides of at least ``min_size``:
    alpha = Hill's exponent of its squared singular values (analysis/heavy_tail.py); large alpha: light tail
    s = s1 + (s2 - s1) (alpha - alpha_min) / (alpha_max - alpha_min)
then within ``ramp`` steps the factor on its rate goes linearly from what it was to s, and stays there. Embedding and
head go to s2 in the first ramp; norms, biases, routers and smaller matrices have the factor 1.
    w = w (1 - lr s wd) - lr s u
with u the inner optimizer's update and lr the schedule's rate; with hold_decay the decay is lr wd.
One LR Doesn't Fit All: Heavy-Tail Guided Layerwise Learning Rates for LLMs, ICML 2026, arXiv:2605.22297. It recomputes
every 40 to 100 steps in the first fifth of the run and ramps over 20 to 50, with s1 = 1 and s2 = 5 (3 in the base
settings of its code). Other maps of alpha, from its code: sqrt and log2, both divided by their mean, and sigmoid,
2 / (1 + exp(-4 z)), z = alpha less its mean over its deviation.

Every factor is at least s1 = 1: compare with the inner optimizer at lr times the mean factor (``factors()``), or the
gain of a larger rate is taken for one of the method. At the start weights are random and alpha tells their shapes
apart, 2.1 for square ones and 5.9 at 64 x 1024; ``shape_correction`` takes the shape's Gaussian value off.

Differences. The factor multiplies the update (and the decay) of a parameter, so that matrices of a shape still go
through the inner optimizer together; the result is that of a group with its own rate. alpha of a stack of experts and
of a fused matrix is the mean of its matrices' (splits), never that of the fused whole. Where alpha cannot be had (the
upper half of the spectrum reaches zeros, or is flat) and where all are equal, the factor is s1. Each sharded matrix is
gathered and one rank computes its spectrum; all ranks get its numbers. Recomputing waits for the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainwright.analysis.heavy_tail import alpha, gaussian_alpha
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamh import AdamHConfig, Hyperball
from trainwright.optim.base import UpdateRule
from trainwright.optim.matrix import MATRICES
from trainwright.optim.settings import Count
from trainwright.optim.whole import matrices
from trainwright.optim.wrapper import WrappedRule, WrapperConfig

log = logging.getLogger("trainwright")
FIXED_LENGTH = "its steps have a fixed length, which a factor on the update does not change; use adamw or muon"
RAISED = ("embedding", "head")  # roles
UNTIL = 1000  # steps
Map = Literal["linear", "sqrt", "log2", "sigmoid"]


def rate_factors(alphas: Sequence[float], s1: float, s2: float, map: Map = "linear") -> list[float]:
    """Factor on the rate of each matrix; s1 where alpha is not finite."""
    good = [a for a in alphas if math.isfinite(a)]
    if not good:
        return [s1] * len(alphas)
    mean = sum(good) / len(good)
    if map == "linear":
        low, high = min(good), max(good)
        shares = [(a - low) / (high - low) if high > low else 0.0 for a in alphas]
        found = [s1 * (1 - x) + s2 * x for x in shares]
    elif map == "sigmoid":
        deviation = math.sqrt(sum((a - mean) ** 2 for a in good) / len(good)) + 1e-8
        found = [2 / (1 + math.exp(-4 * (a - mean) / deviation)) if math.isfinite(a) else s1 for a in alphas]
    else:
        change = math.sqrt if map == "sqrt" else math.log2
        total = sum(change(a) for a in good)
        found = [change(a) / total * len(good) if math.isfinite(a) else s1 for a in alphas]
    return [s if math.isfinite(a) else s1 for s, a in zip(found, alphas, strict=True)]


@torch.no_grad()
def layer_alphas(
    params: Sequence[Tensor], splits: Sequence[Sequence[int]] | None = None, shape_correction: bool = False
) -> list[float]:
    """alpha of each of ``params [..., out, in]``, the mean over its matrices; the same numbers on all ranks of a mesh.

    splits            rows (negative: columns) of the matrices that were fused into each of them
    shape_correction  less alpha of a Gaussian matrix of the shape
    """
    found = torch.zeros(len(params), dtype=torch.float64)
    shared: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        mine = True
        if isinstance(p, DTensor):
            members = shared.setdefault(p.device_mesh, [])
            mine = len(members) % p.device_mesh.size() == _position(p)
            members.append(i)
            p = p.full_tensor()
        if mine:
            found[i] = _mean_alpha(p, (splits[i] if splits else ()) or (p.shape[-2],), shape_correction)
    for mesh, members in shared.items():
        values = found[members].to(mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(values, group=mesh.get_group(dim))
        found[members] = values.cpu()
    return found.tolist()


def _mean_alpha(p: Tensor, splits: Sequence[int], shape_correction: bool) -> Tensor:
    parts = []
    for part in matrices(p, splits):
        finite = part.isfinite().flatten(-2).all(-1)
        # LAPACK refuses what is not finite, and a run whose weights are not is to end as diverged, not here.
        values = torch.where(finite, alpha(torch.where(finite[..., None, None], part, 0)), torch.nan).double().cpu()
        parts.append(values - gaussian_alpha(*part.shape[-2:]) if shape_correction else values)
    return torch.cat(parts).mean()


def _position(p: DTensor) -> int:
    """Number of this rank in the mesh of ``p``."""
    mesh, at = p.device_mesh, 0
    for dim in range(mesh.ndim):
        at = at * mesh.size(dim) + mesh.get_local_rank(dim)
    return at


class LLR(WrappedRule):
    """LLR around an UpdateRule.

    tuned             parameters [..., out, in] whose rate follows their alpha; None: all with two dimensions or more
    raised            parameters whose rate goes to s2 times that of their group
    s1, s2            factors of the heaviest and of the lightest tail
    every, until      steps between recomputations, and the last step that may have one
    ramp              steps from one factor to the next, at most ``every``
    min_size          matrices with a shorter side than this are not tuned
    map               of alpha to factors, see above
    hold_decay        the decay is not multiplied
    shape_correction  compare alpha with that of random matrices of the same shape
    splits            rows (negative: columns) of the matrices fused into a parameter, by parameter
    State per tuned parameter: the numbers ``llr_from`` and ``llr_to``; ``llr_step`` in the groups.
    Raises ValueError for settings that make no sense, for an LLR inside and for steps of fixed length (AdamH, MuonH).
    """

    kept = (
        "tuned", "raised", "s1", "s2", "every", "until", "ramp", "min_size", "map", "hold_decay", "shape_correction",
        "splits", "warned",
    )  # fmt: skip
    own_group_state = ("llr_step",)

    def __init__(
        self,
        inner: UpdateRule,
        tuned: Iterable[Tensor] | None = None,
        raised: Iterable[Tensor] = (),
        s1: float = 1.0,
        s2: float = 5.0,
        every: Count = 50,
        until: int = UNTIL,
        ramp: Count = 25,
        min_size: int = 50,
        map: Map = "linear",
        hold_decay: bool = False,
        shape_correction: bool = False,
        splits: dict[Tensor, Sequence[int]] | None = None,
    ):
        check_settings(s1, s2, every, ramp, map, shape_correction)
        rule: Any = inner
        while rule is not None:
            if isinstance(rule, LLR):
                raise ValueError("LLR in LLR: the outer one alone does it")
            if isinstance(rule, Hyperball):
                raise ValueError(f"LLR around {type(rule).__name__}: {FIXED_LENGTH}")
            rule = rule.inner if isinstance(rule, WrappedRule) else None
        self.s1, self.s2, self.every, self.until, self.ramp, self.map = s1, s2, every, until, ramp, map
        self.hold_decay, self.shape_correction, self.splits = hold_decay, shape_correction, dict(splits or {})
        self.min_size, self.warned = min_size, False
        super().__init__(inner)
        own = [p for group in self.param_groups for p in group["params"]]
        wanted = {id(p) for p in (own if tuned is None else tuned)}
        self.tuned = [p for p in own if id(p) in wanted and p.ndim >= 2 and self._side(p) >= min_size]
        wanted = {id(p) for p in raised}
        self.raised = [p for p in own if id(p) in wanted]
        for group in self.param_groups:
            group.setdefault("llr_step", 0)

    def _side(self, p: Tensor) -> int:
        """Shortest side of its matrices; 0 of an empty stack."""
        splits = self.splits.get(p) or p.shape[-2:-1]
        kept = p.shape[-2] if splits[0] < 0 else p.shape[-1]  # negative: fused by columns
        return min(kept, *map(abs, splits)) if p.numel() else 0

    @property
    def steps(self) -> int:
        return max(group.get("llr_step", 0) for group in self.param_groups)

    def start(self, group: dict[str, Any]) -> None:
        super().start(group)
        before = self.steps
        group["llr_step"] = group.get("llr_step", 0) + 1
        t = group["llr_step"]
        if t > before and t <= self.until and (t - 1) % self.every == 0 and self.tuned:  # the first group of a step
            self.recompute()

    def recompute(self) -> None:
        """New targets from the weights as they are; the ramp to them begins with this step."""
        alphas = layer_alphas(self.tuned, [self.splits.get(p, ()) for p in self.tuned], self.shape_correction)
        self._warn(alphas)
        for p, target in zip(self.tuned, rate_factors(alphas, self.s1, self.s2, self.map), strict=True):
            state = self.state[p]
            state["llr_from"], state["llr_to"] = state.get("llr_to", 1.0), target

    def _warn(self, alphas: list[float]) -> None:
        bad = [tuple(p.shape) for p, a in zip(self.tuned, alphas, strict=True) if not math.isfinite(a)]
        if bad and not self.warned:
            self.warned = True
            log.warning(
                "llr: %d of %d matrices have a spectrum without a tail (of low rank, zero, orthogonal or not finite), "
                "the first of shape %s; their rate is s1 times lr",
                len(bad),
                len(alphas),
                list(bad[0]),
            )

    def factors(self) -> dict[Tensor, float]:
        """The factors of the latest step on the rates of tuned and raised parameters."""
        t = self.steps
        if t == 0:
            return dict.fromkeys([*self.raised, *self.tuned], 1.0)
        since = (min(t, self.until) - 1) % self.every + max(t - self.until, 0)
        x = min((since + 1) / self.ramp, 1.0)
        first = min(t / self.ramp, 1.0)
        found = dict.fromkeys(self.raised, 1 - first + self.s2 * first)
        for p in self.tuned:
            state = self.state.get(p, {})
            found[p] = state.get("llr_from", 1.0) * (1 - x) + state.get("llr_to", 1.0) * x
        return found

    def change(
        self, updates: list[Tensor], params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        all_factors = self.factors()
        factors = [all_factors.get(p, 1.0) for p in params]
        some = [i for i, s in enumerate(factors) if s != 1.0]
        if not some:
            return updates
        changed = [updates[i] for i in some]
        torch._foreach_mul_(changed, [factors[i] for i in some])
        if self.hold_decay:
            return updates
        decayed = self.decayed([params[i] for i in some], group)
        if decayed is not None:
            # The inner rule decays by lr wd: what is missing to lr s wd comes with the update.
            missing = torch._foreach_mul(decayed, [(factors[i] - 1) * group["weight_decay"] for i in some])
            torch._foreach_add_(changed, missing)
        return updates


def check_settings(s1: float, s2: float, every: int, ramp: int, map: str, shape_correction: bool) -> None:
    """ValueError for settings that make no sense together."""
    if not 0 < s1 <= s2:
        raise ValueError(f"s1={s1:g} and s2={s2:g}: s1 should be above 0 and at most s2, or light tails get less")
    if ramp > every:
        raise ValueError(f"ramp={ramp} is longer than every={every}: no factor would ever be reached; lower ramp")
    if shape_correction and map in ("sqrt", "log2"):
        raise ValueError(f"shape_correction makes alpha negative for some, which map={map} cannot take; use linear")


@register("optimizer", "llr", paper="arXiv:2605.22297", seed_id="A18")
class LLRConfig(WrapperConfig):
    """Larger rates for matrices with light-tailed spectra, around another optimizer (LLR)."""

    s1: PositiveFloat = Field(1.0, description="Factor on the rate of the matrix with the heaviest tail.")
    s2: PositiveFloat = Field(5.0, description="Factor for the lightest tail, and for embedding and head.")
    every: PositiveInt = Field(50, description="Steps between recomputations of the factors.")
    until: PositiveInt | None = Field(
        None,
        description="Last step with a recomputation; null: a fifth of the run, as the paper; 1000 where its length is "
        "not known.",
    )
    ramp: PositiveInt = Field(25, description="Steps over which a factor moves to its new value.")
    min_size: PositiveInt = Field(50, description="Matrices with a shorter side than this keep the common rate.")
    map: Map = Field("linear", description="From alpha to factors; all but linear leave s1 and s2 to the others.")
    hold_decay: bool = Field(False, description="Leave lr * weight_decay as it is: the factor is on the update alone.")
    shape_correction: bool = Field(False, description="Take alpha of a random matrix of the same shape off.")

    @model_validator(mode="after")
    def _makes_sense(self) -> LLRConfig:
        check_settings(self.s1, self.s2, self.every, self.ramp, self.map, self.shape_correction)
        inner: Any = self.inner
        while inner is not None:
            if isinstance(inner, LLRConfig):
                raise ValueError("llr in llr: the outer one alone does it")
            if isinstance(inner, AdamHConfig):
                raise ValueError(f"llr around {inner.name}: {FIXED_LENGTH}")
            inner = getattr(inner, "inner", None)
        return self

    def for_run(self, total_steps: int | None) -> LLRConfig:
        found = super().for_run(total_steps)
        if self.until is not None:
            return found
        if total_steps is None:
            log.warning(
                "llr: the run's number of steps is not known; the factors are recomputed until step %d, set until",
                UNTIL,
            )
        until = UNTIL if total_steps is None else max(total_steps // 5, 1)
        return found.model_copy(update={"until": until})

    def wrapped(self, rule: UpdateRule, params: Sequence[NamedParam]) -> LLR:
        return LLR(
            rule,
            tuned=[n.param for n in params if n.role in MATRICES],
            raised=[n.param for n in params if n.role in RAISED],
            s1=self.s1,
            s2=self.s2,
            every=self.every,
            until=self.until or UNTIL,
            ramp=self.ramp,
            min_size=self.min_size,
            map=self.map,
            hold_decay=self.hold_decay,
            shape_correction=self.shape_correction,
            splits={n.param: n.splits for n in params if n.splits},
        )
