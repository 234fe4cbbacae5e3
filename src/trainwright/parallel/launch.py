"""Several processes from one command, here or on several machines, through torchrun's elastic agent.

The workers run ``python -m trainwright ...`` with the same arguments. What ends them in an orderly way (a wrong recipe,
a monitor's stop, an interrupt) they write into a folder given by the launcher, which says it once and exits with the
same code. A worker that dies ends the others; then all start again, if restarts are left, and go on from the newest
whole checkpoint (:func:`trainwright.train.run_dir.goes_on`). A cluster's own launcher, ``torchrun -m trainwright ...``,
needs nothing from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from trainwright.core.errors import CheckpointError, ConfigError

EXIT_DIR = "TRAINWRIGHT_EXIT_DIR"
_TOGETHER = (
    3,
    130,
)  # ends that all ranks reach together; a failure code would have the others killed in their last save
_PR_SET_PDEATHSIG = 1
_SECONDS_TO_END = 5.0  # after an interrupt, for a launcher that waits for other machines
_SECONDS_TO_KILL = 30.0  # after a second interrupt, for workers that do not end
# What gloo, NCCL and the store say when another rank is gone. They have no error class of their own.
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timed out after",
    "timeout caused pair closure",
    "socket timeout",
    "socketstartconnect",
    "remote process exited",
    "failed to recv",
    "watchdog caught collective operation timeout",
)


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: the exit code and what the workers had to say."""

    code: int
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machines:
    """Several machines that start together: the same values on each of them.

    ``fewest`` are enough to start, and to go on when others are lost; up to ``most`` may join. ``endpoint`` is the
    HOST:PORT of the one where all meet; ``job`` names the job, so that two do not mix.
    """

    fewest: int
    most: int
    endpoint: str
    job: str


def launched() -> bool:
    """Whether this process is a worker of :func:`launch`."""
    return EXIT_DIR in os.environ


def report_exit(code: int, message: str, lost: bool = False) -> int:
    """In a worker: leave ``code`` and ``message`` for the launcher. Returns the code to exit with.

    lost  it ends because another rank did; the launcher looks for that one
    """
    path = Path(os.environ[EXIT_DIR]) / f"rank-{os.environ.get('RANK', '0')}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"code": code, "message": message, "lost": lost}), "utf-8")
    os.replace(temporary, path)
    return 0 if code in _TOGETHER else code


def lost_another(error: BaseException | None) -> str:
    """What ``error``, or one that it came from, says of a lost rank; empty if it is about something else."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error)
        if isinstance(error, RuntimeError | CheckpointError) and any(mark in text.lower() for mark in _LOST):
            return text.strip().splitlines()[0]
        error = error.__cause__ or error.__context__
    return ""


def leave_after_loss(reason: str) -> NoReturn:
    """End this process at once: what it still holds open waits for a rank that is gone."""
    rank = os.environ.get("RANK", "0")
    message = f"rank {rank} lost the connection to another rank ({reason})"
    if launched():
        report_exit(1, message, lost=True)
    else:
        print(f"error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def follow_launcher() -> None:
    """In a worker: get SIGTERM when the launcher dies, so that no worker goes on alone in a run's folder (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def launch(
    nproc: int,
    arguments: list[str],
    module: str = "trainwright",
    *,
    min_nproc: int | None = None,
    machines: Machines | None = None,
    restarts: int = 0,
    legal: Callable[[int], bool] = lambda workers: True,
    say: Callable[[str], None] = print,
    patience: float = 1260.0,
    **waits: int,
) -> Outcome:
    """Run ``python -m trainwright *arguments`` in ``nproc`` processes and wait for them.

    min_nproc  after a failure go on with those that are left, with no fewer than this; None: always ``nproc``
    machines   the other machines of the job; None: this one alone
    restarts   failures after which all processes start again
    legal      whether so many processes here can share the work
    say        gets a line when processes start again
    patience   seconds after the first SIGINT or SIGTERM until workers that are left get SIGKILL: enough for the others
               to notice one that hangs, and for a save
    waits      of the rendezvous (torch's names): ``timeout``, ``last_call_timeout``, ``keep_alive_interval``, ...

    SIGINT and SIGTERM are handed on to the workers, which finish their step, save and end; nothing is started again.
    After a second one they have 30 seconds.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as rendezvous

    # The launcher's own account of a failed worker repeats what the worker said.
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // nproc)))
    # A store shared by all starts would give the second one the addresses of the first (pytorch issue 135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with tempfile.TemporaryDirectory(prefix="trainwright-") as name:
        folder = Path(name)
        os.environ[EXIT_DIR] = name
        place = machines or Machines(1, 1, "localhost:0", folder.name)
        ended: list[Any] = []
        agents: list[Any] = []
        signalled: list[float] = []
        killed: set[int] = set()

        def run() -> None:
            from trainwright.parallel.elastic import Agent

            try:
                parameters = RendezvousParameters(
                    backend="c10d",
                    endpoint=place.endpoint,
                    run_id=place.job,
                    min_nodes=place.fewest,
                    max_nodes=place.most,
                    local_addr=None if machines else "127.0.0.1",
                    **{"timeout": 900, **waits},
                )
                spec = WorkerSpec(
                    role="trainer",
                    local_world_size=nproc,
                    entrypoint=sys.executable,
                    args=("-u", "-m", module, *arguments),
                    rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
                    max_restarts=restarts,
                    local_addr=None if machines else "127.0.0.1",
                )
                agent = Agent(
                    spec,
                    folder,
                    min_workers=min_nproc or nproc,
                    legal=legal,
                    interrupted=lambda: bool(signalled),
                    say=say,
                )
                agents.append(agent)
                try:
                    ended.append(agent.run())
                finally:
                    spec.rdzv_handler.shutdown()
            except BaseException as error:  # carried over to the waiting thread
                ended.append(error)

        # In a thread of its own the agent leaves the signals to us: it would give the workers 30 seconds and
        # then kill them, in the middle of a save if need be.
        thread = threading.Thread(target=run, name="elastic-agent", daemon=True)
        old = _forward_signals(signalled)
        try:
            thread.start()
            while thread.is_alive() and not _waits_in_vain(signalled):
                thread.join(0.2)
                if _too_long(signalled, patience):
                    killed |= _kill_workers()
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            del os.environ[EXIT_DIR]
        result, agent = ended[0] if ended else None, agents[0] if agents else None
        return _outcome(folder, result, agent, place, bool(signalled), bool(killed))


def _cores() -> int:
    from trainwright.core.hardware import cores

    return cores()


def _waits_in_vain(signalled: list[float]) -> bool:
    """Whether the user has asked to end and no worker is left that could still be saving."""
    import psutil

    if not signalled or time.monotonic() - signalled[0] < _SECONDS_TO_END:
        return False
    return not psutil.Process().children()


def _too_long(signalled: list[float], patience: float) -> bool:
    """Whether workers have had the time they get to end in."""
    now = time.monotonic()
    return bool(signalled) and (
        now - signalled[0] > patience or (len(signalled) > 1 and now - signalled[1] > min(_SECONDS_TO_KILL, patience))
    )


def _kill_workers() -> set[int]:
    """SIGKILL, which also ends a stopped process; the ids of those that were left."""
    import psutil

    left = set()
    for worker in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if worker.status() != psutil.STATUS_ZOMBIE:
                worker.kill()
                left.add(worker.pid)
    return left


def _forward_signals(seen: list[float]) -> dict[int, Any]:
    import psutil

    def forward(number: int, frame: FrameType | None) -> None:
        seen.append(time.monotonic())
        for worker in psutil.Process().children():
            try:
                worker.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}


def _outcome(folder: Path, ended: Any, agent: Any, place: Machines, signalled: bool, killed: bool) -> Outcome:
    """The code and messages that the workers left; their own failures where they left none.

    killed  workers did not end after an interrupt
    """
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.rendezvous import api

    from trainwright.parallel.elastic import reports

    found = reports(folder)
    said = [report for _, report in sorted(found.items()) if not report.get("lost")]
    if said:
        messages = tuple(dict.fromkeys(s["message"] for s in said if s["message"]))
        return Outcome(min(s["code"] for s in said), messages)
    finished = not ended.is_failed() if isinstance(ended, RunResult) else ended is None and not signalled
    if finished:
        return Outcome(0)
    if signalled and (killed or found):
        why = "workers did not end and were killed" if killed else agent.cause
        return Outcome(130, (f"interrupted, and {why}; what came after the last checkpoint is not saved",))
    if signalled:
        return Outcome(130, ("interrupted before the first step; nothing is saved",))
    if isinstance(ended, api.RendezvousClosedError):
        cause = f"{agent.cause}; " if agent is not None and agent.cause else ""
        return Outcome(1, (f"{cause}another machine has ended the job {place.job}; its own message says why",))
    if isinstance(ended, api.RendezvousTimeoutError):
        return Outcome(1, (f"fewer than {place.fewest} machines met at {place.endpoint} for the job {place.job}",))
    if isinstance(ended, api.RendezvousConnectionError):
        raise ConfigError(
            "no machine answers there; start the command on that machine too, and let the port through",
            key="--rdzv",
            value=place.endpoint,
        ) from ended
    if isinstance(ended, BaseException):
        raise ended
    if agent.started_again:
        times = f"{agent.started_again} time{'' if agent.started_again == 1 else 's'}"
        return Outcome(1, (f"{agent.cause}; started again {times}, and no restart is left (--restarts)",))
    return Outcome(1, (f"{agent.cause}; the first failure above is the cause",))
