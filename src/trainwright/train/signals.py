"""SIGINT and SIGTERM, remembered until the step at hand is done."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopSignals:
    """While entered, ``seen`` is the number of the first signal that asked the run to stop, or None.

    A second Ctrl-C raises KeyboardInterrupt: it does not wait for the step.
    """

    def __init__(self) -> None:
        self.seen: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._remember)
            except ValueError:  # not in the main thread: the embedding program keeps its own handling
                break
        return self

    def __exit__(self, *exc: object) -> None:
        while self._old:
            signal.signal(*self._old.popitem())

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.seen is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.seen = number
