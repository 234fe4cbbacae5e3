"""torchrun's elastic agent, told what our workers say: what is worth starting again, with how many, and what to report.

The agent itself (torch) watches the workers of one machine, ends the others when one fails, and meets the agents of
other machines to start again. Here it learns to

- leave alone what another start would not mend: a wrong recipe, a monitor's stop, an interrupt;
- name the rank that died, and not those that lost it;
- go on with fewer workers where that was allowed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

_PATIENCE = 30  # seconds that the agent gives workers between SIGTERM and SIGKILL
_CAUSE = "trainwright/cause"  # key in the machines' common store, one per start
_NOT_OURS = "a rank on another machine was lost"


class Agent(LocalElasticAgent):
    """The agent of one machine.

    folder       where workers leave what they have to say (:func:`reports`)
    min_workers  go on with as few as this after a failure; the number at the start: never fewer
    legal        whether the recipe can run on that many workers of this machine
    interrupted  whether the user has asked to end: then nothing is started again
    say          gets one line for each start after the first
    """

    def __init__(
        self,
        spec: WorkerSpec,
        folder: Path,
        *,
        min_workers: int,
        legal: Callable[[int], bool],
        interrupted: Callable[[], bool],
        say: Callable[[str], None],
    ):
        super().__init__(spec, DefaultLogsSpecs())
        self._folder, self._min_workers, self._legal = folder, min_workers, legal
        self._interrupted, self._say = interrupted, say
        self.cause = ""  # of the last failure
        self.started_again = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._judge(worker_group, result.failures)
        elif result.state == WorkerState.SUCCEEDED and self._stopped_for_others(worker_group):
            # The loop of the agent sees by itself that machines wait, and starts again with them.
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        failed = worker_group.state == WorkerState.FAILED
        self._stop_workers(worker_group)
        for path in self._folder.glob("rank-*.json"):
            path.unlink()
        if not failed:
            self._say("machines join or leave; starting again from the last checkpoint")
        self.started_again += 1
        super()._restart_workers(worker_group)

    def _stopped_for_others(self, worker_group: WorkerGroup) -> bool:
        """Whether the workers ended because another machine's agent asked its own to, to let a machine join."""
        if self._interrupted() or not any(said["code"] == 130 for said in reports(self._folder).values()):
            return False
        return bool(worker_group.spec.rdzv_handler.num_nodes_waiting() > 0)

    def _judge(self, worker_group: WorkerGroup, failures: Mapping[int, Any]) -> None:
        """Whether and with how many workers to start again after ``failures`` (by global rank)."""
        said = reports(self._folder)
        here = [worker.global_rank for worker in worker_group.workers]
        lost = {rank for rank, report in said.items() if report.get("lost")}
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        guilty = causes({r: (f.exitcode, f.timestamp) for r, f in failures.items()}, lost, here)
        cause = ", ".join(f"rank {rank} {what}" for rank, what in guilty.items())
        self.cause = (
            self._share(worker_group, cause)
            or next((said[rank]["message"] for rank in sorted(lost)), "")
            or unclear(codes)
        )
        if self._interrupted() or len(lost) < len(said):
            self._remaining_restarts = 0
        if self._remaining_restarts == 0:
            return
        spec = worker_group.spec
        workers = self._workers_left(spec.local_world_size, len(guilty))
        if workers < spec.local_world_size:
            _leave_out_devices([rank - here[0] for rank in guilty])
            spec.local_world_size = workers
        left = self._remaining_restarts - 1
        self._say(
            f"{self.cause}; starting again from the last checkpoint with {workers} "
            f"process{'' if workers == 1 else 'es'} here ({left} restart{'' if left == 1 else 's'} left)"
        )

    def _workers_left(self, workers: int, failed: int) -> int:
        fewest = max(self._min_workers, 1)
        return next((n for n in range(max(workers - failed, fewest), fewest - 1, -1) if self._legal(n)), workers)

    def _share(self, worker_group: WorkerGroup, cause: str) -> str:
        """The machine on which a rank died says so to the others, which only lost it."""
        if worker_group.group_world_size in (None, 1):
            return cause
        try:
            if cause:
                worker_group.store.set(_CAUSE, cause)  # type: ignore[union-attr]
                return cause
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                if worker_group.store.check([_CAUSE]):  # type: ignore[union-attr]
                    return worker_group.store.get(_CAUSE).decode()  # type: ignore[union-attr]
                time.sleep(0.1)
        except RuntimeError:  # the machine that holds the store is gone
            pass
        return cause or _NOT_OURS


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    """What the workers left, by rank: ``{"code": ..., "message": ..., "lost": ...}``."""
    return {int(p.stem.removeprefix("rank-")): json.loads(p.read_text("utf-8")) for p in folder.glob("rank-*.json")}


def causes(failures: Mapping[int, tuple[int, float]], lost: set[int], here: list[int]) -> dict[int, str]:
    """The ranks that are to blame, with what happened to each.

    failures  exit code and time of the workers that ended with one other than 0; below 0 it is a signal's number
    lost      ranks that said that they had lost the others
    here      the ranks of this machine

    Killed ones come first, then those that failed by themselves, then those that neither failed nor lost the others:
    they did not answer. SIGABRT is NCCL's way out of a collective that does not end: who ended so has waited. All who
    wait end so at about the same time, so where they are fewer than the silent ones it means something else. Empty
    where that leaves it open, and where all ranks here lost one that is elsewhere.
    """
    first = min((at for _, at in failures.values()), default=0.0)
    # What the agent ends itself does not count: SIGTERM at once, SIGKILL when its patience is at an end.
    own = {
        rank: code
        for rank, (code, at) in sorted(failures.items())
        if code != -signal.SIGTERM and not (code == -signal.SIGKILL and at - first >= _PATIENCE - 1)
    }
    killed = {rank: code for rank, code in own.items() if code < 0 and code != -signal.SIGABRT}
    failed = {rank: code for rank, code in own.items() if code > 0 and rank not in lost}
    for group in (killed, failed):
        if group:
            return {rank: how(code) for rank, code in group.items()}
    waited = lost | {rank for rank, code in own.items() if code == -signal.SIGABRT}
    if not waited:
        return {rank: how(code) for rank, (code, _) in sorted(failures.items())}
    silent = [rank for rank in here if rank not in waited]
    return dict.fromkeys(silent, "did not answer") if lost or len(silent) <= len(waited) else {}


def unclear(codes: Mapping[int, int]) -> str:
    """What is to be said where :func:`causes` finds nobody, from the exit codes of the failed workers."""
    aborted = sorted(rank for rank, code in codes.items() if code == -signal.SIGABRT)
    if not aborted:
        return "the cause is not known"
    ranks = f"rank{'' if len(aborted) == 1 else 's'} {', '.join(map(str, aborted))}"
    return f"{ranks} ended by SIGABRT, and which rank is the cause is not known"


def how(code: int) -> str:
    """What an exit code says of a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _leave_out_devices(failed: list[int]) -> None:
    """The workers of the next start do not get the GPUs of those that failed."""
    import torch

    if not torch.cuda.is_available():
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(remaining(devices, failed))


def remaining(devices: list[str], failed: list[int]) -> list[str]:
    """``devices`` without those at the places ``failed``."""
    return [device for place, device in enumerate(devices) if place not in failed]
