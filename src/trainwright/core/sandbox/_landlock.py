"""Which files a program may read and write: Landlock, the Linux kernel's sandbox that needs no privilege (5.13)."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST, _REMOVE_DIR, _REMOVE, _MAKE_DIR, _MAKE_FILE = 1, 2, 4, 8, 16, 32, 128, 256
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Landlock's version in this kernel; 0: none, or switched off."""
    if sys.platform != "linux":
        return 0
    found = _libc().syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(int(found), 0)


def _handled(version: int) -> int:
    rights = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
        if version >= since:
            rights |= right
    return rights


def restrict(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Bind this process to these folders and files, and return Landlock's version. Raises OSError.

    From version 4 on TCP is refused too, from 6 on signals and abstract sockets to processes outside.
    """
    known = version()
    if not known:
        raise OSError("this kernel has no Landlock")
    libc = _libc()
    handled = _handled(known)
    attributes = struct.pack("Q", handled)
    if known >= 4:
        attributes += struct.pack("Q", 3)
    if known >= 6:
        attributes += struct.pack("Q", 3)
    rules = libc.syscall(ctypes.c_long(_CREATE_RULESET), attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if rules < 0:
        raise OSError(ctypes.get_errno(), "Landlock refused the rules")
    reading = _EXECUTE | _READ | _LIST
    writing = reading | _WRITE | _REMOVE_DIR | _REMOVE | _MAKE_DIR | _MAKE_FILE | _REFER | _TRUNCATE
    for rights, paths in ((reading, readable), (writing, writable)):
        for path in paths:
            _allow(libc, rules, path, rights & handled)
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(rules), ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), "Landlock refused to restrict the process")
    os.close(rules)
    return known


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule
    try:
        if not os.path.isdir(path):
            rights &= _EXECUTE | _WRITE | _READ | _TRUNCATE
        rule = struct.pack("=Qi", rights, place)
        if libc.syscall(ctypes.c_long(_ADD_RULE), ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0)):
            raise OSError(ctypes.get_errno(), f"Landlock refused the rule for {path}")
    finally:
        os.close(place)
