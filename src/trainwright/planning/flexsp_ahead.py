"""FlexSP's plans on a process of their own, while the trainer is at the step before."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor

from trainwright.planning.flexsp import FlexSPPlanner, Plan

KEPT = 2  # plans made ahead: this step's and the next


def _nothing() -> None:
    pass


def _end_with_parent() -> None:
    """On the planning process: a rank that is killed cannot tell it to end."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


class PlanAhead:
    """Plans on another process while the current step trains: ``submit`` the next lengths, then take ``result``.

    executor  where to plan; None: one process of its own, started by the first ``submit``
    """

    def __init__(self, planner: FlexSPPlanner, executor: Executor | None = None):
        self.planner = planner
        self._executor = executor
        self._pending: dict[tuple[int, ...], Future[Plan]] = {}
        self._ready: Future[None] | None = None  # done when the process is there

    def submit(self, lengths: Sequence[int]) -> None:
        if self._executor is None:
            # Not forked: the training process has threads and perhaps a CUDA context.
            spawned = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(1, mp_context=spawned, initializer=_end_with_parent)
            self._ready = self._executor.submit(_nothing)
        key = tuple(lengths)
        # Put in anew where it is there: steps of equal lengths share a plan, and the oldest goes.
        waiting = self._pending.pop(key, None)
        try:
            self._pending[key] = waiting or self._executor.submit(self.planner.plan, key)
        except BrokenExecutor:  # its process was ended, for want of memory perhaps; the next call starts another
            self.close()
        for old in list(self._pending)[:-KEPT]:
            self._pending.pop(old).cancel()

    def result(self, lengths: Sequence[int]) -> Plan:
        """The plan of ``lengths``: the one under way, or made now. Raises what the planner raised."""
        waiting = self._pending.get(tuple(lengths))
        starting = self._ready is not None and not self._ready.done()  # takes seconds, once
        try:
            return self.planner.plan(lengths) if waiting is None or starting else waiting.result()
        except BrokenExecutor:
            self.close()
            return self.planner.plan(lengths)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = self._ready = None
            self._pending.clear()
