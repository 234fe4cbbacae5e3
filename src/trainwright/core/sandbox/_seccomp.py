"""The system calls that a program may make: a seccomp filter, written as BPF and installed through ctypes.

A list of what is allowed, not of what is forbidden: a call that is new or was forgotten is refused (EPERM). The filter
holds for all threads of the process and cannot be taken off. No call on the list starts a process or a program, opens
a socket, signals another process, changes owners, rights or limits, or touches another process's memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import sys
from collections.abc import Iterable

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column of the tables

# name -> number on x86_64 and aarch64 (None: that machine has no such call)
PLAIN: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233),
    "dup": (32, 23), "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102),
    "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "recvfrom": (45, 207), "exit": (60, 93),
    "wait4": (61, 260), "uname": (63, 160), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46),
    "getcwd": (79, 17), "chdir": (80, 49), "readlink": (89, None), "umask": (95, 166), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, None),
    "getgroups": (115, 158), "getpgid": (121, 155), "getsid": (124, 156), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "statfs": (137, 43),
    "fstatfs": (138, 44), "arch_prctl": (158, None), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "epoll_create": (213, None), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None), "epoll_ctl": (233, 21),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "set_robust_list": (273, 99), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59), "getcpu": (309, 168), "getrandom": (318, 278),
    "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
# Calls that change files: only where Landlock says which. truncate is not held by Landlock before its version 3.
WRITING: dict[str, tuple[int | None, int | None]] = {
    "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None), "unlink": (87, None), "mkdirat": (258, 34),
    "unlinkat": (263, 35), "renameat": (264, 38), "renameat2": (316, 276),
}  # fmt: skip
OPEN = {"open": (2, None), "openat": (257, 56)}
CHECKED = {
    "clone": (56, 220), "clone3": (435, 435), "kill": (62, 129), "tgkill": (234, 131), "fcntl": (72, 25),
    "ioctl": (16, 29), "prctl": (157, 167), "prlimit64": (302, 261), "socketpair": (53, 199), "sendto": (44, 206),
}  # fmt: skip

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_THREAD = 0x00010000 | 0x00000100  # CLONE_THREAD, CLONE_VM
_NEW_NAMESPACES = 0x7E020080  # all CLONE_NEW* flags
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# F_SETOWN and F_SETSIG would have the kernel send signals for the program, so fcntl is a list as well.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, k


def supported() -> bool:
    return sys.platform == "linux" and platform.machine() in ARCHITECTURES


def _ret(value: int) -> Instruction:
    return (_RET, 0, 0, value)


_DENY = _ret(_ERRNO | _EPERM)


def _argument(number: int, high: bool = False) -> Instruction:
    """Load half of an argument of the call (both machines are little-endian)."""
    return (_LD, 0, 0, 16 + 8 * number + (4 if high else 0))


def _one_of(number: int, values: Iterable[int], mask: int | None = None) -> list[Instruction]:
    """Go on if the argument's low half is one of ``values``, else refuse. What takes an int reads that half alone."""
    values = list(values)
    code = [_argument(number)]
    if mask is not None:
        code.append((0x54, 0, 0, mask))  # A &= mask
    for i, value in enumerate(values):
        code.append((_JEQ, len(values) - i, 0, value & 0xFFFFFFFF))
    return [*code, _DENY]


def _zero(number: int) -> list[Instruction]:
    """Go on if all 64 bits of the argument are zero."""
    return [
        _argument(number), (_JEQ, 1, 0, 0), _DENY, _argument(number, high=True), (_JEQ, 1, 0, 0), _DENY,
    ]  # fmt: skip


def program(pid: int, machine: str, landlock: int) -> list[Instruction]:
    """The filter for process ``pid``. landlock: its version; 0: none, and then no file can be written at all."""
    architecture, column = ARCHITECTURES[machine]
    code: list[Instruction] = [(_LD, 0, 0, 4), (_JEQ, 1, 0, architecture), _ret(_KILL), (_LD, 0, 0, 0)]
    if machine == "x86_64":
        code += [(_JGE, 0, 1, 0x40000000), _DENY]  # the x32 ABI has its own numbers
    allowed = dict(PLAIN)
    if landlock:
        allowed |= WRITING | OPEN
        if landlock >= 3:
            allowed["truncate"] = (76, 45)
    for numbers in allowed.values():
        number = numbers[column]
        if number is not None:
            code += [(_JEQ, 0, 1, number), _ret(_ALLOW)]
    checks: dict[str, list[Instruction]] = {
        # A thread of this process, and no other kind of clone.
        "clone": [*_one_of(0, [_THREAD], _THREAD), *_one_of(0, [0], _NEW_NAMESPACES)],
        "kill": _one_of(0, [pid]),
        "tgkill": _one_of(0, [pid]),
        "fcntl": _one_of(1, _FCNTL),
        "ioctl": _one_of(1, _IOCTL),
        "prctl": _one_of(0, (15, 16)),  # the thread's name
        "prlimit64": [*_one_of(0, (0, pid)), *_zero(2)],  # read limits, never set them
        "socketpair": [*_one_of(0, (1,)), *_one_of(1, (1,), 0xF)],  # a pair of connected streams, for asyncio
        "sendto": _zero(4),  # to the other end only
    }
    if not landlock:
        checks["open"] = _one_of(1, [0], _WRITE_FLAGS)
        checks["openat"] = _one_of(2, [0], _WRITE_FLAGS)
    for name, check in checks.items():
        number = (OPEN | CHECKED)[name][column]
        if number is not None:
            code += [(_JEQ, 0, len(check) + 1, number), *check, _ret(_ALLOW)]
    number = CHECKED["clone3"][column]
    assert number is not None
    # Its flags lie in memory, where a filter cannot look; the C library then falls back to clone.
    code += [(_JEQ, 0, 1, number), _ret(_ERRNO | _ENOSYS), _DENY]
    return code


_PID = 0x7E57AB1E  # stands for the process's number until it is known; no process has such a high one


@functools.cache
def template(landlock: int) -> bytes:
    """The filter as bytes, made once: a worker makes it before it forks."""
    return b"".join(struct.pack("HBBI", *i) for i in program(_PID, platform.machine(), landlock))


def install(landlock: int) -> None:
    """Bind this process (which must have one thread). Raises OSError where the kernel refuses."""
    code = template(landlock).replace(struct.pack("I", _PID), struct.pack("I", os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    value = Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")
    if libc.prctl(22, 2, ctypes.byref(value), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")
