"""How many chunks, and how much of each one's activations goes to host memory.

With T_i seconds of chunk i forward (backward: twice that), A_i bytes that it saves, BW bytes a second to the host:

    ratio       r_i = min(1, BW T_{i+1} / A_i),  r_n = 0       copied out while chunk i + 1 goes forward
    resident    max_i sum_{j<=i} (1 - r_j) A_j + KV            behind each chunk's forward pass
    working     max_i sum_{j<i}  (1 - r_j) A_j + A_i + KV      while a chunk is worked on, all of which is there
    step        sum_i 3 T_i + (P - 1) max_i 3 T_i + exposed    P: stages; exposed: seconds of copies that nothing hides

Of 1, 2, 4, ... chunks, none shorter than the smallest efficient length, those are taken that are fastest and fit; of
equals the fewest. The seed card rejects by ``resident`` with KV the keys and values. A chunk's backward pass needs
``working``, and the gradients of all keys and values, so these count.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.parallel.sppo.cut import Work, bounds

BACKWARD = 2.0  # seconds of a backward pass over those of the forward pass


def offload_ratios(seconds: Sequence[float], activation_bytes: Sequence[float], bandwidth: float | None) -> list[float]:
    """r_i of each chunk; see the module. ``seconds`` forward. Raises ValueError for a bandwidth that was not measured
    (None, or not above 0)."""
    if bandwidth is None or not bandwidth > 0:
        raise ValueError(f"bandwidth={bandwidth}: has to be measured, in bytes a second to host memory, above 0")
    ratios = [
        min(1.0, bandwidth * after / size) if size > 0 else 0.0
        for after, size in zip(seconds[1:], activation_bytes, strict=False)
    ]
    return [*ratios, 0.0]


def resident_peak(activation_bytes: Sequence[float], ratios: Sequence[float], kv_bytes: float = 0.0) -> float:
    """Bytes on the device behind the forward pass of the chunk behind which they are most."""
    kept = itertools.accumulate((1 - r) * a for a, r in zip(activation_bytes, ratios, strict=True))
    return kv_bytes + max(kept)


def working_peak(activation_bytes: Sequence[float], ratios: Sequence[float], kv_bytes: float = 0.0) -> float:
    """Bytes on the device with all of one chunk there, and what is kept of those before it."""
    kept, most = 0.0, 0.0
    for size, ratio in zip(activation_bytes, ratios, strict=True):
        most = max(most, kept + size)
        kept += (1 - ratio) * size
    return kv_bytes + most


def exposed_seconds(
    seconds: Sequence[float], activation_bytes: Sequence[float], ratios: Sequence[float], bandwidth: float
) -> float:
    """Seconds of copying that the next chunk's forward pass (out) or backward pass (back in) does not hide."""
    out = 0.0
    for i, (size, ratio) in enumerate(zip(activation_bytes, ratios, strict=True)):
        after = seconds[i + 1] if i + 1 < len(seconds) else 0.0
        copying = ratio * size / bandwidth
        # A copy that takes just as long as what hides it is hidden, whatever the rounding.
        out += max(0.0, copying - after * (1 + 1e-12)) + max(0.0, copying - BACKWARD * after * (1 + 1e-12))
    return out


def step_seconds(seconds: Sequence[float], stages: int, exposed: float = 0.0) -> float:
    """Of forward and backward through ``stages``; ``seconds`` of each chunk forward on the slowest stage."""
    return (1 + BACKWARD) * (sum(seconds) + (stages - 1) * max(seconds)) + exposed


@dataclass(frozen=True)
class Machine:
    """What was measured: see :func:`trainwright.parallel.sppo.measure.measure`.

    work         seconds of a stage, forward, one row
    token_bytes  that a stage saves for the backward pass, of a token
    kv_bytes     keys and values of a token in a stage, and their gradients
    bandwidth    bytes a second from the device to host memory; None: not measured
    chunk_bytes  that a chunk saves whatever its length
    """

    work: Work
    token_bytes: float
    bandwidth: float | None
    kv_bytes: float = 0.0
    chunk_bytes: float = 0.0

    def saved(self, cut: tuple[int, ...]) -> list[float]:
        """A_i of the chunks ``cut``."""
        return [self.chunk_bytes + self.token_bytes * (stop - start) for start, stop in itertools.pairwise(cut)]


@dataclass(frozen=True)
class Choice:
    """``bounds`` of the chunks and their ``ratios``; predicted ``seconds`` of a step and ``peak`` bytes, one row."""

    bounds: tuple[int, ...]
    ratios: tuple[float, ...]
    seconds: float
    peak: float

    @property
    def chunks(self) -> int:
        return len(self.ratios)


def evaluate(cut: tuple[int, ...], stages: int, machine: Machine, offload: bool = True) -> Choice:
    """The ratios for chunks ``cut``, and what they come to. Raises ValueError for an unmeasured bandwidth."""
    seconds = machine.work.of(cut)
    sizes = machine.saved(cut)
    ratios = offload_ratios(seconds, sizes, machine.bandwidth) if offload else [0.0] * len(sizes)
    exposed = exposed_seconds(seconds, sizes, ratios, machine.bandwidth or 1.0)
    peak = working_peak(sizes, ratios, machine.kv_bytes * cut[-1])
    return Choice(cut, tuple(ratios), step_seconds(seconds, stages, exposed), peak)


def solve(
    length: int,
    stages: int,
    machine: Machine,
    *,
    min_chunk: int = 1,
    memory: float | None = None,
    how: Literal["equal", "balanced"] = "equal",
    shape: Work | None = None,
    offload: bool = True,
) -> Choice:
    """The fastest number of chunks for rows of ``length`` tokens.

    memory  bytes for activations and keys of one row; None: without limit
    shape   costs by which balanced chunks are cut; None: the measured ones

    Raises ValueError for an unmeasured bandwidth, rows shorter than ``min_chunk``, and where nothing fits ``memory``.
    """
    if length < min_chunk:
        raise ValueError(f"rows of {length} tokens are shorter than the smallest chunk, {min_chunk}")
    if machine.bandwidth is None or not machine.bandwidth > 0:
        raise ValueError("the bandwidth to host memory was not measured")
    best: Choice | None = None
    least: Choice | None = None
    chunks = 1
    while length // chunks >= min_chunk:
        cut = bounds(length, chunks, how, shape or machine.work)
        chunks *= 2
        if min(stop - start for start, stop in itertools.pairwise(cut)) < min_chunk:
            continue  # balanced: the last chunks are shorter
        found = evaluate(cut, stages, machine, offload)
        if least is None or found.peak < least.peak:
            least = found
        fits = memory is None or found.peak <= memory
        if fits and (best is None or found.seconds < best.seconds * (1 - 1e-9)):
            best = found
    if best is None:
        assert least is not None and memory is not None
        raise ValueError(
            f"no number of chunks fits {memory:.4g} bytes; {least.chunks} chunks need least, {least.peak:.4g} bytes"
        )
    return best
