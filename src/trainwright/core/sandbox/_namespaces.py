"""A network, process table and mounts of its own for a worker, where the kernel lets an ordinary user have them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_USER, _PID, _NET, _IPC, _MOUNT = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000
_PRIVATE, _REC = 1 << 18, 1 << 14
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8


def enter() -> bool:
    """Move this process into new namespaces; processes that it starts from now on have a process table of their own.

    False, with nothing changed, where that is refused (many containers). The network is empty: not even loopback is up.
    """
    if sys.platform != "linux":
        return False
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_USER | _PID | _NET | _IPC | _MOUNT):
        return False
    # The same ids inside: files made there belong to whoever runs us.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError:
            return True  # no mount then, the rest holds
    libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE | _REC), None)
    return True


def mount_memory(folder: str, size: int) -> bool:
    """Put an empty file system of at most ``size`` bytes in memory onto ``folder``; False where that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size},nr_inodes=4096,mode=700".encode()
    flags = ctypes.c_ulong(_NOSUID | _NODEV | _NOEXEC)
    return libc.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options) == 0


def unmount(folder: str) -> None:
    ctypes.CDLL(None, use_errno=True).umount2(folder.encode(), 2)  # MNT_DETACH


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
