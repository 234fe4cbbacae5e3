"""ZClip: clips a step whose gradient norm stands out from a running mean of the norms before it.

With g the global norm, m and v running mean and variance of earlier norms, s = max(sqrt(v), 1e-3 m):

    z = (g - m) / (s + 1e-6)                                a spike where z > z_threshold
    limit = factor (m + z_threshold^2 s / z)                mode "adaptive": the higher the spike, the lower the limit
            m                                               mode "mean"
            m + z_threshold s                               mode "percentile"
    gradients *= min(1, limit / (g + 1e-6), max_norm / (g + 1e-6))
    x = limit for a spike, else g
    m <- alpha m + (1 - alpha) x,   v <- alpha v + (1 - alpha) (x - m)^2, with the new m

The first ``warmup_steps`` norms only give m and v (their mean and population variance); max_norm alone clips there.
All of it is arithmetic on 0-d tensors on the gradients' device: nothing waits for the host.

ZClip: Adaptive Spike Mitigation for LLM Pre-Training, arXiv:2504.02507. Where we differ from the authors' code:

- A norm that is infinite or NaN leaves gradients and statistics as they are, so that the loop's ``non_finite``
  monitor sees it and skips the step. There an infinity turns the gradients into NaN, and a NaN stays in m and v.
- s has the floor 1e-3 m. Without it constant norms (v = 0) make a spike of any change, however small. With m = 0 (all
  gradients were zero so far) nothing is a spike: the limit would be 0 and m could never leave it.
- m and v of the warm-up are updated as they come (Welford) instead of from a list of the norms.
- They are saved with a checkpoint, and it is counted which of the two limits acted. ``max_norm`` at its usual 1.0
  often lies below the norms of a run, and then every step is clipped by it and the method has nothing left to do.

Gradients have to be unscaled before, as for any clipping: a change of float16's loss scale would look like a spike.
A norm that drifts fast, as in a warm-up of the learning rate, is taken for a row of spikes; ``warmup_steps`` as long
as that warm-up avoids it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from trainwright.core.distributed import local_tensor
from trainwright.core.registry import register
from trainwright.optim.base import ClipConfig
from trainwright.optim.clipping.global_norm import total_norm

Mode = Literal["adaptive", "mean", "percentile"]

EPS = 1e-6  # added to the deviation and to the norm, as in the authors' code
STD_FLOOR = 1e-3  # share of the mean


def spike_limit(
    norm: Tensor, mean: Tensor, var: Tensor, z_threshold: float, mode: Mode = "adaptive", factor: float = 1.0
) -> Tensor:
    """Norm that a spike is cut to; infinite where ``norm`` is no spike. All tensors 0-d."""
    std = torch.maximum(var.sqrt(), STD_FLOOR * mean)
    z = (norm - mean) / (std + EPS)
    if mode == "adaptive":
        limit = factor * (mean + z_threshold**2 * std / z)
    elif mode == "mean":
        limit = mean
    else:
        limit = mean + z_threshold * std
    return torch.where((z > z_threshold) & (mean > 0), limit, math.inf)


def update_statistics(
    x: Tensor, count: Tensor, mean: Tensor, var: Tensor, alpha: float, warmup_steps: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance with ``x``, the ``count``-th norm from 0: plain ones in the warm-up, then running ones."""
    warming = count < warmup_steps
    share = torch.where(warming, 1 / (count + 1), 1 - alpha)
    new_mean = mean + share * (x - mean)
    deviation = torch.where(warming, x - mean, x - new_mean)
    return new_mean, (1 - share) * var + share * deviation * (x - new_mean)


class ZClip:
    """Scales gradients down where their global norm is a spike among the norms before, or is above ``max_norm``.

    z_threshold      deviations above the mean from which a norm is a spike; infinite: only ``max_norm`` acts
    max_norm         limit of every step's norm; None: none
    alpha            share of the old mean and variance that an update keeps
    warmup_steps     norms collected before the first spike can be seen
    mode             what a spike is cut to, see the module
    factor           multiplies the limit in mode "adaptive"
    update_on_spike  whether a spike, as cut, enters mean and variance

    Calling it with parameters (gradients unscaled, sharded or not) scales the gradients in place and returns the norm
    before, a 0-d tensor. ``clipped_by_zscore`` and ``clipped_by_max_norm`` (0-d tensors, as ``count``, ``mean`` and
    ``var``) count the steps in which one or the other was the tighter limit and acted.

    Raises ValueError for settings that make no sense.
    """

    def __init__(
        self,
        z_threshold: float = 2.5,
        max_norm: float | None = 1.0,
        alpha: float = 0.97,
        warmup_steps: int = 25,
        mode: Mode = "adaptive",
        factor: float = 1.0,
        update_on_spike: bool = True,
    ):
        if not z_threshold > 0:
            raise ValueError(f"z_threshold={z_threshold} is not above 0: half of all steps would be spikes")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm={max_norm} is not above 0; None: no such limit")
        if not 0 < alpha < 1:
            raise ValueError(f"alpha={alpha} is not between 0 and 1")
        if warmup_steps < 2:
            raise ValueError(f"warmup_steps={warmup_steps} is less than 2, and one norm has no variance")
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} is none of {', '.join(get_args(Mode))}")
        if not 0 < factor <= 1:
            raise ValueError(f"factor={factor} is not in (0, 1]: above 1 a spike could be let through whole")
        self.z_threshold, self.max_norm, self.alpha, self.warmup_steps = z_threshold, max_norm, alpha, warmup_steps
        self.mode, self.factor, self.update_on_spike = mode, factor, update_on_spike
        self.count = torch.zeros((), dtype=torch.int64)  # finite norms seen
        self.mean, self.var = torch.zeros(()), torch.zeros(())
        self.clipped_by_zscore = torch.zeros((), dtype=torch.int64)
        self.clipped_by_max_norm = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def __call__(self, params: Sequence[Tensor]) -> Tensor:
        norm, parts = total_norm(params)
        if not parts:
            return norm
        self._move(norm.device)
        factor = self.observe(norm)
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for part in parts:
            for grad in (local_tensor(p.grad) for p in part if p.grad is not None):
                groups.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), grads in groups.items():
            torch._foreach_mul_(grads, factor.to(device))
        return norm

    @torch.no_grad()
    def observe(self, norm: Tensor) -> Tensor:
        """What gradients of this norm are to be multiplied by; the norm enters the statistics."""
        g = norm.float()
        limit = spike_limit(g, self.mean, self.var, self.z_threshold, self.mode, self.factor)
        limit = torch.where(self.count < self.warmup_steps, math.inf, limit)
        spike, finite = torch.isfinite(limit), torch.isfinite(norm)

        one = torch.ones_like(norm)
        by_zscore = torch.minimum(limit.to(norm.dtype) / (norm + EPS), one)
        by_max_norm = one if self.max_norm is None else torch.minimum(self.max_norm / (norm + EPS), one)
        zscore_acts = spike & (by_zscore <= by_max_norm)
        self.clipped_by_zscore = self.clipped_by_zscore + (finite & zscore_acts)
        self.clipped_by_max_norm = self.clipped_by_max_norm + (finite & ~zscore_acts & (by_max_norm < 1))

        x = torch.where(spike, limit, g)
        mean, var = update_statistics(x, self.count, self.mean, self.var, self.alpha, self.warmup_steps)
        counts = finite & torch.isfinite(x.square())  # a norm above 1e19 has an infinite square in float32
        if not self.update_on_spike:
            counts = counts & ~spike
        self.mean, self.var = torch.where(counts, mean, self.mean), torch.where(counts, var, self.var)
        self.count = self.count + counts
        return torch.where(finite, torch.minimum(by_zscore, by_max_norm), one)

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors by name: the statistics, and how often which limit acted. No host sync."""
        return {
            "clip_norm_mean": self.mean,
            "clip_norm_std": self.var.sqrt(),
            "clipped_by_zscore": self.clipped_by_zscore,
            "clipped_by_max_norm": self.clipped_by_max_norm,
        }

    def _move(self, device: torch.device) -> None:
        """The state starts on the host, or comes from there with a checkpoint."""
        if self.mean.device != device:
            for name in _STATE:
                setattr(self, name, getattr(self, name).to(device))

    def state_dict(self) -> dict[str, Any]:
        """Python numbers, which hold the tensors' values exactly."""
        return {name: getattr(self, name).item() for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:  # of a clipper that keeps none: the statistics begin here
            return
        for name in _STATE:
            old = getattr(self, name)
            setattr(self, name, torch.tensor(state[name], dtype=old.dtype, device=old.device))


_STATE = ("count", "mean", "var", "clipped_by_zscore", "clipped_by_max_norm")


@register("clip", "zclip", paper="arXiv:2504.02507", seed_id="B077")
class ZClipConfig(ClipConfig):
    """Clip steps whose gradient norm is a spike among the norms before it."""

    z_threshold: PositiveFloat = Field(2.5, description="Deviations above the running mean that make a spike.")
    max_norm: PositiveFloat | None = Field(
        1.0, description="Largest norm let through in any step; null: none. Below the usual norms it acts alone."
    )
    alpha: float = Field(0.97, gt=0, lt=1, description="Share of the running mean and variance that a step keeps.")
    warmup_steps: int = Field(25, ge=2, description="Norms collected before the first spike can be seen.")
    mode: Mode = Field(
        "adaptive",
        description="What a spike is cut to: adaptive (the higher, the lower), mean, or percentile (the threshold).",
    )
    factor: float = Field(1.0, gt=0, le=1, description="Multiplies the limit in mode adaptive; below 1 cuts harder.")
    update_on_spike: bool = Field(True, description="Whether a spike, as cut, enters mean and variance.")

    @model_validator(mode="after")
    def _factor_acts(self) -> ZClipConfig:
        if self.factor != 1 and self.mode != "adaptive":
            raise ValueError(f"factor acts in mode=adaptive only, not in mode={self.mode}; leave it out")
        return self

    def build(self) -> ZClip:
        return ZClip(
            self.z_threshold,
            self.max_norm,
            self.alpha,
            self.warmup_steps,
            self.mode,
            self.factor,
            self.update_on_spike,
        )
