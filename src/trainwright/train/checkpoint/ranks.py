"""Agreement between ranks: collectives on a group of our own that carry errors.

A rank that fails must not leave the others waiting, so every step that may fail runs inside one of these, and
where one rank fails all raise: the failing rank its own error, the others a CheckpointError that quotes it.
The group is gloo over host memory, whatever the training uses, so that a background thread can talk while the
main thread runs its own collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainwright.core import distributed
from trainwright.core.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class _Failure:
    rank: int
    message: str


class Ranks:
    """All ranks of the job; rank 0 leads. Creating it is a collective. Without a process group: one rank."""

    def __init__(self) -> None:
        self.rank, self.world = distributed.rank(), distributed.world_size()
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if self.world > 1 else None

    @classmethod
    def alone(cls) -> Ranks:
        """One rank, whatever process group there is; no collective."""
        ranks = cls.__new__(cls)
        ranks.rank, ranks.world, ranks.group = 0, 1, None
        return ranks

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def each(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank; the results of all, by rank."""
        if self.world == 1:
            return [work()]
        result, error = self._try(work)
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, result, group=self.group)
        self._raise(out, error)
        return out

    def lead(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; its result on every rank."""
        if self.world == 1:
            return work()
        result, error = self._try(work) if self.leads else (None, None)
        box = [result]
        dist.broadcast_object_list(box, src=0, group=self.group)
        self._raise(box, error)
        return box[0]  # type: ignore[return-value]

    def deal(self, work: Callable[[], T], share: Callable[[list[T]], list[R]]) -> R:
        """Run ``work`` on every rank, ``share`` on rank 0 over all results; each rank gets its entry."""
        if self.world == 1:
            return share([work()])[0]
        result, error = self._try(work)
        gathered: list[Any] | None = [None] * self.world if self.leads else None
        dist.gather_object(result, gathered, dst=0, group=self.group)
        dealt: list[Any] | None = None
        if gathered is not None:
            failures = [g for g in gathered if isinstance(g, _Failure)]
            if failures:
                dealt = [failures[0]] * self.world
            else:
                shared, error = self._try(lambda: share(gathered))
                dealt = [shared] * self.world if isinstance(shared, _Failure) else shared
        box: list[Any] = [None]
        dist.scatter_object_list(box, dealt, src=0, group=self.group)
        self._raise(box, error)
        return box[0]

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        if self.world == 1:
            return yes
        flag = torch.tensor(int(yes))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag)

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def _try(self, work: Callable[[], T]) -> tuple[T | _Failure, Exception | None]:
        try:
            return work(), None
        except Exception as error:
            return _Failure(self.rank, str(error) or type(error).__name__), error

    @staticmethod
    def _raise(results: list[Any], own: Exception | None) -> None:
        if own is not None:
            raise own
        for failure in results:
            if isinstance(failure, _Failure):
                raise CheckpointError(f"rank {failure.rank}: {failure.message}")
