"""What happens in the process of one program: it gives up its rights, runs the program and says how it ended."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import resource
import signal
import sys
import types
from typing import Any

from . import _audit, _landlock, _seccomp


def limit(memory: int, cpu: float, file_size: int) -> None:
    """The kernel's own limits, in bytes and seconds; soft and hard, so that the program cannot raise them."""
    seconds = max(int(cpu + 0.999), 1)
    wanted = {
        "RLIMIT_AS": (memory, memory),
        "RLIMIT_CPU": (seconds, seconds + 1),
        "RLIMIT_FSIZE": (file_size, file_size),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_NOFILE": (64, 64),
        "RLIMIT_MEMLOCK": (0, 0),
    }
    for name, value in wanted.items():
        number = getattr(resource, name, None)
        if number is None:
            continue
        _, hard = resource.getrlimit(number)
        if hard != resource.RLIM_INFINITY:
            value = (min(value[0], hard), min(value[1], hard))
        try:
            resource.setrlimit(number, value)
        except ValueError:
            if name != "RLIMIT_AS":  # macOS does not take it; guarantees() says so
                raise


def confine(isolation: str, readable: list[str], folder: str) -> None:
    if isolation == "kernel":
        version = _landlock.version()
        if version:
            _landlock.restrict(readable, [folder, os.devnull])
        _seccomp.install(version)
    elif isolation == "audit":
        _audit.install(folder)


def run(job: dict[str, Any], folder: str, answer: int) -> None:
    """Run the job's program in this process and write what came of it to the descriptor ``answer``. Never returns."""
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.umask(0o077)
        os.chdir(folder)
        limit(job["memory"], job["cpu"], job["files"])
        sys.path[:0] = job["paths"]
        confine(job["isolation"], job["readable"], folder)
    except BaseException as error:
        os.write(answer, json.dumps({"status": "refused", "error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    status: dict[str, Any] = {"status": "ok"}
    try:
        status |= _execute(job)
    except SystemExit as error:
        status = {"status": "exit", "error": f"SystemExit: {_short(error.code)}", "type": "SystemExit"}
    except MemoryError:
        status = {"status": "memory", "error": "MemoryError", "type": "MemoryError"}
    except BaseException as error:
        status = {"status": "error", "error": f"{type(error).__name__}: {_short(error)}", "type": type(error).__name__}
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        data = memoryview(json.dumps(status).encode("utf-8", "backslashreplace"))
    except BaseException:
        data = memoryview(b'{"status": "memory", "error": "MemoryError", "type": "MemoryError"}')
    while data:
        data = data[os.write(answer, data) :]
    os._exit(0)


def _execute(job: dict[str, Any]) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    for name in [n for n in sys.modules if n == "sandbox" or n.startswith("sandbox.")]:
        del sys.modules[name]
    sys.modules["__main__"] = module
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # which site would bring
    exec(compile(job["code"], "<program>", "exec"), module.__dict__)
    tests = [_test(test, module.__dict__) for test in job["tests"]]
    values = [repr(eval(compile(call, "<call>", "eval"), module.__dict__)) for call in job["calls"]]
    return {"values": values, "tests": tests}


def _test(test: str, namespace: dict[str, Any]) -> str | None:
    try:
        exec(compile(test, "<test>", "exec"), namespace)
    except MemoryError:
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {_short(error)}"
    return None


def _short(value: Any, length: int = 500) -> str:
    try:
        text = str(value)
    except BaseException:
        text = "<no text>"
    return text if len(text) <= length else text[:length] + "…"
