"""Keeps the C allocator from handing large buffers back to the kernel between operations (CPU, glibc)."""

from __future__ import annotations

import ctypes
import platform

# Values of <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD = 64 << 20


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to serve large blocks from its heap and to keep what is freed. True where it took effect.

    By default glibc maps every block beyond some 32 MiB anew and unmaps it when freed, so each activation of a
    training step is paid for in page faults: a third of the time of an elementwise operation or more. A training
    step allocates the same sizes again and again, so keeping them costs no memory beyond the step's own peak.
    Has no effect on GPU memory, and none outside glibc.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD))
    return all([mallopt(key, value) == 1 for key, value in settings])
