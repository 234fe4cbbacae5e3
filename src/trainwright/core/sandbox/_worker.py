"""The worker process of a sandbox, seen from outside, and what it is started with."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from trainwright.core.errors import TrainwrightError

START = 120.0  # seconds that a worker may take to start


class SandboxError(TrainwrightError):
    """The sandbox itself does not work here; no program was run without it."""


class Worker:
    """One worker process and the two pipes to it."""

    def __init__(self, isolation: str, seed: int, folder: str, bubblewrap: str, disk: int):
        here = str(Path(__file__).resolve().parent)
        # A package made by hand: importing ours would bring torch along.
        start = (
            "import sys, types; p = types.ModuleType('sandbox'); p.__path__ = [" + repr(here) + "]; "
            "sys.modules['sandbox'] = p; from sandbox import _server; _server.main()"
        )
        own = tempfile.mkdtemp(prefix="worker-", dir=folder)
        settings = {"isolation": isolation, "folder": own, "unshare": not bubblewrap}
        # -E would take the hash seed away; the environment is ours alone.
        command = [sys.executable, "-s", "-S", "-P", "-B", "-c", start, json.dumps(settings)]
        if bubblewrap and isolation == "kernel":
            command = [
                bubblewrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
                "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--size", str(disk), "--tmpfs", own, "--",
                *command,
            ]  # fmt: skip
        environment = {
            "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": str(seed),
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        self.alive = True
        ready, _ = self._receive(START)
        if ready is None:
            self.stop()
            assert self._process.stderr is not None
            raise SandboxError(f"a worker of the sandbox did not start: {self._process.stderr.read().decode()[-500:]}")
        wrapped = bool(bubblewrap) and isolation == "kernel"
        self.namespaces, self.bounded = bool(ready["namespaces"]) or wrapped, bool(ready["bounded"]) or wrapped

    def ask(self, job: dict[str, Any], seconds: float) -> tuple[dict[str, Any] | None, list[bytes]]:
        """The worker's answer; None where it died or did not answer in time (it is dead then)."""
        data = json.dumps(job).encode()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(struct.pack(">I", len(data)) + data)
            self._process.stdin.flush()
            return self._receive(seconds)
        except OSError:
            self.alive = False
            return None, []

    def _receive(self, seconds: float) -> tuple[dict[str, Any] | None, list[bytes]]:
        deadline = time.monotonic() + seconds
        head = self._read(4, deadline)
        said = self._read(struct.unpack(">I", head)[0], deadline) if head else None
        if said is None:
            self.alive = False
            return None, []
        answer = json.loads(said)
        blobs = []
        for size in answer["sizes"]:
            blob = self._read(size, deadline)
            if blob is None:
                self.alive = False
                return None, []
            blobs.append(blob)
        return answer, blobs

    def _read(self, size: int, deadline: float) -> bytes | None:
        assert self._process.stdout is not None
        end = self._process.stdout.fileno()
        parts = []
        while size:
            ready, _, _ = select.select([end], [], [], max(deadline - time.monotonic(), 0.0))
            data = os.read(end, min(size, 1 << 20)) if ready else b""
            if not data:
                return None
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def stop(self) -> None:
        self.alive = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def readable() -> list[str]:
    """What a Python program needs to read: the standard library, shared libraries, time zones."""
    paths = sysconfig.get_paths()
    return [
        paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib"), "/usr/lib", "/usr/lib64", "/lib",
        "/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache", "/dev/urandom",
        "/dev/random", "/dev/zero", "/dev/null",
    ]  # fmt: skip


def find_bubblewrap(isolation: str) -> str:
    """The path of a bubblewrap that works here, or nothing."""
    found = shutil.which("bwrap") if isolation == "kernel" and sys.platform == "linux" else None
    if not found:
        return ""
    trial = [found, "--unshare-user", "--unshare-net", "--ro-bind", "/", "/", "--size", "4096", "--tmpfs", "/tmp", "--"]
    try:
        done = subprocess.run([*trial, sys.executable, "-S", "-c", ""], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found if done.returncode == 0 else ""
