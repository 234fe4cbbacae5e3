"""A sandbox for untrusted Python: each program in a process of its own, without rights, under limits.

    with Sandbox(workers=4) as sandbox:
        result = sandbox.run("def f(x): return x + 1", calls=["f(1)"])     # result.values == ["2"]
        for result in sandbox.map(programs): ...                           # in order, in parallel

A worker is a small Python process with an empty environment. It forks one process for each program, which gives up
its rights and then runs it; the worker reads its output, and kills it when it ends, writes too much or has had its
time.

What holds with ``isolation="kernel"`` (the default; Linux on x86-64 or ARM64) is held by the kernel, whatever the
program does:

- seccomp: no process and no program is started (threads are allowed), no socket is opened, no signal reaches another
  process, no limit, right or owner is changed. What is not on the list of allowed calls is refused.
- Landlock, where the kernel has it (5.13): only the private folder is written, only Python's library is read. Without
  it nothing can be written at all, but reading is not confined beyond what the user may read.
- rlimits: address space, CPU seconds, size of a file, open files. The wall clock and the amount of output are watched.
- Where namespaces are allowed to the user (or bubblewrap is installed) the worker has an empty network and a process
  table of its own, and the private folder is a file system in memory of bounded size. Without them files have a
  bound each and none together. :meth:`Sandbox.guarantees` says what holds here.

What does not hold: faults of the kernel itself; names and sizes of files outside can be probed; CPU time of several
threads counts together; the time a program takes can be watched. And a program can lie about itself: it shares its
process with the tests, so one that is written to do so can make a test that calls it pass (objects that equal
everything, writing the answer itself). Compare ``values`` outside, where what is expected never enters the process.

``isolation="audit"`` is for other systems: rlimits and refusals by a Python audit hook. It stops mistakes, not a
program that means harm. ``isolation="none"`` is refused unless ``allow_unsandboxed=True``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import ConfigError
from trainwright.core.sandbox import _landlock, _seccomp
from trainwright.core.sandbox._worker import SandboxError, Worker, find_bubblewrap, readable

Isolation = Literal["kernel", "audit", "none"]
Status = Literal["ok", "error", "exit", "timeout", "cpu", "memory", "output", "crash", "lost"]
GRACE = 15.0  # seconds beyond a program's time after which a worker that does not answer is given up


@dataclass(frozen=True)
class Limits:
    """What one program may use. CPU time is counted in whole seconds, over all threads."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 5.0
    memory_bytes: int = 512 << 20  # address space, the interpreter's some 50 MB included
    output_bytes: int = 1 << 20  # each of stdout, stderr and the values
    file_bytes: int = 16 << 20  # one file
    disk_bytes: int = 64 << 20  # all files, where the private folder is a file system of its own

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError("should be above 0", key=f"limits.{name}", value=value)


@dataclass(frozen=True)
class Program:
    """``code`` is run, then ``tests`` one after another (statements), then ``calls`` (expressions), in one module."""

    code: str
    calls: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    stdin: str = ""
    limits: Limits | None = None  # None: the sandbox's


@dataclass(frozen=True)
class Result:
    """How a program ended.

    status: ok; error: it raised; exit: it left by itself before the end; timeout, cpu, memory, output: a limit; crash:
    a signal; lost: the worker died with it. ``values`` are the reprs of the calls, ``tests`` an error or None (passed)
    per test.
    """

    status: Status
    values: tuple[str, ...] = ()
    tests: tuple[str | None, ...] = ()
    error: str = ""
    error_type: str = ""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def passed(self) -> bool:
        """Ended well, with at least one test and none failed."""
        return self.ok and bool(self.tests) and not any(t is not None for t in self.tests)

    @property
    def timed_out(self) -> bool:
        return self.status in ("timeout", "cpu")

    @property
    def observed(self) -> tuple[Any, ...]:
        """What two runs of a deterministic program have in common."""
        return (self.status, self.values, self.tests, self.error, self.stdout)


class Sandbox:
    """A pool of workers; may be used from several threads.

    workers: programs at the same time. paths: further folders to import from (read only), for example one with
    packages. hash_seed: Python's, the same in every worker; :meth:`run_twice` uses the next one for its second run.
    bubblewrap: its program; None: the one on the PATH if it works, "" for none.

    Raises ConfigError for bad settings and where the isolation asked for cannot be had.
    """

    def __init__(
        self,
        workers: int = 1,
        limits: Limits | None = None,
        *,
        isolation: Isolation = "kernel",
        allow_unsandboxed: bool = False,
        paths: Sequence[str | Path] = (),
        hash_seed: int = 0,
        bubblewrap: str | None = None,
    ):
        if workers < 1:
            raise ConfigError("should be at least 1", key="workers", value=workers)
        if isolation not in ("kernel", "audit", "none"):
            raise ConfigError("should be kernel, audit or none", key="isolation", value=isolation)
        if isolation == "none" and not allow_unsandboxed:
            raise ConfigError(
                "would run unknown programs with your rights; use kernel (or audit), or say allow_unsandboxed=True on "
                "a machine that may be lost",
                key="isolation",
                value=isolation,
            )
        if os.name != "posix":
            raise ConfigError("the sandbox needs Linux or another POSIX system", key="isolation", value=isolation)
        if isolation == "kernel" and not _seccomp.supported():
            raise ConfigError(
                "needs seccomp, on Linux for x86-64 or ARM64; isolation=audit stops mistakes on this system, not a "
                "program that means harm",
                key="isolation",
                value=isolation,
            )
        self.limits, self.isolation, self.workers, self.hash_seed = limits or Limits(), isolation, workers, hash_seed
        self.paths = [str(Path(p).resolve()) for p in paths]
        self._bubblewrap = bubblewrap if bubblewrap is not None else find_bubblewrap(isolation)
        self._folder = tempfile.mkdtemp(prefix="sandbox-")
        self._idle: dict[int, queue.LifoQueue[Worker]] = {}
        self._slots: dict[int, threading.BoundedSemaphore] = {}
        self._all: list[Worker] = []
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._lost = 0
        self._closed = False

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """End the workers and remove their folder."""
        if self._closed:
            return
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, code: str | Program, calls: Sequence[str] = (), tests: Sequence[str] = (), stdin: str = "") -> Result:
        """Run one program, and wait for it."""
        program = code if isinstance(code, Program) else Program(code, tuple(calls), tuple(tests), stdin)
        return self._run(program, self.hash_seed)

    def run_twice(self, program: Program) -> tuple[Result, Result]:
        """Two runs. The second is in another worker with other hashes and addresses: where a program's answer depends
        on the order of a set, or on the default repr of an object, the two are not ``observed`` the same. What meets a
        time limit is not run again: the first result stands for both.
        """
        first = self._run(program, self.hash_seed)
        return first, first if first.timed_out else self._run(program, self.hash_seed + 1)

    def map(self, programs: Iterable[Program], twice: bool = False, hash_seed: int | None = None) -> Iterator[Any]:
        """``run`` (or ``run_twice``) over programs in parallel; results in their order, a bounded number under way.

        hash_seed: another one than the sandbox's, for a run that is held against an earlier one.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")
        seed = self.hash_seed if hash_seed is None else hash_seed
        function: Any = self.run_twice if twice else functools.partial(self._run, seed=seed)
        waiting: deque[Future[Any]] = deque()
        stream = iter(programs)
        try:
            for program in itertools.islice(stream, 4 * self.workers):
                waiting.append(self._threads.submit(function, program))
            while waiting:
                result = waiting.popleft().result()
                for program in itertools.islice(stream, 1):
                    waiting.append(self._threads.submit(function, program))
                yield result
        finally:
            for future in waiting:
                future.cancel()

    def guarantees(self) -> dict[str, str]:
        """What is held on this machine, and by what. Starts a worker to find out."""
        with self._worker(self.hash_seed) as worker:
            namespaces, bounded = worker.namespaces, worker.bounded
        if self.isolation == "none":
            return {"everything": "nothing is held but the wall clock and rlimits"}
        bounds = self.limits
        rest = {
            "memory": "unbounded on macOS" if sys.platform == "darwin" else f"{bounds.memory_bytes} bytes (rlimit)",
            "cpu": f"{bounds.cpu_seconds:g} s (rlimit)",
            "wall": f"{bounds.wall_seconds:g} s (watched)",
            "output": f"{bounds.output_bytes} bytes (watched)",
            "environment": "empty",
        }
        if self.isolation == "audit":
            held = "refused by a Python audit hook, which a program that means harm gets around"
            return {"processes": held, "network": held, "signals": held, "writing": held, "reading": "free", **rest}
        version = _landlock.version()
        apart = "bubblewrap" if self._bubblewrap else "namespaces"
        empty = f", and an empty network ({apart})" if namespaces else ""
        alone = f", and no other process in sight ({apart})" if namespaces else ""
        return {
            "processes": "refused (seccomp)",
            "network": "sockets refused (seccomp)" + empty,
            "signals": "to itself only (seccomp)" + alone,
            "writing": f"the private folder (Landlock {version})" if version else "nothing (seccomp)",
            "reading": f"Python's library (Landlock {version})" if version else "what the user may read",
            "disk": f"{bounds.disk_bytes} bytes ({apart})"
            if bounded
            else (f"{bounds.file_bytes} bytes a file, no bound together" if version else "nothing"),
            **rest,
        }

    # -- workers ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _worker(self, seed: int) -> Iterator[Worker]:
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            idle = self._idle.setdefault(seed, queue.LifoQueue())
            slots = self._slots.setdefault(seed, threading.BoundedSemaphore(self.workers))
        with slots:
            try:
                worker = idle.get_nowait()
            except queue.Empty:
                worker = Worker(self.isolation, seed, self._folder, self._bubblewrap, self.limits.disk_bytes)
                with self._lock:
                    self._all.append(worker)
            try:
                yield worker
            finally:
                if worker.alive:
                    idle.put(worker)
                else:
                    worker.stop()
                    with self._lock:
                        self._all.remove(worker)

    def _run(self, program: Program, seed: int) -> Result:
        limits = program.limits or self.limits
        job = {
            "code": program.code, "calls": program.calls, "tests": program.tests, "stdin": program.stdin,
            "isolation": self.isolation, "readable": [*readable(), *self.paths], "paths": self.paths,
            "memory": limits.memory_bytes, "cpu": limits.cpu_seconds, "wall": limits.wall_seconds,
            "output": limits.output_bytes, "files": limits.file_bytes, "disk": limits.disk_bytes,
        }  # fmt: skip
        with self._worker(seed) as worker:
            answer, blobs = worker.ask(job, limits.wall_seconds + GRACE)
        if answer is None:
            self._lost += 1
            if self._lost >= 3:
                raise SandboxError(
                    "three workers in a row died with their programs; is the machine out of memory? Use fewer workers "
                    "or a lower limits.memory_bytes"
                )
            return Result("lost", error="the worker died")
        self._lost = 0
        return _result(answer, blobs, limits)


def _result(answer: dict[str, Any], blobs: list[bytes], limits: Limits) -> Result:
    if answer.get("status") == "refused":
        raise SandboxError(f"the sandbox could not be set up, so nothing was run: {answer['error']}")
    out, err, said = blobs
    common = {
        "stdout": out.decode("utf-8", "replace"),
        "stderr": err.decode("utf-8", "replace"),
        "seconds": answer["seconds"],
        "cpu_seconds": answer["cpu_seconds"],
    }
    if answer["stopped"]:
        return Result(answer["stopped"], error=f"stopped: {answer['stopped']}", **common)
    code = answer["code"]
    if code < 0:
        # The rlimit ends in SIGKILL too, and so does the kernel where the machine is out of memory.
        used_up = -code == signal.SIGKILL and answer["cpu_seconds"] >= 0.9 * limits.cpu_seconds
        status: Status = "cpu" if -code == signal.SIGXCPU or used_up else "crash"
        return Result(status, error=f"ended by signal {-code}", **common)
    try:
        told = json.loads(said)  # written by the program's process: anything may stand there
        if told["status"] == "refused":
            raise SandboxError(f"the sandbox could not be set up, so nothing was run: {told['error']}")
        if told["status"] not in ("ok", "error", "exit", "memory"):
            raise ValueError
        values, tests = tuple(told.get("values", ())), tuple(told.get("tests", ()))
        if not all(isinstance(v, str) for v in values) or not all(t is None or isinstance(t, str) for t in tests):
            raise ValueError
        return Result(
            told["status"], values, tests, str(told.get("error", "")), str(told.get("type", "")), **common
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Result("exit", error=f"ended without an answer (exit code {code})", **common)
