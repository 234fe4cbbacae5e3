"""One row of integers from every rank to every rank, and the name of the rank that does not answer."""

from __future__ import annotations

import itertools
import os
import time
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from trainwright.core.errors import ConfigError, TrainwrightError

_count = itertools.count()  # groups are made in the same order on all ranks, so this number names one of them


class RankLost(TrainwrightError):
    """Another rank ended, failed or did not come to an exchange in time."""


class Exchange(Protocol):
    """What ranks need to agree on a round."""

    rank: int
    world_size: int

    def __call__(self, row: np.ndarray) -> np.ndarray:
        """int64 ``[n]`` of each rank, as ``[world_size, n]``. All ranks pass the same n."""


class Alone:
    """The exchange of one process."""

    rank, world_size = 0, 1

    def __call__(self, row: np.ndarray) -> np.ndarray:
        return row[None]


class GlooExchange:
    """An all-gather on the CPU, over a gloo group of its own, so that it never mixes with the training's collectives.

    group     a gloo group; None makes one of all ranks, which all of them must do at the same place
    timeout   seconds to wait for a rank: it may be reading slow data

    Raises ConfigError without a process group, or when the group is not gloo. A call raises RankLost, at the latest
    after ``timeout``, and names the ranks that did not come.
    """

    GRACE = 2.0  # seconds that ranks behind the others have to report before they count as lost

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600.0):
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "ranks have to agree on their steps but there is no process group; call "
                "torch.distributed.init_process_group first, or pass group=None for a process that trains alone",
                key="group",
            )
        if timeout <= 0:
            raise ConfigError("should be above 0 seconds", key="timeout", value=timeout)
        if group is None:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        elif dist.get_backend(group) != "gloo":
            raise ConfigError(
                "the exchange runs on the CPU and needs a gloo group; leave it out to have one made",
                key="group",
                value=dist.get_backend(group),
            )
        self.group, self.timeout = group, timeout
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        name = f"trainwright-odb/{next(_count)}/{'-'.join(map(str, self._ranks[:1] + self._ranks[-1:]))}"
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._calls = 0

    def __call__(self, row: np.ndarray) -> np.ndarray:
        local = torch.from_numpy(np.ascontiguousarray(row, dtype=np.int64))
        everyone = torch.empty(self.world_size * len(local), dtype=torch.int64)
        self._calls += 1
        try:
            # So that those who are left can say who did not come.
            self._store.set(str(self.rank), str(self._calls))
            dist.all_gather_into_tensor(everyone, local, group=self.group)
        except RuntimeError as error:
            raise RankLost(self._who(error)) from error
        return everyone.view(self.world_size, -1).numpy()

    def _who(self, error: RuntimeError) -> str:
        missing = [r for r in range(self.world_size) if r != self.rank]
        until = time.monotonic() + self.GRACE
        while missing and time.monotonic() < until:
            try:
                missing = [r for r in missing if not self._came(r)]
            except RuntimeError:  # the store went down with the process that holds it
                return (
                    "rank 0, or the process that holds the ranks' store, ended during the exchange of lengths; see its "
                    f"own output ({error})"
                )
            time.sleep(0.05)
        if not missing:
            return f"a rank ended during the exchange of lengths; see the output of the others ({error})"
        names = ", ".join(str(self._ranks[r]) for r in missing)
        ranks = f"rank {names}" if len(missing) == 1 else f"ranks {names}"
        return (
            f"{ranks} did not come to exchange {self._calls} of lengths: ended, failed, or busy for longer than "
            f"{self.timeout:g} s; see the output there ({error})"
        )

    def _came(self, rank: int) -> bool:
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._calls


def default_exchange(timeout: float = 600.0) -> Exchange:
    """Over all ranks where there is a process group or torchrun announced several; else alone."""
    if dist.is_available() and dist.is_initialized():
        return GlooExchange(None, timeout) if dist.get_world_size() > 1 else Alone()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return GlooExchange(None, timeout)  # says what is missing
    return Alone()
