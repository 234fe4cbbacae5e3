"""Which row comes next: one stream of rows after the other's, in fixed shares, with a place that fits into JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainwright.core.errors import ConfigError
from trainwright.data.rows import RowStream

_UNIT = 1 << 32  # shares are whole multiples of 1 / _UNIT, so that the schedule is exact


class RowRef(NamedTuple):
    """Row ``row`` of epoch ``epoch`` of stream ``stream``."""

    stream: str
    epoch: int
    row: int


class Mixture:
    """The global order of rows over named streams.

    With ``weights`` every row adds its share to each stream's credit, and the stream that gives the row pays one. Of
    those with credit, the one gives it whose credit would be the first to reach one whole row. After any number of
    rows each stream has then given its exact share to within one row (earliest deadline first: Baruah et al.,
    Proportionate progress, Algorithmica 15, 1996), so every batch has nearly the same composition. Each stream goes
    through epochs of its own. A single stream needs no weights.

    Raises ConfigError for weights that are negative, not finite, all zero, or not one for each stream.
    """

    def __init__(self, streams: Mapping[str, RowStream], weights: Mapping[str, float] | None = None):
        self.streams = {name: streams[name] for name in sorted(streams)}
        if weights is None and len(streams) != 1:
            raise ValueError("several streams need weights")
        weights = dict.fromkeys(streams, 1.0) if weights is None else weights
        if set(weights) != set(streams):
            raise ConfigError(
                f"name {sorted(weights)} but the sources are {sorted(streams)}; give each source a weight",
                key="weights",
            )
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError("should be a finite number, at least 0", key=f"weights.{name}", value=weight)
        total = math.fsum(weights.values())
        if total <= 0:
            raise ConfigError("sum to zero; give at least one source a positive weight", key="weights")
        self.shares = {name: round(weights[name] / total * _UNIT) for name in self.streams}
        self.shares[max(self.shares, key=lambda n: self.shares[n])] += _UNIT - sum(self.shares.values())
        self.rows = 0  # rows taken in all
        self._places: dict[str, dict[str, int]] = {name: {"epoch": 0, "row": 0, "credit": 0} for name in streams}

    def take(self, count: int) -> list[RowRef]:
        """The next ``count`` rows."""
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
                deadline = -((credit - _UNIT) // share)  # rows until the credit is one whole row
                if deadline < soonest or (deadline == soonest and credit > most):  # else the first by name
                    best, soonest, most = name, deadline, credit
        self._places[best]["credit"] -= _UNIT
        return best

    def position(self) -> dict[str, Any]:
        """Plain JSON values: rows taken, and per source its epoch, the rows taken of it, and its credit."""
        return {"rows": self.rows, "shares": dict(self.shares), "sources": {n: {**p} for n, p in self._places.items()}}

    def set_position(self, position: Mapping[str, Any]) -> None:
        """Go on from ``position``. Sources that it does not know begin; those that are no longer mixed keep their place
        for when they come back. After a change of shares credit is counted anew."""
        self.rows = int(position["rows"])
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
