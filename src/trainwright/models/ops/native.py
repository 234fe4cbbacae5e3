"""Compiles kernels.c with the system's C compiler at first use and keeps the library in the user's cache.

The library is made for this very CPU (``-march=native``) and named by a hash of source, flags, compiler and CPU, so a
cache on a shared home is safe. It links no OpenMP runtime of its own: the symbols come from the one that torch has
loaded, hence the same threads. Without a compiler, callers take plain torch operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from trainwright.core.hardware import cache_dir

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ["-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c11"]
P, I64, F32, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "rms_norm_forward": [P, P, P, P, I64, I64, F32, INT],
    "rms_norm_backward": [P, P, P, P, P, P, I64, I64, INT],
    "swiglu_forward": [P, P, P, I64, I64, I64, I64, INT],
    "swiglu_backward": [P, P, P, P, P, I64, I64, I64, I64, I64, INT],
    "attention_weights": [P, P, P, *[I64] * 7, F32, INT],
    "attention_weights_backward": [P, P, P, P, *[I64] * 7, F32, INT],
    "rope": [P, P, P, P, I64, I64, I64, I64, P, P, I64, INT, INT],
}


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(next(x for x in lines if x.startswith(key)) for key in ("model name", "flags"))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def compiler() -> str | None:
    """Path of the C compiler: ``$CC``, else cc, gcc or clang; None without one."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def _compile(cc: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        part = Path(folder) / "kernels.so"
        # Undefined OpenMP symbols are meant: -fopenmp is given to the compiler and kept from the linker.
        for command in (
            [cc, *FLAGS, "-c", str(SOURCE), "-o", str(part.with_suffix(".o"))],
            [cc, "-shared", str(part.with_suffix(".o")), "-o", str(part), "-lm"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise OSError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
        part.replace(library)  # atomic: of two processes that compile at once either result is whole


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None where they cannot be had (a warning says why, once)."""
    cc = compiler()
    if cc is None or platform.system() != "Linux":
        return None
    version = subprocess.run([cc, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True).stdout
    text = "\0".join([SOURCE.read_text(), *FLAGS, cc, version, _cpu()])
    path = (cache_dir() / "kernels") / f"kernels-{hashlib.blake2b(text.encode(), digest_size=10).hexdigest()}.so"
    try:
        if not path.exists():
            _compile(cc, path)
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.TimeoutExpired) as error:
        warnings.warn(f"CPU kernels are not available, plain torch operations take their place: {error}", stacklevel=2)
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can take these: plain float32 CPU tensors, outside torch.compile and functorch."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.dtype != torch.float32 or x.device.type != "cpu":
            return False
    return library() is not None


def call(name: str, *arguments: Tensor | int | float | ctypes.Array[ctypes.c_int64] | None) -> None:
    """Run kernel ``name`` on all of torch's threads; tensors pass as pointers, None as NULL."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("the CPU kernels are not loaded; ask usable() first")
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    getattr(loaded, name)(*values, torch.get_num_threads())


def strides(x: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * x.ndim)(*x.stride())
