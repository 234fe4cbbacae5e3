"""Averages of the last snapshots for post-training quantization: recent weights against robust ones, by two knobs.

    average = sum_s w_s theta_{T - s},   w_s proportional to (1 - s / (p tau))_+^p,   s in spacings between snapshots

    lag      = sum_s w_s s                        training progress that the average gives away
    variance = sum_{s,t} w_s w_t r^|s - t|        noise of the iterates that it keeps; sum_s w_s^2 for correlation r = 0

Rounding hurts the more, the further the weights lie from the valley's floor, so coarse formats want a small variance
and fine ones a small lag. Limits of the family: tau -> 0 the last snapshot; p -> 0 with p tau = k the plain mean of k
(LAWA); p = 1 a ramp, the best of all for independent noise; p = infinity exponential, e^(-s / tau) (EMA).

For a bit width B, with D = 1 / (2^B - 1) the step of rounding in units of a group's range, the model

    loss(tau, B) = c_B + a lag(tau) + (b0 + bq D^2) variance(tau),   a, b0, bq >= 0

is fitted to losses measured at three or more tau (``with average.swapped(tau=...), quantized(params, bits): ...``);
``choose_tau`` gives its minimum for each B, which never grows with B. The last snapshot (tau = 0) is always among the
candidates; of a run whose learning rate has decayed, that is the plain decayed checkpoint.

After "weight averaging for PTQ" (MOFA-LAB/weight-averaging-for-ptq), of which only the abstract could be had: the
family and the fit are reconstructed from it. Ours are the constants c_B, without which the loss of the unperturbed
model would be read as lag or variance. The snapshots are LAWA's: float32 in host memory, averaged before anything is
rounded. While fewer are held than the kernel reaches over, it is cut off there. Independent iterates are an
approximation: ``KernelAverage.correlation_time`` estimates how far snapshots have to be apart, and warns.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.averaging._ring import RingAverage
from trainwright.optim.averaging._weights import shards, swapped_for
from trainwright.optim.base import AverageConfig

log = logging.getLogger("trainwright")

TAIL = 1e-3  # weight of an exponential kernel that may lie beyond the ring
CANDIDATES = 64  # values of tau that choose_tau tries


# -- kernels --------------------------------------------------------------------------------------------------------


def support(p: float, tau: float) -> int:
    """Snapshots that the kernel reaches over; of an exponential one (p infinite) those with all but 0.1 % of it."""
    if not p > 0:
        raise ValueError(f"p={p} is not above 0; for the plain mean of k snapshots use average=lawa, or a tiny p")
    if not 0 <= tau < math.inf:
        raise ValueError(f"tau={tau} is not a finite number >= 0")
    reach = tau * math.log(1 / TAIL) if p == math.inf else p * tau
    return max(1, math.ceil(reach * (1 - 1e-9)))  # the product of p and tau = k / p may come out just above k


def largest_tau(p: float, size: int) -> float:
    """The largest tau whose kernel fits into ``size`` snapshots."""
    return size / (math.log(1 / TAIL) if p == math.inf else p)


def kernel_weights(p: float, tau: float, size: int) -> list[float]:
    """Weights w_s, s = 0 (newest) .. size - 1: none negative, sum 1. Raises ValueError if the kernel reaches beyond."""
    needed = support(p, tau)
    if needed > size:
        raise ValueError(
            f"the kernel p={p:g}, tau={tau:g} reaches over {needed} snapshots, {size} are held: {needed - size} are "
            f"missing; hold {needed}, or use tau <= {largest_tau(p, size):g}"
        )
    if needed == 1:
        return [1.0] + [0.0] * (size - 1)
    if p == math.inf:
        raw = [math.exp(-s / tau) for s in range(size)]
    else:
        raw = [max(1 - s / (p * tau), 0.0) ** p if s < needed else 0.0 for s in range(size)]
    return normalized(raw)


def normalized(weights: Sequence[float]) -> list[float]:
    """``weights`` with the sum 1. Raises ValueError for negative ones and for none above 0."""
    total = math.fsum(weights)
    if min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights of an average are finite, none negative and not all 0, got {list(weights)}")
    return [w / total for w in weights]


def mean_lag(weights: Sequence[float]) -> float:
    """How old the average is, in spacings: sum_s w_s s."""
    return math.fsum(w * s for s, w in enumerate(weights))


def variance_factor(weights: Sequence[float], correlation: float = 0.0) -> float:
    """Variance of the average in units of that of one snapshot, ``correlation`` being that of neighbouring ones."""
    if correlation == 0:
        return math.fsum(w * w for w in weights)
    w = torch.tensor(weights, dtype=torch.float64)
    ages = torch.arange(len(weights), dtype=torch.float64)
    return float(w @ correlation ** (ages[:, None] - ages).abs() @ w)


def correlation_of(near: float, far: float) -> float:
    """Correlation of neighbouring snapshots from mean square distances at one and at two spacings.

    Weights that move around a point with correlation r^j at j spacings are 2 (1 - r^j) variances apart, so that
    far / near = 1 + r. 1 stands for weights that walk away, 0 also for such that do not move.
    """
    return min(max(far / near - 1, 0.0), 1.0) if near > 0 else 0.0


# -- choosing tau ---------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Loss on held-out data of the average with ``tau``, rounded to ``bits``."""

    tau: float
    bits: int
    loss: float


@dataclass(frozen=True)
class LossModel:
    """loss(tau, bits) = offsets[bits] + lag_cost lag + (noise + rounding step(bits)^2) variance."""

    lag_cost: float
    noise: float
    rounding: float
    offsets: dict[int, float]

    def __call__(self, tau: float, bits: int, p: float, size: int) -> float:
        """Predicted loss; without the offset for a bit width that was not measured."""
        w = kernel_weights(p, tau, size)
        noise = self.noise + self.rounding * rounding_step(bits) ** 2
        return self.offsets.get(bits, 0.0) + self.lag_cost * mean_lag(w) + noise * variance_factor(w)


def rounding_step(bits: int) -> float:
    """Distance of neighbouring values that ``bits`` can express, in units of the range."""
    if bits < 1:
        raise ValueError(f"bits={bits}: rounding needs at least 1")
    return 1 / (2**bits - 1)


def fit_loss(measured: Iterable[Measured], p: float, size: int) -> LossModel:
    """Least squares with no negative cost. Raises ValueError unless each bit width has 3 values of tau or more."""
    points = [Measured(*m) for m in measured]
    widths = sorted({m.bits for m in points})
    for bits in widths:
        if (count := len({m.tau for m in points if m.bits == bits})) < 3:
            raise ValueError(f"{bits} bits were measured at {count} values of tau; 3 or more are needed")
    if not points or not all(math.isfinite(m.loss) for m in points):
        raise ValueError("the fit needs measured losses, all of them finite")
    rows = []
    for m in points:
        w = kernel_weights(p, m.tau, size)
        v = variance_factor(w)
        rows.append([mean_lag(w), v, rounding_step(m.bits) ** 2 * v, *(float(m.bits == b) for b in widths)])
    design = torch.tensor(rows, dtype=torch.float64)  # [points, 3 + widths]
    losses = torch.tensor([m.loss for m in points], dtype=torch.float64)
    scale = design.norm(dim=0).clamp(min=1e-300)

    # The best fit with a, b0, bq >= 0 is the free fit of those of them that are not 0: there are eight choices.
    best: tuple[float, Tensor] | None = None
    offsets = list(range(3, design.shape[1]))
    for count in range(4):
        for chosen in itertools.combinations(range(3), count):
            columns = [*chosen, *offsets]
            free = torch.linalg.lstsq((design / scale)[:, columns], losses[:, None], driver="gelsd").solution[:, 0]
            if (free[:count] < 0).any():
                continue
            solution = torch.zeros(design.shape[1], dtype=torch.float64)
            solution[columns] = free / scale[columns]
            error = float((design @ solution - losses).norm())
            if best is None or error < best[0] - 1e-12 * float(losses.norm()):
                best = error, solution
    assert best is not None  # the choice of none of the three is always feasible
    a, b0, bq, *constants = best[1].tolist()
    return LossModel(a, b0, bq, dict(zip(widths, constants, strict=True)))


def choose_tau(
    measured: Iterable[Measured], bits: Iterable[int] | None = None, *, p: float = 1.0, size: int
) -> dict[int, float]:
    """The best tau for each bit width (default: those measured), by the model fitted to ``measured``.

    Candidates are tau = 0, the last snapshot, and 64 values up to the largest that ``size`` snapshots allow.
    Raises ValueError for too few measurements, and for a width that one measured width says nothing of.
    """
    points = [Measured(*m) for m in measured]
    model = fit_loss(points, p, size)
    asked = sorted(set(model.offsets) if bits is None else set(bits))
    if len(model.offsets) == 1 and (unknown := [b for b in asked if b not in model.offsets]):
        raise ValueError(
            f"{', '.join(map(str, unknown))} bits were not measured, and one measured width does not tell how the loss "
            "depends on it; measure a second one"
        )
    candidates = [largest_tau(p, size) * i / CANDIDATES for i in range(CANDIDATES + 1)]
    return {b: min(candidates, key=lambda tau: model(tau, b, p, size)) for b in asked}


# -- rounding -------------------------------------------------------------------------------------------------------


def round_to_nearest(w: Tensor, bits: int, group: int | None = 128) -> Tensor:
    """``w`` [..., in] rounded to 2^bits values per group of ``group`` neighbours in its last dimension.

    Each group has its own scale and integer zero point, over its range with 0 in it; the last group of a row may be
    shorter, and None makes a row one group. The result has the dtype of ``w``, and is off by at most a step.
    """
    levels = round(1 / rounding_step(bits))
    if not w.is_floating_point() or w.ndim == 0:
        raise ValueError(f"cannot round a {w.ndim}-d tensor of {w.dtype}; give weights [..., in]")
    if group is not None and group < 1:
        raise ValueError(f"group={group} is less than 1; None: whole rows")
    length = w.shape[-1]
    group = min(group or length, length) or 1
    padded = torch.nn.functional.pad(w.detach().float(), (0, -length % group))  # 0 is in every range as it is
    groups = padded.unflatten(-1, (-1, group))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    step = (high - low) / levels
    step = torch.where(step > 0, step, 1.0)
    zero = (-low / step).round()
    codes = ((groups / step).round() + zero).clamp(0, levels)
    return ((codes - zero) * step).flatten(-2)[..., :length].to(w.dtype)


def quantized(params: Sequence[NamedParam], bits: int, group: int | None = 128) -> AbstractContextManager[None]:
    """Inside it the hidden matrices (roles matrix and expert) hold their rounded values, see ``round_to_nearest``.

    Enter it inside of ``average.swapped(...)``: an average of rounded weights is not what a format can hold. Weights
    may be sharded by rows.
    """
    matrices = [n for n in params if n.role in ("matrix", "expert")]
    return swapped_for(matrices, (round_to_nearest(w, bits, group) for w in shards(n.param for n in matrices)))


# -- the average ----------------------------------------------------------------------------------------------------


class KernelAverage(RingAverage):
    """Average of the last ``size`` snapshots of ``params`` under the kernel (p, tau), see the module.

    A snapshot is taken after each ``every``-th step from step ``start`` on. p may be ``math.inf``. Raises ValueError
    for p <= 0, tau < 0, and a kernel that reaches over more than ``size`` snapshots.
    """

    name = "ptq_kernel"

    def __init__(
        self,
        params: Sequence[NamedParam],
        size: int = 8,
        p: float = 1.0,
        tau: float = 8.0,
        every: int = 100,
        start: int = 0,
    ):
        kernel_weights(p, tau, size)
        super().__init__(params, size, every, start)
        self.p, self.tau = p, tau
        self._looked = False  # at the distances of the snapshots

    def weights(self, count: int) -> list[float]:
        return normalized(kernel_weights(self.p, self.tau, self.ring.size)[:count])

    def swapped(self, *, tau: float | None = None, p: float | None = None) -> AbstractContextManager[None]:
        """Inside it the weights hold the average; before the first snapshot they stay as they are.

        The first time that all snapshots are there it looks at their correlation_time, which may warn; on every rank.
        With ``tau`` or ``p`` that kernel is used once, as ``choose_tau`` needs it; it must fit into the snapshots held
        (ValueError with the number missing).
        """
        if tau is None and p is None:
            if not self._looked and len(self.ring) == self.ring.size >= 3:
                self._looked = True
                self.correlation_time()
            return super().swapped()
        kernel = self.p if p is None else p, self.tau if tau is None else tau
        if not len(self.ring):
            raise ValueError(f"no snapshot is held yet, {support(*kernel)} are missing")
        return swapped_for(self.ring.params, self.ring.average(kernel_weights(*kernel, len(self.ring))))

    def correlation_time(self) -> float:
        """Spacings over which snapshots forget each other, from their distances; infinite: they only walk away.

        Warns where it is above 1: the variance that the average keeps is larger than sum_s w_s^2 then. Needs three
        snapshots (ValueError).
        """
        if len(self.ring) < 3:
            raise ValueError(f"three snapshots are needed, {len(self.ring)} are held")
        r = correlation_of(self.ring.square_distance(1), self.ring.square_distance(2))
        time = 0.0 if r == 0 else math.inf if r == 1 else -1 / math.log(r)
        if time > 1:
            w = self.weights(len(self.ring))
            log.warning(
                "snapshots %d steps apart have the correlation %.2f (correlation time %.1f spacings): the average "
                "keeps %.3f of the variance instead of %.3f; take them further apart",
                self.every,
                r,
                time,
                variance_factor(w, r),
                variance_factor(w),
            )
        return time


@register("average", "ptq_kernel", seed_id="B085")
class KernelConfig(AverageConfig):
    """Kernel-weighted mean of the last snapshots, for weights that will be quantized."""

    size: PositiveInt = Field(8, description="Snapshots held; each takes 4 bytes a weight of host memory.")
    p: PositiveFloat | Literal["inf"] = Field(
        1.0, description="Shape: towards 0 the plain mean, 1 a ramp, inf exponential (EMA)."
    )
    tau: NonNegativeFloat = Field(
        8.0, description="Reach in spacings: the kernel ends at p * tau, and 0 is the last snapshot."
    )
    every: PositiveInt = Field(100, description="Steps between snapshots; more than the weights stay correlated over.")
    start: int = Field(0, ge=0, description="First step of which a snapshot may be taken.")

    @model_validator(mode="after")
    def _kernel_fits(self) -> KernelConfig:
        kernel_weights(float(self.p), self.tau, self.size)
        return self

    def build(self, params: Sequence[NamedParam]) -> KernelAverage:
        return KernelAverage(params, self.size, float(self.p), self.tau, self.every, self.start)
