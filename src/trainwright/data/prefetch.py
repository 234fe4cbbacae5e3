"""Making things ahead in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls ``make`` in a thread, at most ``depth`` results ahead of :meth:`get`, and hands the results out in order.

    What ``make`` raises is raised by :meth:`get` in its turn, and again by each later call; the thread has ended then.
    """

    def __init__(self, make: Callable[[], T], depth: int):
        if depth < 1:
            raise ValueError(f"depth={depth}: should be at least 1")
        self._make, self._depth = make, depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="trainwright-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    return
            try:
                item = self._make()
            except BaseException as error:  # whatever it is, it belongs to the one who waits for the item
                with self._change:
                    self._error = error
                    self._change.notify_all()
                return
            with self._change:
                self._ready.append(item)
                self._change.notify_all()

    def get(self) -> T:
        """The next result; waits for it. Raises RuntimeError after :meth:`close`."""
        with self._change:
            self._change.wait_for(lambda: self._ready or self._error is not None or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if self._ready:
                item = self._ready.popleft()
                self._change.notify_all()
                return item
            if self._error is None:
                raise RuntimeError("the prefetcher has neither a result nor an error")
            raise self._error

    def close(self) -> None:
        """End the thread and drop what was made ahead. Waits for a result that is being made."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
