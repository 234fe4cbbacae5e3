"""Which row comes next: one stream of rows after the other's, in fixed shares, with a place that fits into JSON."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from trainwright.core.errors import ConfigError
from trainwright.data.rows import RowStream

_UNIT = 1 << 32  # shares are whole multiples of 1 / _UNIT, so that the schedule is exact


class RowRef(NamedTuple):
    """Row ``row`` of epoch ``epoch`` of stream ``stream``."""

    stream: str
    epoch: int
    row: int


class Segment(NamedTuple):
    """A stretch of a run in which each source gives so many rows, evenly spread over it."""

    rows: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.rows.values())


class Mixture:
    """The global order of rows over named streams.

    With ``weights`` every row adds its share to each stream's credit, and the stream that gives the row pays one. Of
    those with credit, the one gives it whose credit would be the first to reach one whole row. After any number of
    rows each stream has then given its exact share to within one row (earliest deadline first: Baruah et al.,
    Proportionate progress, Algorithmica 15, 1996), so every batch has nearly the same composition. Each stream goes
    through epochs of its own. A single stream needs no weights.

    What comes next can be changed between two rows, and all of it is in :meth:`position` but the lists themselves:
    :meth:`set_weights` (credit is kept, so shares that change at every step are kept on average), :meth:`follow` (a
    plan of segments, each with exact counts), :meth:`choose` (rows picked by hand go first).

    Raises ConfigError for weights that are negative, not finite, all zero, or not one for each stream.
    """

    def __init__(self, streams: Mapping[str, RowStream], weights: Mapping[str, float] | None = None):
        self.streams = {name: streams[name] for name in sorted(streams)}
        if weights is None and len(streams) != 1:
            raise ValueError("several streams need weights")
        self.shares = self._shares(dict.fromkeys(streams, 1.0) if weights is None else weights)
        self._unit = _UNIT  # what the shares sum to
        self.rows = 0  # rows taken in all
        self._places: dict[str, dict[str, int]] = {name: {"epoch": 0, "row": 0, "credit": 0} for name in streams}
        self._plan: list[Segment] = []
        self._bounds: list[int] = []  # rows taken when each segment of the plan ends
        self._after: dict[str, int] = {}  # shares behind the plan
        self._chosen: Sequence[RowRef] | None = None
        self._chosen_at = 0

    def _shares(self, weights: Mapping[str, float]) -> dict[str, int]:
        if set(weights) != set(self.streams):
            raise ConfigError(
                f"name {sorted(weights)} but the sources are {sorted(self.streams)}; give each source a weight",
                key="weights",
            )
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError("should be a finite number, at least 0", key=f"weights.{name}", value=weight)
        total = math.fsum(weights.values())
        if total <= 0:
            raise ConfigError("sum to zero; give at least one source a positive weight", key="weights")
        shares = {name: round(weights[name] / total * _UNIT) for name in self.streams}
        shares[max(shares, key=lambda n: shares[n])] += _UNIT - sum(shares.values())
        return shares

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Other weights from the next row on. Raises as the constructor does."""
        self.shares = self._shares(weights)

    def follow(self, plan: Sequence[Segment]) -> None:
        """Take rows by ``plan``, counted from the first row of the run; behind it by the weights again.

        Raises ConfigError for a source that is not mixed.
        """
        for segment in plan:
            for name in segment.rows:
                if name not in self.streams:
                    raise ConfigError(f"is not among the sources {sorted(self.streams)}", key="segments", value=name)
        self._plan, self._after = [s for s in plan if s.total], dict(self.shares)
        self._bounds = list(accumulate(s.total for s in self._plan))
        self._enter_segment()

    def _enter_segment(self) -> None:
        """Shares by the number of rows taken. Counts of a segment are whole, so its credits end at 0."""
        at = bisect_right(self._bounds, self.rows)
        if at < len(self._plan):
            self._unit = self._plan[at].total
            self.shares = {name: self._plan[at].rows.get(name, 0) for name in self.streams}
        else:
            self._unit, self.shares = _UNIT, dict(self._after)

    def choose(self, rows: Sequence[RowRef] | None) -> None:
        """Take these rows, of any place and epoch, before going on in order. Replaces an earlier choice."""
        self._chosen, self._chosen_at = rows, 0

    def draw(self, count: int) -> list[RowRef]:
        """The next ``count`` rows in order, to choose from: passed over, but not counted as taken."""
        rows = self._take(count)
        self.rows -= count
        return rows

    def take(self, count: int) -> list[RowRef]:
        """The next ``count`` rows."""
        if self._chosen is not None and self._chosen_at < len(self._chosen):
            out = list(self._chosen[self._chosen_at : self._chosen_at + count])
            self._chosen_at += len(out)
            self.rows += len(out)
            return out + self.take(count - len(out)) if len(out) < count else out
        out = []
        while self._bounds and count:
            left = next((b for b in self._bounds if b > self.rows), self.rows + count) - self.rows
            part = min(left, count)
            out += self._take(part)
            count -= part
            self._enter_segment()
        return out + self._take(count)

    def _take(self, count: int) -> list[RowRef]:
        out: list[RowRef] = []
        sizes: dict[str, int] = {}
        for _ in range(count):
            name = self._next_stream()
            place = self._places[name]
            if name not in sizes:
                sizes[name] = self.streams[name].num_rows(place["epoch"])
            if place["row"] >= sizes[name]:
                place["epoch"], place["row"] = place["epoch"] + 1, 0
                sizes[name] = self.streams[name].num_rows(place["epoch"])
            out.append(RowRef(name, place["epoch"], place["row"]))
            place["row"] += 1
        self.rows += count
        return out

    def _next_stream(self) -> str:
        if len(self.streams) == 1:
            return next(iter(self.streams))
        best, soonest, most = "", math.inf, 0
        for name, share in self.shares.items():
            place = self._places[name]
            place["credit"] += share
            credit = place["credit"]
            if credit > 0:
                # Rows until the credit is one whole row. A share that has fallen to 0 only gets what it is still owed.
                deadline = -((credit - self._unit) // share) if share else math.inf
                if deadline < soonest or (deadline == soonest and credit > most):  # else the first by name
                    best, soonest, most = name, deadline, credit
        self._places[best]["credit"] -= self._unit
        return best

    def position(self) -> dict[str, Any]:
        """Plain JSON values: rows taken, and per source its epoch, the rows taken of it, and its credit."""
        place = {"rows": self.rows, "shares": dict(self.shares), "sources": {n: {**p} for n, p in self._places.items()}}
        return place if self._chosen is None else {**place, "chosen": self._chosen_at}

    def set_position(self, position: Mapping[str, Any]) -> None:
        """Go on from ``position``. Sources that it does not know begin; those that are no longer mixed keep their place
        for when they come back. After a change of shares credit is counted anew."""
        self.rows = int(position["rows"])
        self._chosen_at = int(position.get("chosen", 0))
        if self._plan:
            self._enter_segment()
        self._places = {name: {"epoch": 0, "row": 0, "credit": 0} for name in self.streams}
        self._places |= {name: {k: int(v) for k, v in p.items()} for name, p in position["sources"].items()}
        if dict(position["shares"]) != self.shares:
            for place in self._places.values():
                place["credit"] = 0

    def restart(self, name: str) -> None:
        """Let source ``name`` begin its next epoch."""
        self._places[name] = {"epoch": self._places[name]["epoch"] + 1, "row": 0, "credit": 0}

    @property
    def epoch(self) -> float:
        """Passes over the data so far; of several streams, the mean over their rows (some may have been seen more often
        than others)."""
        done = total = 0
        for name, stream in self.streams.items():
            place = self._places[name]
            size = stream.num_rows(place["epoch"])
            done += place["epoch"] * size + place["row"]
            total += size
        return done / total
