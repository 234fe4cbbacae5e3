"""What happens to rows that cannot be used: refused at the first, or counted, sampled and skipped up to a limit."""

from __future__ import annotations

import math
from typing import Literal

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.statistics import Sample, Statistics

ENOUGH_ROWS = 1000  # before that a share says nothing


class BadRows:
    """A policy and its count, for one reading.

    on_bad: ``refuse`` raises DataError at the first bad row, ``skip`` goes on. limit: how many may be skipped, as a
    whole number, or as a share of all rows below 1, judged after every row from the thousandth on and at the end.
    """

    def __init__(self, on_bad: Literal["refuse", "skip"] = "refuse", limit: float = 0.01):
        if on_bad not in ("refuse", "skip"):
            raise ConfigError("should be refuse or skip", key="on_bad", value=on_bad)
        if not limit >= 0 or (1 <= limit < math.inf and limit != int(limit)):
            raise ConfigError("should be a whole number of rows, or a share below 1", key="max_bad", value=limit)
        self.on_bad, self.limit = on_bad, limit
        self.rows = self.bad = 0
        self._last = ""

    def start(self, statistics: Statistics) -> None:
        self.rows = self.bad = 0
        self._statistics = statistics

    def good(self) -> None:
        self.rows += 1

    def found(self, error: DataError, where: str, reason: str, row: str = "") -> None:
        """A bad row. Raises the error, or a DataError where it is one too many."""
        self.rows += 1
        self.bad += 1
        if self.on_bad == "refuse":
            raise DataError(
                f"{error} (to skip and count such rows: --on-bad skip, or bad_rows=BadRows('skip'))"
            ) from None
        self._last = str(error)
        self._statistics.counts["bad rows"] += 1
        self._statistics.counts[f"bad rows: {reason}"] += 1
        self._statistics.drop_sample(f"bad rows: {reason}", Sample(where, "", row, self._last))
        if self.limit >= 1 or self.limit == 0:
            if self.bad > self.limit:
                self._stop(f"{self.bad} bad rows")
        elif self.rows >= ENOUGH_ROWS:
            self._judge_share()

    def end(self) -> None:
        if self.bad and 0 < self.limit < 1:
            self._judge_share()

    def _judge_share(self) -> None:
        if self.bad > self.limit * self.rows:
            self._stop(f"{self.bad} of {self.rows} rows are bad ({self.bad / self.rows:.1%})")

    def _stop(self, what: str) -> None:
        raise DataError(f"{what}, more than the limit max_bad={self.limit}; the last one: {self._last}") from None
