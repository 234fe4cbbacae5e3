"""A worker of the sandbox: a small process that forks one process for each program and watches over it.

It is started with an empty environment and nothing but its two pipes, so there is nothing in it to read. It imports
only the standard library: forking it costs a millisecond. Requests and answers are a length (4 bytes) and JSON;
answers have the program's output behind them, which is never interpreted here.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from typing import Any, BinaryIO

from . import _child, _landlock, _namespaces, _seccomp

PIPE_BLOCK = 1 << 16


def main() -> None:
    settings = json.loads(sys.argv[1])
    separate = settings["isolation"] == "kernel" and settings["unshare"] and _namespaces.enter()
    if separate:
        # The new process table begins with the next process; when that one ends the kernel ends all others in it.
        inner = os.fork()
        if inner:
            _, status = os.waitpid(inner, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        _namespaces.die_with_parent()
    read, write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(empty, number)
    if settings["isolation"] == "kernel":
        _seccomp.template(_landlock.version())
    gc.freeze()
    serve(read, write, settings, separate)


def serve(read: BinaryIO, write: BinaryIO, settings: dict[str, Any], separate: bool) -> None:
    bounded = separate and _namespaces.mount_memory(settings["folder"], 1 << 16)
    if bounded:
        _namespaces.unmount(settings["folder"])
    reply(write, {"ready": True, "namespaces": separate, "bounded": bounded})
    while True:
        head = read.read(4)
        if len(head) < 4:
            os._exit(0)
        job = json.loads(read.read(struct.unpack(">I", head)[0]))
        try:
            answer, blobs = run(job, settings["folder"], separate)
        except Exception as error:
            answer, blobs = {"status": "refused", "error": f"{type(error).__name__}: {error}"}, []
        reply(write, answer, blobs)


def reply(write: BinaryIO, answer: dict[str, Any], blobs: list[bytes] | None = None) -> None:
    blobs = blobs or []
    data = json.dumps({**answer, "sizes": [len(b) for b in blobs]}).encode()
    write.write(b"".join([struct.pack(">I", len(data)), data, *blobs]))
    write.flush()


def run(job: dict[str, Any], base: str, separate: bool) -> tuple[dict[str, Any], list[bytes]]:
    folder = tempfile.mkdtemp(prefix="run-", dir=base)
    mounted = separate and _namespaces.mount_memory(folder, job["disk"])
    try:
        return _run(job, folder)
    finally:
        if mounted:
            _namespaces.unmount(folder)
        _remove(folder)


def _run(job: dict[str, Any], folder: str) -> tuple[dict[str, Any], list[bytes]]:
    stdin = _stdin(job["stdin"], folder)
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, answer
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.dup2(stdin, 0)
            os.dup2(pipes[0][1], 1)
            os.dup2(pipes[1][1], 2)
            answer = os.dup2(pipes[2][1], 3)
            os.closerange(4, 256)
            sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
            sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
            _child.run(job, folder, answer)
        finally:
            os._exit(1)
    os.close(stdin)
    for _, end in pipes:
        os.close(end)
    ends = [r for r, _ in pipes]
    limits = [job["output"], job["output"], job["output"]]
    collected, why, status = _watch(pid, ends, limits, started + job["wall"])
    for end in ends:
        os.close(end)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "stopped": why,
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - started,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
    return found, collected


def _stdin(text: str, folder: str) -> int:
    """A descriptor to read the text from."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    number, path = tempfile.mkstemp(dir=folder)
    with os.fdopen(number, "wb") as file:
        file.write(text.encode("utf-8", "replace"))
    number = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return number


def _watch(pid: int, ends: list[int], limits: list[int], deadline: float) -> tuple[list[bytes], str | None, int]:
    """Read what comes until the process has ended, wrote too much or had its time. Whatever happens it is dead then."""
    parts: list[list[bytes]] = [[] for _ in ends]
    sizes = [0] * len(ends)
    poll = select.poll()
    for end in ends:
        os.set_blocking(end, False)
        poll.register(end, select.POLLIN)
    why: str | None = None
    status: int | None = None
    open_ends = set(ends)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            why = "timeout"
            break
        if open_ends:
            for end, _ in poll.poll(min(left, 0.2) * 1000):
                i = ends.index(end)
                with contextlib.suppress(BlockingIOError):
                    data = os.read(end, PIPE_BLOCK)
                    if not data:
                        poll.unregister(end)
                        open_ends.discard(end)
                    parts[i].append(data[: limits[i] - sizes[i]])
                    sizes[i] += len(data)
                    if sizes[i] > limits[i]:
                        why = "output"
        else:
            time.sleep(0.0005)
        if why:
            break
        # A program may close its pipes and go on, or leave one open in a thread: its end is what counts.
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = code
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    for end in open_ends:  # what lay in the pipes at the end
        i = ends.index(end)
        with contextlib.suppress(BlockingIOError):
            while sizes[i] <= limits[i] and (data := os.read(end, PIPE_BLOCK)):
                parts[i].append(data[: limits[i] - sizes[i]])
                sizes[i] += len(data)
        if sizes[i] > limits[i]:
            why = why or "output"
    return [b"".join(p) for p in parts], why, status


def _remove(folder: str) -> None:
    def writable(function: Any, path: str, _: Any) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            function(path)

    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder, onerror=writable)
