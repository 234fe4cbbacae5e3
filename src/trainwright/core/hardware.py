"""What this machine has and how fast it multiplies matrices; what this process uses of it."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("trainwright")

_PEAK_MAX_AGE = 30 * 86400.0  # seconds; drivers, clocks and neighbours change


def cache_dir() -> Path:
    """Folder for what is measured or built once per user; ``TRAINWRIGHT_CACHE`` overrides the XDG place."""
    own = os.environ.get("TRAINWRIGHT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainwright"


# -- the machine ------------------------------------------------------------------------------------------------


def cores() -> int:
    """Cores that this process may use: the affinity mask, cut by a container's CPU quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text().strip().partition(" ")
        if limit.isdigit() and period.isdigit():
            count = min(count, max(1, round(int(limit) / int(period))))
    return count


def total_memory() -> int:
    """Bytes of main memory that this process may use, a container's limit included."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            total = min(total, int(text))
    return total


@cache
def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware", "Processor")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def cpu_features() -> tuple[str, ...]:
    """The instruction sets that decide the speed of matrix products, as far as the system tells them."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return ()
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")
    for line in info.read_text(errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            present = set(line.partition(":")[2].split())
            return tuple(name for name in known if name in present)
    return ()


def gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes, compute capability and number of multiprocessors of each visible CUDA device."""
    if not torch.cuda.is_available():
        return []
    out = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        out.append(
            {
                "name": p.name,
                "memory_bytes": int(p.total_memory),
                "capability": f"{p.major}.{p.minor}",
                "multiprocessors": p.multi_processor_count,
            }
        )
    return out


def describe() -> dict[str, Any]:
    """The machine as plain JSON values."""
    return {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_features": list(cpu_features()),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_memory(),
        "gpus": gpus(),
    }


# -- this process -----------------------------------------------------------------------------------------------


def process_memory() -> tuple[int, int]:
    """Resident bytes of this process: ``(now, peak)``.

    The peak is Linux's VmHWM where there is one: ``ru_maxrss`` of a fresh process starts at its parent's.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if "VmRSS" in fields and "VmHWM" in fields:
            return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
    import psutil

    info = psutil.Process().memory_info()
    peak = getattr(info, "peak_wset", None)  # Windows
    if peak is None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(info.rss), int(peak)


def memory_bytes(device: torch.device | str = "cpu") -> int:
    """Peak bytes used so far: allocated by tensors on a CUDA device, resident in main memory otherwise."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return process_memory()[1]


# -- speed ------------------------------------------------------------------------------------------------------


def matmul_peak(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, seconds: float = 0.3, fresh: bool = False
) -> float:
    """Best rate of a square matrix product in ``dtype`` on ``device``, in FLOP/s; 0 where torch has none.

    Measured once for some ``seconds`` and kept on disk under the machine's key (processor, threads, torch); the best
    of many runs, so that a busy neighbour does not lower it. ``fresh`` measures again and keeps the better figure.
    """
    device = torch.device(device)
    key = _peak_key(device, dtype, torch.get_num_threads())
    known = _known_peaks().get(key)
    if known is not None and not fresh:
        return known
    rate = _measure_matmul(device, dtype, seconds)
    rate = max(rate, known or 0.0)
    _known_peaks()[key] = rate
    _store_peak(key, rate)
    return rate


@cache  # asked for at every logged step
def _peak_key(device: torch.device, dtype: torch.dtype, threads: int) -> str:
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{cpu_name()}, {cores()} cores, {threads} threads"
    )
    if device.type not in ("cpu", "cuda"):
        where = f"{device.type} on {where}"
    return f"{where} | torch {torch.__version__} | {str(dtype).removeprefix('torch.')}"


@cache
def _known_peaks() -> dict[str, float]:
    """Peaks of this process, filled from the disk; a missing or unreadable file holds none."""
    path = cache_dir() / "matmul_peaks.json"
    try:
        stored = json.loads(path.read_text("utf-8"))
        return {k: float(v["flops"]) for k, v in stored.items() if 0 <= time.time() - v["at"] < _PEAK_MAX_AGE}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.debug("%s is not readable (%s); matrix-product speeds are measured again", path, error)
        return {}


def _store_peak(key: str, rate: float) -> None:
    path = cache_dir() / "matmul_peaks.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            stored = json.loads(path.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            stored = {}
        if not isinstance(stored, dict):
            stored = {}
        stored[key] = {"flops": rate, "at": time.time()}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(stored, indent=1), "utf-8")
        temporary.replace(path)
    except OSError as error:  # a read-only home costs a new measurement each time, nothing else
        log.debug("cannot keep the matrix-product speed in %s: %s", path, error)


def _measure_matmul(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Grows the matrices until one product is long enough, then takes the best of what fits into ``seconds``."""
    sync = torch.cuda.synchronize if device.type == "cuda" else torch.mps.synchronize if device.type == "mps" else None
    largest = 8192 if device.type == "cuda" else 2048
    deadline = time.perf_counter() + seconds
    best, n = 0.0, 256
    try:
        with torch.no_grad():
            while True:
                generator = torch.Generator(device).manual_seed(0)  # leaves the run's random state alone
                a = torch.randn(n, n, generator=generator, device=device).to(dtype)
                out = torch.empty_like(a)
                slow = False
                for _ in range(3 if n < largest else 10_000):
                    start = time.perf_counter()
                    torch.mm(a, a, out=out)
                    if sync is not None:
                        sync()
                    took = time.perf_counter() - start
                    best = max(best, 2.0 * n**3 / took)
                    slow = took > seconds / 6
                    if slow or time.perf_counter() > deadline:
                        break
                if n >= largest or slow or time.perf_counter() > deadline:
                    return best
                n *= 2
    except (RuntimeError, TypeError, NotImplementedError) as error:
        log.debug("no matrix product in %s on %s: %s", dtype, device, error)
        return 0.0


def fast_dtypes(device: torch.device | str = "cpu") -> dict[str, float]:
    """Measured matrix-product rate in FLOP/s of fp32, bf16 and fp16 on ``device``."""
    return {
        name: matmul_peak(device, dtype)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
    }
