"""SPAM: Adam that clips spikes entry by entry against its own second moment, and forgets its momentum periodically.

Step t counts from 1; D = reset_every, T = reset_warmup, theta = threshold; every operation is per entry.
    t mod D = 0:            m = v = 0
    t >= c and t mod D >= c (c = clip_after), v > 0:   g = sign(g) min(|g|, sqrt(theta v))
    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    u = sqrt(1 - b2^n) / (1 - b1^n) m / (sqrt(v) + eps)
    f = 1 - 0.99 (1 + cos(pi k / (T + 1))) / 2  for k < T steps since the last reset, else 1, also before the first one
    w = w - lr f u;  then w = w (1 - lr wd)
n is t, which no reset touches, so that |u| is (1 - b1) / sqrt(1 - b2) = 3.2 right after one; with reset_bias it counts
from the last reset, and |u| is 1 there as in Adam.
SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM Training, arXiv:2501.06842.

Sparse momentum (density < 1): of a hidden matrix only randomly drawn entries are stepped (and decayed) until the next
reset, which draws others; m and v are kept for these entries alone, [..., out, k] with k = density * in, beside a mask
of a byte an entry. Every row gets the same number of entries, so that the state is sharded as the matrix is.

Differences from the paper's code. (1) An entry with v = 0 is not clipped: there is nothing to compare it with, and the
bound sqrt(theta v) = 0 would hold the embedding of a token not seen before step 20 at its place until the next reset.
(2) reset_every = 0 means never. (3) The mask is drawn at the reset and not one step before. (4) Decay acts on the
entries that are stepped; in the code it is lost when density < 1. (5) The gradient is not overwritten.
(6) The restart is counted from k = 0, so that f is 0.01 at a reset; the package pytorch-optimizer has it at k + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_validator, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import zeros as distributed_zeros

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.core.seeds import derive
from trainwright.optim.adamw import decay_groups
from trainwright.optim.base import OptimizerConfig, UpdateRule
from trainwright.optim.matrix import MATRICES
from trainwright.optim.settings import Share
from trainwright.optim.whole import like


def clip_spikes(grads: list[Tensor], second: list[Tensor], threshold: float) -> list[Tensor]:
    """``grads`` with entries whose square exceeds ``threshold`` times that of ``second`` cut down to it; new tensors.

    Entries of ``second`` that are 0 set no bound.
    """
    free = torch._foreach_sign(second)
    torch._foreach_reciprocal_(free)
    torch._foreach_sub_(free, 1.0)  # infinite where the second moment is 0, else 0
    bounds = torch._foreach_mul(second, threshold)
    torch._foreach_sqrt_(bounds)
    torch._foreach_add_(bounds, free)
    clipped = torch._foreach_clamp_max(grads, bounds)
    torch._foreach_neg_(bounds)
    torch._foreach_clamp_min_(clipped, bounds)
    return list(clipped)


def spam_update(
    grads: list[Tensor], first: list[Tensor], second: list[Tensor], betas: tuple[float, float], eps: float
) -> list[Tensor]:
    """``m / (sqrt(v) + eps)`` as new tensors of the dtype of v and of ``grads``; moves both moments in place."""
    moments = [m.to(v.dtype) for m, v in zip(first, second, strict=True)]  # themselves, but of 16-bit weights
    torch._foreach_lerp_(moments, grads, 1 - betas[0])
    torch._foreach_mul_(second, betas[1])
    torch._foreach_addcmul_(second, grads, grads, value=1 - betas[1])
    for m, moved in zip(first, moments, strict=True):
        if moved is not m:
            m.copy_(moved)
    roots = torch._foreach_sqrt(second)
    torch._foreach_add_(roots, eps)
    return list(torch._foreach_div(moments, roots))


def restart_factor(steps: int, warmup: int) -> float:
    """Factor on the rate ``steps`` after a reset: from 0.01 up to 1."""
    return 1 - 0.99 * 0.5 * (1 + math.cos(math.pi * steps / (warmup + 1))) if steps < warmup else 1.0


class SPAM(UpdateRule):
    """SPAM for parameters of any shape, plain or DTensor.

    threshold     bound on g^2 / v; 0: entries are not clipped
    reset_every   steps between resets of the momentum; 0: never
    reset_warmup  steps over which the rate comes back after a reset
    clip_after    steps without clipping at the start and after each reset, while v is too young to judge by
    density       share of entries that have momentum and are stepped, in (0, 1]; below 1 for matrices [..., out, in]
    reset_bias    count the bias correction from the last reset
    seed          of the masks
    State per parameter: ``exp_avg``, ``exp_avg_sq`` (float32 at least) of its shape; with density < 1 of shape
    [..., out, k], and ``mask``, a bool of its shape. ``step`` is kept in the groups, which may differ in all of these
    settings.
    Raises ValueError for settings that make no sense, and for density < 1 on vectors or matrices sharded by columns.
    """

    group_state = ("step",)
    shapes_state = ("density",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        threshold: float = 5000.0,
        reset_every: int = 500,
        reset_warmup: int = 150,
        clip_after: int = 20,
        density: Share = 1.0,
        reset_bias: bool = False,
        seed: int = 0,
    ):
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "threshold": threshold,
            "reset_every": reset_every, "reset_warmup": reset_warmup, "clip_after": clip_after, "density": density,
            "reset_bias": reset_bias, "seed": seed, "step": 0,
        }  # fmt: skip
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_settings(group)
        vectors = [tuple(p.shape) for p in group["params"] if p.ndim < 2]
        if group["density"] < 1 and vectors:
            raise ValueError(f"density={group['density']} is for matrices, got a parameter of shape {vectors[0]}")
        cut = [tuple(p.shape) for p in group["params"] if _by_columns(p)]
        if group["density"] < 1 and cut:
            raise ValueError(
                f"density={group['density']} is for matrices sharded by rows; one of shape {cut[0]} is sharded by "
                "columns; set density=1"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entries in self.state.values():
            if "mask" in entries:  # torch's load_state_dict gives it the dtype of the weights
                entries["mask"] = entries["mask"].bool()

    def start(self, group: dict[str, Any]) -> None:
        group["step"] += 1
        if group["reset_every"] and group["step"] % group["reset_every"] == 0:
            for p in group["params"]:
                for key in ("exp_avg", "exp_avg_sq", "mask"):
                    if key in self.state[p]:
                        self.state[p][key].zero_()
                if "mask" in self.state[p]:
                    self._draw(p, group)

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        t, every = group["step"], group["reset_every"]
        since = t % every if every else t
        after_reset = bool(every) and t >= every
        steps = since + 1 if group["reset_bias"] and after_reset else t
        scale = math.sqrt(1 - group["betas"][1] ** steps) / (1 - group["betas"][0] ** steps)
        if after_reset:
            scale *= restart_factor(since, group["reset_warmup"])
        clips = group["threshold"] > 0 and t >= group["clip_after"] and since >= group["clip_after"]
        if group["density"] == 1:
            first, second = self.state_of(params, "exp_avg"), self.state_of(params, "exp_avg_sq")
        else:
            first, second = self._compact(params, group)
            where = [self._columns(p) for p in params]
            grads = [local_tensor(g).gather(-1, i) for g, i in zip(grads, where, strict=True)]
        grads = [g.to(v.dtype) for g, v in zip(grads, second, strict=True)]
        if clips:
            grads = clip_spikes(grads, second, group["threshold"])
        updates = spam_update(grads, first, second, group["betas"], group["eps"])
        torch._foreach_mul_(updates, scale)
        updates = [u.to(p.dtype) for u, p in zip(updates, params, strict=True)]
        if group["density"] == 1:
            return updates
        spread = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        for full, i, u in zip(spread, where, updates, strict=True):
            local_tensor(full).scatter_(-1, i, u)
        return spread

    def move(self, values: list[Tensor], updates: list[Tensor], params: list[Tensor], group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        torch._foreach_add_(values, updates, alpha=-group["lr"])
        if decay and group["density"] == 1:
            torch._foreach_mul_(values, 1 - group["lr"] * decay)
        elif decay:
            torch._foreach_add_(values, self._stepped(params, values, group), alpha=-group["lr"] * decay)

    def decayed(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor] | None:
        return self._stepped(params, params, group) if group["weight_decay"] else None

    def _stepped(self, params: list[Tensor], values: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """``values``, one for each of ``params``, with 0 where an entry is not stepped."""
        if group["density"] == 1:
            return values
        return list(torch._foreach_mul(values, [self.state[p]["mask"] for p in params]))

    def _compact(self, params: list[Tensor], group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """What this rank holds of both moments, [..., out, k]; draws the mask of parameters that have none yet."""
        for p in params:
            state = self.state[p]
            if "mask" not in state:
                state["mask"] = torch.zeros_like(p, dtype=torch.bool)
                self._draw(p, group)
                for key in ("exp_avg", "exp_avg_sq"):
                    shape = [*p.shape[:-1], kept(p.shape[-1], group["density"])]
                    state[key] = _zeros(p, shape, self.state_dtype(p, key))
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(self.state_dtype(p, key))  # of an older checkpoint
                if isinstance(p, DTensor) and not isinstance(state[key], DTensor):  # from a run of one process
                    state[key] = like(state[key], p)
        return tuple([local_tensor(self.state[p][key]) for p in params] for key in ("exp_avg", "exp_avg_sq"))  # type: ignore[return-value]

    def _draw(self, p: Tensor, group: dict[str, Any]) -> None:
        """A new mask, the same for a matrix that is sharded as for the whole one."""
        device = local_tensor(p).device
        index = next(i for i, q in enumerate(q for g in self.param_groups for q in g["params"]) if q is p)
        period = group["step"] // group["reset_every"] if group["reset_every"] else 0
        generator = torch.Generator(device).manual_seed(derive(group["seed"], "spam", period, index))
        scores = torch.rand(p.shape, generator=generator, device=device)
        chosen = scores.topk(kept(p.shape[-1], group["density"]), dim=-1, sorted=False).indices
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        local_tensor(self.state[p]["mask"]).copy_(local_tensor(like(mask, p)))

    def _columns(self, p: Tensor) -> Tensor:
        """Columns of the masked entries of this rank's rows, [..., out, k], ascending in every row."""
        mask, moment = local_tensor(self.state[p]["mask"]), local_tensor(self.state[p]["exp_avg"])
        return torch.nonzero_static(mask, size=moment.numel())[:, -1].view(moment.shape)  # waits for no device


def kept(columns: int, density: float) -> int:
    """Entries of a row that have momentum."""
    return min(columns, max(1, round(density * columns)))


def _zeros(p: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    if isinstance(p, DTensor):
        return distributed_zeros(*shape, dtype=dtype, device_mesh=p.device_mesh, placements=p.placements)
    return torch.zeros(shape, dtype=dtype, device=p.device)


def _by_columns(p: Tensor) -> bool:
    """Whether ranks hold parts of the rows of ``p``."""
    return isinstance(p, DTensor) and any(isinstance(s, Shard) and s.dim % p.ndim == p.ndim - 1 for s in p.placements)


def check_settings(group: dict[str, Any]) -> None:
    """ValueError for settings that make no sense together."""
    if not all(0 <= b < 1 for b in group["betas"]):
        raise ValueError(f"betas={group['betas']}: each should be in [0, 1)")
    if not 0 < group["density"] <= 1:
        raise ValueError(f"density={group['density']} should be above 0 and at most 1")
    if group["threshold"] < 0:
        raise ValueError(f"threshold={group['threshold']} should be at least 0; 0 turns clipping off")
    every = group["reset_every"]
    if every and every < group["clip_after"]:
        raise ValueError(
            f"reset_every={every} is below clip_after={group['clip_after']}: nothing would ever be clipped; "
            "raise reset_every, or set it to 0 for no resets"
        )
    if every and group["reset_warmup"] >= every:
        raise ValueError(
            f"reset_warmup={group['reset_warmup']} is not below reset_every={every}: the rate would never come back "
            "to its full value; lower reset_warmup"
        )


RAW = (
    "SPAM looks for spikes in the raw gradient and clips them by itself, and a spike that first scales the whole "
    "gradient down hides in it; write `clip: none`"
)


@register(
    "optimizer",
    "spam",
    paper="arXiv:2501.06842",
    seed_id="B075",
    conflicts={"clip.global_norm": RAW, "clip.zclip": RAW},
)
class SPAMConfig(OptimizerConfig):
    """Adam that clips gradient spikes entry by entry and resets its momentum periodically (SPAM)."""

    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay after the step, on matrices only.")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="Decay of the first and second moment, each in [0, 1)."
    )
    eps: PositiveFloat = Field(1e-6, description="Added to the root of the second moment.")
    threshold: NonNegativeFloat = Field(
        5000.0, description="Entries whose square exceeds this times the second moment are clipped; 0: none are."
    )
    reset_every: NonNegativeInt = Field(500, description="Steps between resets of the momentum; 0: never.")
    reset_warmup: NonNegativeInt = Field(150, description="Steps over which the rate comes back after a reset.")
    clip_after: NonNegativeInt = Field(20, description="Steps without clipping at the start and after each reset.")
    density: PositiveFloat = Field(
        1.0, le=1, description="Share of the entries of hidden matrices that are stepped and have momentum."
    )
    reset_bias: bool = Field(False, description="Count the bias correction from the last reset.")
    seed: NonNegativeInt = Field(0, description="Of the random masks, with density below 1.")

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each should be in [0, 1)")
        return betas

    @model_validator(mode="after")
    def _makes_sense(self) -> SPAMConfig:
        check_settings(self.model_dump())
        return self

    def build(self, params: Sequence[NamedParam]) -> SPAM:
        hidden = {id(n.param) for n in params if n.role in MATRICES} if self.density < 1 else set()
        cut = next((n for n in params if id(n.param) in hidden and _by_columns(n.param)), None)
        if cut is not None:
            raise ConfigError(
                f"is for matrices sharded by rows, and {cut.name} is sharded by columns (as tensor parallelism shards "
                "the second matrix of a pair); set density=1, or shard by rows alone, as fsdp does",
                key="density",
                value=self.density,
            )
        groups: list[dict[str, Any]] = []
        for density, members in (
            (self.density, [n for n in params if id(n.param) in hidden]),
            (1.0, [n for n in params if id(n.param) not in hidden]),
        ):
            for group in decay_groups(members, self.weight_decay):
                groups.append({**group, "density": density, "split_of": f"{group['split_of']} {density}"})
        return SPAM(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            threshold=self.threshold,
            reset_every=self.reset_every,
            reset_warmup=self.reset_warmup,
            clip_after=self.clip_after,
            reset_bias=self.reset_bias,
            seed=self.seed,
        )
