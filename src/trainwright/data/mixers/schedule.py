"""Proportions by a schedule: for each stretch of the run the shares of the sources, kept to the row.

Shares become whole rows before the run begins: in each stretch each source gets a number of rows within about one of
its share, spread evenly, and over the run exactly its total, the largest-remainder rounding of the sum of its shares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.data.mixers.base import MixContext, MixerConfig, MixStats, by_name, normalised
from trainwright.data.mixture import Segment


def apportion(total: int, shares: np.ndarray) -> np.ndarray:
    """``total`` in whole numbers by ``shares [K]`` (>= 0, not all 0): largest remainders; of equal ones the first."""
    exact = total * (shares / shares.sum())
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def whole_rows(lengths: Sequence[int], shares: np.ndarray, totals: np.ndarray | None = None) -> np.ndarray:
    """Rows ``[S, K]`` of each source in each stretch; row sums are ``lengths``, column sums exactly ``totals``.

    shares  ``[S, K]``, each line summing to 1
    totals  ``[K]`` whole numbers summing to that of ``lengths``; None: the rounded sums of the shares
    """
    exact = np.asarray(lengths, float)[:, None] * shares
    counts = np.stack([apportion(n, line) for n, line in zip(lengths, shares, strict=True)])
    if totals is None:
        totals = apportion(int(sum(lengths)), exact.sum(0))
    # Sources that got too many rows by rounding give one each to those that got too few, where it changes least.
    while (over := np.flatnonzero(counts.sum(0) > totals)).size:
        short = np.flatnonzero(counts.sum(0) < totals)
        wrong = counts - exact
        moves = [
            (wrong[s, a] - wrong[s, b] + (0 if exact[s, b] > 0 else -2), -s, int(a), int(b))
            for s in range(len(counts)) for a in over for b in short if counts[s, a] > 0
        ]  # fmt: skip
        _, s, a, b = max(moves)
        counts[-s, a] -= 1
        counts[-s, b] += 1
    return counts


class ScheduleMixer:
    """Shares by step.

    lengths  rows of each stretch
    shares   proportions in each, by source; all name the same sources
    totals   rows of each source over all stretches; None: by the shares
    """

    def __init__(
        self,
        lengths: Sequence[int],
        shares: Sequence[Mapping[str, float]],
        totals: Mapping[str, int] | None = None,
        step_rows: int = 1,
    ):
        if not lengths or len(lengths) != len(shares) or min(lengths) < 0 or sum(lengths) < 1:
            raise ValueError("each stretch needs a number of rows and its shares")
        self.names = list(shares[0])
        matrix = np.stack([by_name(self.names, normalised(s), "shares") for s in shares])
        wanted = None if totals is None else by_name(self.names, totals, "totals").astype(np.int64)
        if wanted is not None and wanted.sum() != sum(lengths):
            raise ValueError(f"totals sum to {wanted.sum()} rows, the stretches to {sum(lengths)}")
        counts = whole_rows(lengths, matrix, wanted)
        self.step_rows = step_rows
        self.plan: Sequence[Segment] | None = [
            Segment(dict(zip(self.names, line.tolist(), strict=True))) for line in counts
        ]

    @property
    def totals(self) -> dict[str, int]:
        """Rows of each source over the run."""
        return {n: sum(s.rows[n] for s in self.plan or ()) for n in self.names}

    def mix(self, stats: MixStats) -> dict[str, float]:
        """Shares of the rows behind ``stats.step`` steps; behind the end, those of the last stretch."""
        plan = [s for s in self.plan or () if s.total]
        row, segment = stats.step * self.step_rows, plan[-1]
        for s in plan:
            if row < s.total:
                segment = s
                break
            row -= s.total
        return {n: segment.rows[n] / segment.total for n in self.names}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Stretch(BaseModel):
    """Shares up to a point of the run."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    until: float = Field(gt=0, le=1, description="Where it ends, as a share of the run; the last one at 1.")
    shares: dict[str, float] = Field(description="Share of the rows of each source; a source not named gives none.")


@register("mixer", "schedule", seed_id="B118")
class ScheduleMixerConfig(MixerConfig):
    """Shares of the sources by stretches of the run, each source's total kept exactly."""

    by_size: ClassVar[bool] = True

    segments: list[Stretch] = Field(description="In their order: {until: 0.7, shares: {web: 0.9, code: 0.1}}.")

    @field_validator("segments")
    @classmethod
    def _in_order(cls, segments: list[Stretch]) -> list[Stretch]:
        ends = [s.until for s in segments]
        if not ends or ends[-1] != 1 or any(b <= a for a, b in itertools.pairwise(ends)):
            raise ValueError(f"should end later and later, the last at 1, not at {ends}")
        for s in segments:
            if not s.shares or min(s.shares.values()) < 0 or not sum(s.shares.values()) > 0:
                raise ValueError(f"the shares until {s.until:g} should be at least 0 and not all 0")
        return segments

    def build(self, context: MixContext) -> ScheduleMixer:
        if not context.total_rows:
            raise ConfigError("needs a run of known length; set train.steps, tokens or epochs", key="segments")
        names = list(context.proportions)
        bounds = [0, *(math.floor(context.total_rows * s.until + 0.5) for s in self.segments)]
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        shares = []
        for i, s in enumerate(self.segments):
            line = by_name(names, s.shares, f"segments.{i}.shares", missing=0.0)
            shares.append(dict(zip(names, line.tolist(), strict=True)))
        return ScheduleMixer(lengths, shares, step_rows=context.step_rows)
