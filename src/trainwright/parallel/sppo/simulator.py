"""A step of a pipeline of chunks, event by event: forward 1..n through the stages, then backward n..1 to and fro.

A stage computes one chunk at a time and has one copy engine. With copies, a chunk goes forward once that of two before
it has left (two buffers), and backward once it is there again; it is fetched as soon as the next one's backward pass
begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timeline:
    """``seconds`` of the step, ``busy`` of one stage; (start, end) of each chunk: ``forward[stage][chunk]``."""

    seconds: float
    busy: float
    forward: list[list[tuple[float, float]]]
    backward: list[list[tuple[float, float]]]

    @property
    def bubble(self) -> float:
        """Share of the step in which a stage has nothing to do."""
        return 1 - self.busy / self.seconds


def simulate(
    forward: Sequence[float],
    stages: int,
    backward: Sequence[float] | None = None,
    copies: Sequence[float] | None = None,
) -> Timeline:
    """forward, backward  seconds of each chunk on one stage; backward None: none. copies: seconds to copy what goes to
    host memory of each chunk, once."""
    n = len(forward)
    if n < 1 or stages < 1:
        raise ValueError(f"{n} chunks on {stages} stages: both have to be at least 1")
    back = [0.0] * n if backward is None else list(backward)
    moved = [0.0] * n if copies is None else list(copies)
    if len(back) != n or len(moved) != n:
        raise ValueError(f"forward, backward and copies are of {n}, {len(back)} and {len(moved)} chunks")
    out: list[list[float]] = []  # when a chunk has left
    fwd: list[list[tuple[float, float]]] = []
    for stage in range(stages):
        clock = engine = 0.0
        fwd.append([])
        out.append([])
        for i in range(n):
            start = max(clock, fwd[stage - 1][i][1] if stage else 0.0, out[stage][i - 2] if i > 1 else 0.0)
            clock = start + forward[i]
            fwd[stage].append((start, clock))
            engine = max(engine, clock) + moved[i] if moved[i] else engine
            out[stage].append(engine if moved[i] else clock)
    bwd: list[list[tuple[float, float]]] = [[(0.0, 0.0)] * n for _ in range(stages)]
    for stage in reversed(range(stages)):
        clock = fwd[stage][-1][1]
        engine = max(out[stage])
        there = clock if not moved[-1] else max(engine, clock) + moved[-1]
        for i in reversed(range(n)):
            start = max(clock, bwd[stage + 1][i][1] if stage + 1 < stages else 0.0, there)
            clock = start + back[i]
            bwd[stage][i] = (start, clock)
            if i:
                engine = max(engine, start) + moved[i - 1]
                there = engine if moved[i - 1] else start
    return Timeline(max(bwd[0][0][1], *(f[-1][1] for f in fwd)), sum(forward) + sum(back), fwd, bwd)
