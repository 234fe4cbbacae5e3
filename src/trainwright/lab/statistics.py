"""Means, paired differences and their 95 % t intervals; where a curve first reaches a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Interval = tuple[float, float]


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float | None, Interval | None]:
    """Mean and t interval of the mean; no interval below two values, nothing at all without one."""
    if not values:
        return None, None
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = t_quantile(0.5 + confidence / 2, n - 1) * deviation / math.sqrt(n)
    return mean, (mean - half, mean + half)


def t_quantile(p: float, freedom: int) -> float:
    from scipy.special import stdtrit  # the quantile alone; scipy.stats takes a second to import

    return float(stdtrit(freedom, p))


def paired(arm: Mapping[int, float], versus: Mapping[int, float]) -> list[float]:
    """``arm - versus`` for each seed that both have, in the order of the seeds."""
    return [arm[seed] - versus[seed] for seed in sorted(set(arm) & set(versus))]


def covers(interval: Interval, value: float) -> bool:
    return interval[0] <= value <= interval[1]


def first_reach(xs: Sequence[float], losses: Sequence[float | None], target: float) -> float | None:
    """The x at which the curve first is at or below ``target``, linear between points; None: never."""
    before: tuple[float, float] | None = None
    for x, loss in zip(xs, losses, strict=True):
        if loss is None or not math.isfinite(loss):
            before = None
            continue
        if loss <= target:
            if before is None or before[1] == loss:
                return x
            return before[0] + (x - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (x, loss)
    return None


def median(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    n = len(ordered)
    if not n:
        return None
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2
