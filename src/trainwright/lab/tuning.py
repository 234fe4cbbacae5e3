"""Tuning by successive halving: every arm gets the same grid size, so the same number of trials and tokens.

With n points in the grid: all n train for a quarter of the budget with the first seed, the better half of them
(rounded up) for half of it, and the best of those is the arm's setting; it then trains for the whole budget with all
seeds. Each rung is a run of its own, with its schedule scaled to its own length, so a rate is never judged in the
middle of another schedule. Rungs with one point left are passed over. Points that diverge or fail are out: their
places in the next rung go to the next best, and stay empty where too few are left, so that an arm whose points diverge
has fewer trials than the others, and never more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.config.run_config import parse_yaml
from trainwright.core.errors import ConfigError
from trainwright.lab.arms import Grid, split_list

RUNGS = ((0.25, 1.0), (0.5, 1 / 2))  # (share of the budget, share of the grid that trains for it)


@dataclass(frozen=True)
class Request:
    """One training that halving asks for."""

    arm: str
    point: int  # index in the arm's grid
    fraction: float  # of the budget


@dataclass
class Tuned:
    """What halving found for one arm."""

    points: list[dict[str, Any]]
    best: int | None = None  # index in points; None: every point diverged or failed
    losses: list[tuple[int, float, float]] = field(default_factory=list)  # (point, share of the budget, loss)
    edge: str = ""  # says so when the best point is at the edge of its grid

    @property
    def chosen(self) -> dict[str, Any]:
        return {} if self.best is None else self.points[self.best]


def parse_tune(text: str) -> tuple[str, list[Any]]:
    """``KEY=log:lo:hi:n``, ``KEY=lin:lo:hi:n`` or ``KEY=[a,b,...]`` -> key and values. Raises ConfigError."""
    key, sep, grid = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError("should look like optimizer.lr=log:1e-4:1e-1:7", key="--tune", value=text)
    return key.strip(), parse_grid(grid.strip(), key.strip())


def parse_grid(grid: Any, key: str) -> list[Any]:
    """Values from ``log:lo:hi:n``, ``lin:lo:hi:n``, ``[a,b]``, ``a,b`` or a list. Raises ConfigError."""
    if isinstance(grid, str) and grid.split(":")[0] in ("log", "lin"):
        kind, *parts = grid.split(":")
        try:
            low, high, n = float(parts[0]), float(parts[1]), int(parts[2])
        except (ValueError, IndexError):
            raise ConfigError(f"should look like {kind}:1e-4:1e-1:7", key=f"tune {key}", value=grid) from None
        if len(parts) != 3 or n < 1 or not low < high or (kind == "log" and low <= 0):
            raise ConfigError("needs low < high (log: above 0) and at least 1 point", key=f"tune {key}", value=grid)
        return [_rounded(low if n == 1 else _between(kind, low, high, i / (n - 1))) for i in range(n)]
    if isinstance(grid, str):
        value = parse_yaml(grid, f"tune {key}")
        grid = value if isinstance(value, list) else [parse_yaml(p, f"tune {key}") for p in split_list(grid)]
    values = list(grid)
    if not values or any(v is None for v in values) or any(values.count(v) > 1 for v in values):
        raise ConfigError("should be a list of different values", key=f"tune {key}", value=values)
    return values


def _between(kind: str, low: float, high: float, share: float) -> float:
    return low + (high - low) * share if kind == "lin" else low * (high / low) ** share


def _rounded(value: float) -> float:
    """Six digits: a rate is read by people, and 0.01 must be 0.01 and not 0.010000000000000002."""
    return float(f"{value:.6g}")


def points(grid: Grid) -> list[dict[str, Any]]:
    """Every combination of the values of a grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def survivors(n: int, share: float) -> int:
    return max(1, math.ceil(n * share - 1e-9))


def trials_per_arm(n: int) -> int:
    """Trainings that tuning a grid of n points takes, at most: fewer where more diverge than would go anyhow."""
    counts = [survivors(n, share) for _, share in RUNGS]
    return sum(c for c in counts if c > 1)


def halve(grids: Mapping[str, Grid], run: Callable[[Sequence[Request]], Sequence[float]]) -> dict[str, Tuned]:
    """Tune all arms together. ``run`` trains what is asked and returns the losses, inf or NaN for a bad one.

    Raises ConfigError when the grids differ in their number of points.
    """
    found = {arm: Tuned(points(grid)) for arm, grid in grids.items()}
    sizes = {arm: len(t.points) for arm, t in found.items()}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{arm}: {n}" for arm, n in sizes.items())
        raise ConfigError(f"tuned arms need the same number of points, so that none is favoured; got {each}")
    alive = {arm: list(range(n)) for arm, n in sizes.items()}
    for fraction, share in RUNGS:
        requests = []
        for arm, left in alive.items():
            left = left[: survivors(sizes[arm], share)]
            alive[arm] = left
            if len(left) > 1:
                requests += [Request(arm, i, fraction) for i in left]
        losses = run(requests) if requests else []
        scores: dict[str, dict[int, float]] = {}
        for request, loss in zip(requests, losses, strict=True):
            value = loss if math.isfinite(loss) else math.inf
            scores.setdefault(request.arm, {})[request.point] = value
            found[request.arm].losses.append((request.point, fraction, value))
        for arm, score in scores.items():
            # Python's sort keeps the grid's order among equals, so the outcome does not hang on timing.
            alive[arm] = sorted((i for i in alive[arm] if math.isfinite(score[i])), key=lambda i, s=score: s[i])  # type: ignore[misc]
    for arm, t in found.items():
        if alive[arm]:
            t.best = alive[arm][0]
            t.edge = edge(grids[arm], t.chosen)
    return found


def edge(grid: Grid, chosen: Mapping[str, Any]) -> str:
    """Whether a number was chosen at the edge of its list of two or more."""
    at = []
    for key, values in grid.items():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(values) > 1 and chosen[key] in (min(numbers), max(numbers)):
            at.append(f"{key}={chosen[key]:g}")
    return f"best rate at the edge of the grid ({', '.join(at)}): widen it" if at else ""
