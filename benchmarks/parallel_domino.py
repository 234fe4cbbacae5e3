"""Domino (B028): how much of what tensor parallelism communicates hides behind the other slices' products.

The schedule itself runs, forward and backward, on one process whose all-reduces are made up. Simulated: a clock that
goes on by the FLOPs of each product and by waits for a link that takes one all-reduce at a time, c seconds each or by
its bytes; attention's core and everything elementwise are free, which hides less than there is. Slept: a thread that
sleeps c seconds per all-reduce beside products that sleep too. u is the time of half a layer's forward products on one
chunk.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.parallel.domino_decoder import Domino, slice_blocks

VOCAB = 64
RATIOS = (0.5, 1.0, 2.0)  # u / c


def flops(func: Any, args: Any) -> int:
    """Of an operator, where it is a matrix product."""
    if func._overloadpacket.__name__ not in ("mm", "addmm", "addmm_"):
        return 0
    a, b = args[-2:]  # [m, k] [k, n]
    return int(2 * a.shape[0] * a.shape[1] * b.shape[1])


class Clock(TorchDispatchMode):
    """Simulated time of what runs in its context: products take FLOPs / ``speed``, and :meth:`reduce` starts an
    all-reduce of ``seconds(bytes)`` on the only link. Waits for it are ``exposed``.

    blocking  each all-reduce is waited for at once: plain tensor parallelism of the same slices
    """

    def __init__(self, speed: float, seconds: Callable[[int], float], blocking: bool = False):
        super().__init__()
        self.speed, self.seconds, self.blocking = speed, seconds, blocking
        self.now = self.exposed = self.under_way = 0.0
        self.link_free = 0.0
        self.calls = self.bytes = self.open = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += flops(func, args) / self.speed
        return func(*args, **(kwargs or {}))

    def reduce(self, x: Tensor) -> _Arrives:
        took = self.seconds(x.nbytes)
        self.link_free = max(self.now, self.link_free) + took
        self.under_way += took
        self.calls, self.bytes, self.open = self.calls + 1, self.bytes + x.nbytes, self.open + 1
        arrives = _Arrives(self, self.link_free)
        if self.blocking:
            self.wait_until(self.link_free)
        return arrives

    def wait_until(self, when: float) -> None:
        self.exposed += max(0.0, when - self.now)
        self.now = max(self.now, when)


class _Arrives:
    def __init__(self, clock: Clock, when: float):
        self.clock, self.when = clock, when

    def wait(self) -> None:
        self.clock.open -= 1
        self.clock.wait_until(self.when)


class Sleeper:
    """A link in real time: one all-reduce after the other, each ``seconds`` long. ``waited`` adds up."""

    def __init__(self, seconds: float, blocking: bool = False):
        self.seconds, self.blocking, self.waited, self.calls = seconds, blocking, 0.0, 0
        self._queue: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (arrived := self._queue.get()) is not None:
            time.sleep(self.seconds)
            arrived.set()

    def reduce(self, x: Tensor) -> _Event:
        self.calls += 1
        arrived = threading.Event()
        self._queue.put(arrived)
        handle = _Event(self, arrived)
        if self.blocking:
            handle.wait()
        return handle

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class SleepingProducts(TorchDispatchMode):
    """Products that take FLOPs / ``speed`` seconds at least."""

    def __init__(self, speed: float):
        super().__init__()
        self.speed = speed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if work := flops(func, args):
            time.sleep(work / self.speed)
        return func(*args, **(kwargs or {}))


class _Event:
    def __init__(self, link: Sleeper, arrived: threading.Event):
        self.link, self.arrived = link, arrived

    def wait(self) -> None:
        started = time.perf_counter()
        self.arrived.wait()
        self.link.waited += time.perf_counter() - started


def decoder(layers: int, dim: int, row: int, column: int, reduce: Callable[[Tensor], Any], length: int = 16) -> Any:
    """A decoder whose two halves have equally many FLOPs in a layer's products."""
    torch.manual_seed(0)
    spec = {"dim": dim, "n_layers": layers, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 4 * dim // 3}
    model = DecoderModelConfig(**spec).build(VOCAB, length)
    slice_blocks(model, Domino(row, column, reduce))
    return model


def step(model: Any, rows: int, length: int = 16) -> None:
    tokens = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    model(tokens).square().mean().backward()


def simulated(
    layers: int, row: int, column: int, ratio: float, by_bytes: bool = False, blocking: bool = False
) -> Clock:
    """A step with u = 1 and c = 1 / ``ratio``, for each all-reduce or, ``by_bytes``, for each chunk's (pieces less)."""
    dim, rows, length = 24, 8, 16
    half = 4 * 2 * dim * dim * rows * length / row  # FLOPs of a chunk; at speed = half, u = 1
    chunk_bytes = rows * length * dim * 4 / row

    def seconds(size: int) -> float:
        return (size / chunk_bytes if by_bytes else 1.0) / ratio

    clock = Clock(half, seconds, blocking)
    model = decoder(layers, dim, row, column, clock.reduce, length)
    with clock:
        step(model, rows, length)
    return clock


def slept(layers: int, turns: int, seconds: float = 0.02) -> dict[str, Any]:
    """Products that sleep too, u = c = ``seconds``: what other processes do to this machine changes little."""
    dim, rows, length, row = 24, 8, 16, 2
    shares = []
    for _ in range(turns):
        waited = {}
        for blocking in (False, True):
            link = Sleeper(seconds, blocking)
            model = decoder(layers, dim, row, 1, link.reduce, length)
            with SleepingProducts(4 * 2 * dim * dim * rows * length / row / seconds):
                step(model, rows, length)
            waited[blocking] = link.waited
            link.close()
        shares.append(waited[False] / waited[True])
    return {"seconds": seconds, "calls": link.calls, "exposed": statistics.median(shares), "all": shares}


def run(quick: bool) -> dict[str, Any]:
    layers = 4 if quick else 24
    cases: dict[str, Any] = {}
    for by_bytes in (False, True):
        for row, column in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)):
            found: dict[str, Any] = {}
            for ratio in RATIOS:
                clock = simulated(layers, row, column, ratio, by_bytes)
                plain = simulated(layers, row, column, ratio, by_bytes, blocking=True)
                whole = 4 * layers / ratio * (row if by_bytes else 1)  # seconds of 4 L sums of all rows
                found[str(ratio)] = [clock.exposed / plain.exposed, clock.exposed / whole, clock.now / plain.now]
                found |= {"calls": clock.calls, "left": clock.open}
            cases[f"{row} {column} {'bytes' if by_bytes else 'fixed'}"] = found
    return {"layers": layers, "cases": cases, "slept": slept(2 if quick else 6, 3)}


def table(result: dict[str, Any]) -> str:
    head = " | ".join(f"u = {ratio:g} c" for ratio in RATIOS)
    lines = [
        f"{result['layers']} layers, simulated. A cell: exposed wait as a share of that of the same slices waited for "
        "at once / of plain tensor parallelism without slices; time of a step over that of the same slices waited for "
        "at once.",
        "",
        f"| c of an all-reduce | rows in | columns in | all-reduces | {head} |",
        "|---|---|---|---|" + "---|" * len(RATIOS),
    ]
    for name, r in result["cases"].items():
        row, column, kind = name.split()
        cells = [f"{a:.1%} / {b:.1%}; {t:.2f}" for a, b, t in (r[str(ratio)] for ratio in RATIOS)]
        lines.append(
            f"| {'by its bytes' if kind == 'bytes' else 'fixed'} | {row} | {column} | {r['calls']} | "
            f"{' | '.join(cells)} |"
        )
    s = result["slept"]
    lines += [
        "",
        f"Slept, rows in 2, u = c = {s['seconds'] * 1e3:.2f} ms, {s['calls']} all-reduces: waits are "
        f"{s['exposed']:.1%} of those of the same slices waited for at once (median of {len(s['all'])} turns).",
    ]
    return "\n".join(lines)
