"""When a GPU comes to a place in its work: the host runs ahead of it, so its own clock says nothing of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DeviceTimes:
    """Marks in the stream at hand, read when all is over.

    event   makes something that takes times, with ``record()`` and ``elapsed_time(later)`` in milliseconds
    settle  waits for all marks
    holds   whether a collective of this tensor runs on the device
    """

    def __init__(self, event: Callable[[], Any], settle: Callable[[], None], holds: Callable[[Tensor], bool]):
        self.event, self.settle, self.holds = event, settle, holds
        self._first: Any = None
        self._pending: list[tuple[Any, str, Any]] = []
        self._offset = 0.0

    def begin(self, now: Callable[[], float]) -> None:
        """From here on; the device has nothing to do, so that its time is the host's."""
        if self._first is None:
            self.settle()
            self._first = self.mark()
            self._offset = now()

    def mark(self) -> Any:
        found = self.event()
        found.record()
        return found

    def note(self, owner: Any, name: str, mark: Any = None) -> None:
        """``owner.name`` is to be the time of ``mark``, or of one made here."""
        self._pending.append((owner, name, self.mark() if mark is None else mark))

    def read(self) -> None:
        """Waits for the device."""
        if not self._pending:
            return
        self.settle()
        pending, self._pending = self._pending, []
        for owner, name, mark in pending:
            setattr(owner, name, self._offset + self._first.elapsed_time(mark) / 1e3)


def device_times() -> DeviceTimes | None:
    """Of this process's GPU; None where it uses none."""
    if not torch.cuda.is_initialized():
        return None
    return DeviceTimes(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.synchronize, lambda x: x.is_cuda)
