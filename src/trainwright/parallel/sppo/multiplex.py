"""Multiplexed partitioning, planned only: while a pipeline of chunks fills and drains, idle devices share its chunks.

Task (i, s), chunk i on stage s, needs (i - 1, s), whose keys and values it attends to, and (i, s - 1). Those of a
diagonal i + s = k are independent: there are

    w_k = min(k + 1, P, n, n + P - 1 - k)        of them, for P devices

so that P - w_k are idle where w_k < P. Of those, each task gets P // w_k - 1 helpers, and its tokens are shared out:

    seconds of task (i, s) forward    T_i / g + exchange (g - 1) / g        g = P // w_k where w_k <= depth, else 1
    all chunks alike, depth = P - 1, n >= P, nothing to pay for:
    step / 3 T = n - P + 1 + 2 sum_{w < P} 1 / (P // w)                     n + P - 1 without

and the same backward, where the same tasks lie on the same diagonals in the other order, so that what a helper has
saved stays with it. It needs the stage's weights before its first task there, and sends their gradient back behind the
last.

SPPO, arXiv:2503.10377, reconstructed from the seed card B009, which says what is shared and when, not how: groups,
diagonals and what is paid for are ours. The executor does not do it: in sppo/pipeline.py a chunk is on one device a
stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Group = tuple[int, ...]  # devices of a task, that of its stage first


@dataclass(frozen=True)
class Multiplexed:
    """``seconds`` of the step and ``busy`` of one device, in the mean; ``depth``: diagonals of so many tasks or fewer
    are shared; ``held``: stages that a device has the weights of, at most. Tasks (chunk, stage) -> devices, start, end.
    """

    seconds: float
    busy: float
    depth: int
    held: int
    forward: dict[tuple[int, int], tuple[Group, float, float]]
    backward: dict[tuple[int, int], tuple[Group, float, float]]

    @property
    def bubble(self) -> float:
        """Share of the step in which a device does not compute."""
        return 1 - self.busy / self.seconds


def groups(diagonal: int, chunks: int, stages: int, depth: int) -> dict[tuple[int, int], Group]:
    """The devices of each task (chunk, stage) of a diagonal."""
    active = [s for s in range(stages) if 0 <= diagonal - s < chunks]
    more = stages // len(active) - 1 if len(active) <= depth else 0
    idle = [d for d in range(stages) if d not in active]
    return {(diagonal - s, s): (s, *idle[j * more : (j + 1) * more]) for j, s in enumerate(active)}


def multiplex(
    forward: Sequence[float],
    stages: int,
    backward: Sequence[float],
    depth: int,
    *,
    weights: float = 0.0,
    exchange: Sequence[float] | float = 0.0,
) -> Multiplexed:
    """A step with diagonals of ``depth`` tasks or fewer shared; 0: none, which is :func:`simulator.simulate`.

    forward, backward  seconds of each chunk on one stage
    weights            seconds in which a device gets a stage's weights, or sends their gradient
    exchange           seconds more, forward and backward each, of a chunk that is shared by very many
    """
    n = len(forward)
    if n < 1 or stages < 1 or len(backward) != n:
        raise ValueError(f"{n} chunks forward and {len(backward)} backward on {stages} stages: as many, and at least 1")
    if not 0 <= depth < max(stages, 1):
        raise ValueError(f"depth={depth}: of {stages} stages, 0 to {stages - 1} can leave a device idle")
    paid = [float(exchange)] * n if isinstance(exchange, int | float) else list(exchange)
    free, link = [0.0] * stages, [0.0] * stages
    there = {(d, d): 0.0 for d in range(stages)}  # (device, stage): when its weights are
    tasks = [groups(k, n, stages, depth) for k in range(n + stages - 1)]
    done: list[dict[tuple[int, int], tuple[Group, float, float]]] = [{}, {}]

    def run(way: int, task: tuple[int, int], group: Group, needed: list[tuple[int, int]], seconds: float) -> None:
        chunk, stage = task
        for d in group:
            if (d, stage) not in there:
                link[d] += weights
                there[d, stage] = link[d]
        start = max(
            *(free[d] for d in group),
            *(there[d, stage] for d in group),
            *(done[way][t][2] for t in needed if t in done[way]),
        )
        g = len(group)
        end = start + seconds / g + paid[chunk] * (g - 1) / g
        for d in group:
            free[d] = end
        done[way][task] = group, start, end

    for diagonal in tasks:
        for (i, s), group in diagonal.items():
            run(0, (i, s), group, [(i - 1, s), (i, s - 1)], forward[i])
    for diagonal in reversed(tasks):
        for (i, s), group in diagonal.items():
            run(1, (i, s), group, [(i + 1, s), (i, s + 1)], backward[i])
    last: dict[tuple[int, int], float] = {}
    for (_, s), (group, _, end) in done[1].items():
        for d in group[1:]:
            last[d, s] = max(last.get((d, s), 0.0), end)
    out = [0.0] * stages
    for (d, _), end in sorted(last.items(), key=lambda item: item[1]):
        out[d] = max(out[d], end) + weights
    held = max(sum(device == d for device, _ in there) for d in range(stages))
    return Multiplexed(max(*free, *out), sum(forward) + sum(backward), depth, held, done[0], done[1])


def best(
    forward: Sequence[float],
    stages: int,
    backward: Sequence[float],
    *,
    weights: float = 0.0,
    exchange: Sequence[float] | float = 0.0,
) -> Multiplexed:
    """The fastest depth; of equals the smallest, which needs least weights."""
    found = [multiplex(forward, stages, backward, m, weights=weights, exchange=exchange) for m in range(stages)]
    least = min(f.seconds for f in found)
    return next(f for f in found if f.seconds <= least * (1 + 1e-9))
