"""SIGINT and SIGTERM: remembered until the step at hand is done, or an end at once before the first one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
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


class EndedByTerm:
    """While entered, SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

    Handlers run between two lines of Python. Where the main thread is inside a long call (training a tokenizer), and
    so has not left this block ``grace`` seconds after the signal, ``leave`` is called from another thread; it should
    say why and end the process.
    """

    def __init__(self, leave: Callable[[], object], grace: float = 3.0):
        self.leave, self.grace = leave, grace
        self._left = threading.Event()
        self._old: Any = None
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> EndedByTerm:
        try:
            self._old = signal.signal(signal.SIGTERM, self._raise)
        except ValueError:  # not in the main thread: the embedding program keeps its own handling
            return self
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # The system's part of a handler writes the signal's number here at once, whatever Python is doing.
        self._old_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(self._pipe[0],), name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._old is None else self._old)
        os.close(self._pipe[1])
        self._thread.join()
        os.close(self._pipe[0])

    def _raise(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def _watch(self, end: int) -> None:
        while number := os.read(end, 1):
            if number[0] == signal.SIGTERM and not self._left.wait(self.grace):
                self.leave()
