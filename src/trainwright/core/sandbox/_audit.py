"""For systems without seccomp: refusals by a Python audit hook. It stops mistakes, not a program that means harm."""

from __future__ import annotations

import os
import sys
from typing import Any

_REFUSED = (
    "socket.", "subprocess.", "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.kill",
    "os.chmod", "os.chown", "os.link", "os.symlink", "os.utime", "os.setxattr", "os.removexattr", "os.startfile",
    "os.putenv", "os.unsetenv", "ctypes.", "signal.pthread_kill", "pty.", "fcntl.", "syslog.", "webbrowser.", "ftplib.",
    "http.", "smtplib.", "urllib.", "imaplib.", "poplib.", "telnetlib.", "nntplib.", "winreg.", "msvcrt.", "mmap.",
    "resource.", "sqlite3.", "shutil.chown", "gc.get_objects", "gc.get_referrers", "gc.get_referents",
)  # fmt: skip
_PATHS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.chdir", "shutil.", "tempfile.")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def install(writable: str) -> None:
    """Refuse sockets, processes, signals, foreign functions and writing outside ``writable``."""
    inside = os.path.realpath(writable)

    def within(path: Any) -> bool:
        if not isinstance(path, str | bytes):
            return path is None or isinstance(path, int)
        real = os.path.realpath(os.fsdecode(path))
        return real == inside or real.startswith(inside + os.sep)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and not within(path):
                raise PermissionError(f"writing {path!r} is refused in the sandbox")
        elif event.startswith(_PATHS):
            if not all(within(a) for a in arguments if isinstance(a, str | bytes)):
                raise PermissionError(f"{event} outside the private folder is refused in the sandbox")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"{event} is refused in the sandbox")

    sys.addaudithook(hook)
