"""Several processes on this machine from one command, through torchrun's elastic launcher.

The workers run ``python -m trainwright ...`` with the same arguments. What ends them in an orderly way (a wrong recipe,
a monitor's stop, an interrupt) they write into a folder given by the launcher, which says it once and exits with the
same code. Several machines, or a cluster's own launcher: ``torchrun -m trainwright ...`` needs nothing from here.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_DIR = "TRAINWRIGHT_EXIT_DIR"
_TOGETHER = (
    3,
    130,
)  # ends that all ranks reach together; a failure code would have the others killed in their last save
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: the exit code and what the workers had to say."""

    code: int
    messages: tuple[str, ...] = ()


def launched() -> bool:
    """Whether this process is a worker of :func:`launch`."""
    return EXIT_DIR in os.environ


def report_exit(code: int, message: str) -> int:
    """In a worker: leave ``code`` and ``message`` for the launcher. Returns the code to exit with."""
    path = Path(os.environ[EXIT_DIR]) / f"rank-{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps({"code": code, "message": message}), "utf-8")
    return 0 if code in _TOGETHER else code


def follow_launcher() -> None:
    """In a worker: get SIGTERM when the launcher dies, so that no worker goes on alone in a run's folder (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def launch(nproc: int, arguments: list[str], module: str = "trainwright") -> Outcome:
    """Run ``python -m trainwright *arguments`` in ``nproc`` processes and wait for them.

    SIGINT and SIGTERM are handed on to the workers, which finish their step, save and end; nothing is restarted.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher's own account of a failed worker repeats what the worker said.
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "15")
    with tempfile.TemporaryDirectory(prefix="trainwright-") as folder:
        os.environ[EXIT_DIR] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
        )
        ended: list[BaseException | None] = []

        def run() -> None:
            try:
                elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
                ended.append(None)
            except BaseException as error:  # carried over to the waiting thread
                ended.append(error)

        # In a thread of its own the launcher leaves the signals to us: it would give the workers 30 seconds and
        # then kill them, in the middle of a save if need be.
        thread = threading.Thread(target=run, name="elastic-launcher", daemon=True)
        signalled: list[int] = []
        old = _forward_signals(signalled)
        try:
            thread.start()
            while thread.is_alive():
                thread.join(0.2)
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            del os.environ[EXIT_DIR]
        error = ended[0]
        if error is not None and not isinstance(error, ChildFailedError):
            raise error
        return _outcome(Path(folder), error, bool(signalled))


def _cores() -> int:
    from trainwright.core.hardware import cores

    return cores()


def _forward_signals(seen: list[int]) -> dict[int, Any]:
    import psutil

    def forward(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        for worker in psutil.Process().children():
            try:
                worker.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}


def _outcome(folder: Path, error: Any, signalled: bool) -> Outcome:
    """The code and messages that the workers left; their own failures where they left none."""
    said = [json.loads(p.read_text("utf-8")) for p in sorted(folder.glob("rank-*.json"))]
    if said:
        messages = tuple(dict.fromkeys(s["message"] for s in said if s["message"]))
        return Outcome(min(s["code"] for s in said), messages)
    if error is None:
        return Outcome(0)
    if signalled:
        return Outcome(130, ("interrupted before the first step; nothing is saved",))
    codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
    own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}  # the launcher ended the others so
    failures = [f"rank {rank} {_how(code)}" for rank, code in (own or codes).items()]
    return Outcome(1, (f"{', '.join(failures)}; the first failure above is the cause",))


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
