"""TREC: how well the final model will remember each step's data, predicted before training, and where to put the best.

A run's training re-evaluation curve is L_re(t) = L(batch of step t; final weights). AdamW's weights are an average of
its updates: with rate eta_t and decoupled decay lambda, alpha_t = eta_t lambda and

    c_t = alpha_t * prod_{j>t} (1 - alpha_j)          share of step t's update in the final weights
    sum_t c_t + prod_j (1 - alpha_j) = 1
    curve(t) = 1 - (c_t / max c)^p * (t/T)^m           p = 0.5; its shape alone, never the level

The one control is the timescale tau = 1 / (eta lambda T), eta the peak rate: the same tau by another rate, decay or
batch size gives the same curve. m* = C * TPP^mu1 * tau^mu2, TPP = tokens per parameter; fitted on runs of one's own.
Data of which little is to be had goes where the curve is low.

Predicting Training Re-evaluation Curves Enables Effective Data Curriculums for LLMs, arXiv:2509.25380. No code was
released. The fitted constants of the paper's law are not taken over: they hold for its data and models; fit yours with
:func:`fit_m` and :func:`fit_law`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainwright.core.errors import ConfigError

Array = NDArray[np.float64]
P = 0.5
M_GRID = np.linspace(0.0, 3.0, 61)
SMALLEST_M = 0.01  # what an m of 0 counts as where its logarithm is needed


def ema_coefficients(lr: ArrayLike, decay: float) -> tuple[Array, float]:
    """``(c, rest)``: the share of each step's update in the final weights, ``[T]``, and that of the initial weights.

    lr     learning rate of each step, ``[T]``, as the optimizer used it
    decay  decoupled weight decay, of which the optimizer takes ``lr * decay`` a step
    Raises ConfigError for no decay (every c is 0 then, and there is no curve), rates that are negative or not finite,
    and ``lr * decay`` of 1 or more.
    """
    rates = np.asarray(lr, np.float64)
    if rates.ndim != 1 or not len(rates):
        raise ConfigError(f"should be the rates of all steps, one number a step, not of shape {rates.shape}", key="lr")
    if not np.isfinite(rates).all() or (rates < 0).any():
        raise ConfigError("holds rates that are negative or not finite", key="lr")
    if not (math.isfinite(decay) and decay > 0):
        raise ConfigError(
            "without weight decay the final weights remember every step alike, so there is no curve to place data by; "
            "use a decay above 0",
            key="weight_decay",
            value=decay,
        )
    alpha = rates * decay
    if alpha.max() >= 1:
        raise ConfigError(f"lr * weight_decay reaches {alpha.max():g}; it has to stay below 1", key="weight_decay")
    if not alpha.any():
        raise ConfigError("every step has rate 0", key="lr")
    left = np.append(np.cumprod((1 - alpha)[::-1])[::-1], 1.0)  # left[t] = prod_{j >= t} (1 - alpha_j)
    return alpha * left[1:], float(left[0])


def predicted_curve(lr: ArrayLike, decay: float, m: float, p: float = P) -> Array:
    """Shape of the curve, ``[T]``, in 0 (remembered best) .. 1. Raises as :func:`ema_coefficients`."""
    if not (math.isfinite(m) and m >= 0):
        raise ConfigError("should be a number of at least 0", key="m", value=m)
    c, _ = ema_coefficients(lr, decay)
    t = np.arange(1, len(c) + 1) / len(c)
    return 1 - (c / c.max()) ** p * t**m


def timescale(lr: float, decay: float, steps: int) -> float:
    """tau = 1 / (lr * decay * steps), ``lr`` the peak rate: the share of the run over which updates are averaged."""
    if decay <= 0 or lr <= 0 or steps < 1:
        raise ConfigError("a timescale needs a rate, a decay and a number of steps above 0", key="weight_decay")
    return 1 / (lr * decay * steps)


def decay_for(tau: float, lr: float, steps: int) -> float:
    """The weight decay that gives timescale ``tau``."""
    return 1 / (lr * tau * steps)


def smoothed(curve: ArrayLike, window: int | None = None) -> Array:
    """Running mean, by default over a hundredth of the run; windows at the ends are cut off there."""
    values = np.asarray(curve, np.float64)
    size = max(1, round(len(values) / 100) if window is None else window)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start = np.clip(np.arange(len(values)) - (size - 1) // 2, 0, None)
    stop = np.clip(np.arange(len(values)) + size // 2 + 1, None, len(values))
    return (sums[stop] - sums[start]) / (stop - start)


def pearson(a: ArrayLike, b: ArrayLike) -> float:
    """Correlation; NaN where one of the two is constant."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size > 0 else math.nan


# The exponent m


def fit_m(
    measured: ArrayLike, lr: ArrayLike, decay: float, window: int | None = None, grid: ArrayLike = M_GRID
) -> tuple[float, float]:
    """``(m, correlation)``: the m of the grid whose curve correlates best with a measured one, both smoothed alike."""
    target = smoothed(measured, window)
    fits = []
    for m in np.asarray(grid, np.float64):
        value = pearson(smoothed(predicted_curve(lr, decay, float(m)), window), target)
        fits.append((value if math.isfinite(value) else -1.0, -float(m)))
    best, negative_m = max(fits)
    return -negative_m, best


@dataclass(frozen=True)
class MLaw:
    """m* = scale * TPP^tpp_power * tau^tau_power, kept within the range it was fitted in, 0 .. 3."""

    scale: float
    tpp_power: float
    tau_power: float

    def __call__(self, tpp: float, tau: float) -> float:
        return min(max(self.scale * tpp**self.tpp_power * tau**self.tau_power, 0.0), float(M_GRID[-1]))


def fit_law(runs: Sequence[tuple[float, float, float]]) -> MLaw:
    """Least squares in logarithms over runs ``(tpp, tau, m)``.

    Raises ConfigError for runs that leave a constant open: fewer than three, or TPP or tau the same in all.
    """
    values = np.array([[1.0, math.log(tpp), math.log(tau)] for tpp, tau, _ in runs])
    if len(runs) < 3 or np.linalg.matrix_rank(values - values.mean(0) * [0, 1, 1], tol=1e-6) < 3:
        raise ConfigError(
            f"{len(runs)} runs do not settle the three constants; give at least three, in which tokens per parameter "
            "and timescale differ independently",
            key="runs",
        )
    target = np.log([max(m, SMALLEST_M) for _, _, m in runs])
    constant, mu1, mu2 = np.linalg.lstsq(values, target, rcond=None)[0]
    return MLaw(math.exp(constant), float(mu1), float(mu2))


# Placement


@dataclass(frozen=True)
class Placement:
    """Steps ``start:stop`` of a run of ``steps``."""

    start: int
    stop: int
    steps: int
    mean: float  # of the curve in the window
    dip: float  # the curve's mean over the run less that

    def figures(self) -> dict[str, Any]:
        return {**vars(self), "from_share": self.start / self.steps, "to_share": self.stop / self.steps}


def place(curve: ArrayLike, length: int) -> Placement:
    """The window of ``length`` steps in which the curve's mean is lowest; of equal ones the latest.

    Raises ConfigError for a window that is not within the run.
    """
    values = np.asarray(curve, np.float64)
    if not 1 <= length <= len(values):
        raise ConfigError(f"should be 1 .. {len(values)}, the steps of the run", key="length", value=length)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[length:] - sums[:-length]) / length
    lowest = means.min()
    start = int(np.flatnonzero(means <= lowest + 1e-12)[-1])
    return Placement(start, start + length, len(values), float(lowest), float(values.mean() - lowest))
