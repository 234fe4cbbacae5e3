"""Hybrid data parallelism (ByteScale) against the best static mesh: balance, traffic and simulated step time.

Simulated with the constants of the FlexSP card (7B on A100, eight ranks a node): a sequence of s tokens on d ranks
takes (5.128e-6 s^2 + 0.18396 s) / d ms, a micro-batch 629 ms more. A static mesh of degree d (the least that holds the
longest sequence, or more) packs sequences, longest first, up to C d tokens, and deals packs out to the N / d groups by
cost; it may use Ulysses, whose all-to-alls add up, a ring, of which only what attention does not hide adds up, or both
(USP: Ulysses inside a node, a ring of nodes). Hybrid data parallelism exchanges keys of long sequences only, hidden in
the same way. Told are the speed-ups over the best mesh of all three ways, and of the ring alone, the paper's baseline,
which attends as hybrid data parallelism does. KV heads of 32: 8 as in most models of this size today, 32 as in Llama 2.

With pipelines, every rank being a column of 4 stages: a step of the plan made for them (PP-balance) against that of the
plan that evens out sums, where all micro-batches are filled up to C tokens and all columns do as many, as is done here;
and against PP-balance where each column has lengths and a number of its own, which stages could not hand on.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from trainwright.planning.bytescale import Cost, MicroBatch, Plan, make_plan

COST = Cost(a=5.128e-9, b=1.8396e-4, c=0.62936)
LAYERS, HIDDEN, HEADS, BYTES = 32, 4096, 32, 2
RATES = {2: 154e9, 4: 137e9, 8: 121e9}  # bytes a second that a rank sends inside a node
BETWEEN = 8.7e9

# name: log mean, log sigma, longest, ranks, sequences
CASES = {
    "card: at most 64K, 32 ranks": (8.0, 1.4, 65536, 32, 512),
    "long tail: at most 256K, 32 ranks": (7.5, 1.4, 262144, 32, 1024),
    "long tail: at most 512K, 64 ranks": (7.5, 1.4, 524288, 64, 4096),
}
CAPACITY = 8192
STAGES = 4


def lengths(mu: float, sigma: float, longest: int, count: int, seed: int) -> list[int]:
    """Lognormal, and one of the longest, as that is what a mesh has to be made for."""
    g = np.random.default_rng(seed)
    return [longest, *(int(np.clip(x, 16, longest)) for x in g.lognormal(mu, sigma, count - 1))]


def rate(ranks: int) -> float:
    return next((v for d, v in RATES.items() if ranks <= d), BETWEEN)


def keys(tokens: float, kv_heads: int) -> float:
    """Bytes of keys and values of all layers."""
    return 2 * HIDDEN * kv_heads / HEADS * BYTES * LAYERS * tokens


def exchange(length: int, ranks: int, kv_heads: int) -> float:
    """Seconds for keys of a sequence forward and their gradients back, 3/4 of an all-gather each, beyond what its
    attention hides."""
    sent = keys(length / ranks, kv_heads) * (ranks - 1) * 2 * 0.75 / rate(ranks)
    return max(0.0, sent - COST.a * length * length / ranks)


def ring(pack: list[int], degree: int, kv_heads: int) -> float:
    """All keys of a pack go round, whatever is seen of them: forward, backward, and their gradients."""
    sent = keys(sum(pack) / degree, kv_heads) * (degree - 1) * 3 / rate(degree)
    return max(0.0, sent - sum(COST.a * n * n for n in pack) / degree)


def ulysses(pack: list[int], degree: int, kv_heads: int) -> float:
    """Queries, output, keys and values, forward and back; fewer key-value heads than ranks are repeated."""
    heads = 2 * HEADS + 2 * max(kv_heads, degree)
    return 2 * LAYERS * HIDDEN * heads / HEADS * sum(pack) * BYTES / (degree * rate(degree))


def usp(pack: list[int], degree: int, kv_heads: int) -> float:
    """Ulysses inside a node of 8, a ring between nodes."""
    if degree <= 8:
        return ulysses(pack, degree, kv_heads)
    heads = 2 * HEADS + 2 * max(kv_heads, 8)
    trades = 2 * LAYERS * HIDDEN * heads / HEADS * sum(pack) * BYTES / (degree * rate(8))
    sent = keys(sum(pack) / degree, max(kv_heads, 8)) * (degree // 8 - 1) * 3 / BETWEEN
    return trades + max(0.0, sent - sum(COST.a * n * n for n in pack) / degree)


def static(found: list[int], ranks: int, degree: int, way: Any, kv_heads: int) -> float:
    """Seconds of a step of a mesh of ``ranks / degree`` groups."""
    packs: list[list[int]] = []
    room: list[int] = []
    for n in sorted(found, reverse=True):
        at = next((i for i, left in enumerate(room) if left >= n), None)
        if at is None:
            packs.append([])
            room.append(CAPACITY * degree)
            at = -1
        packs[at].append(n)
        room[at] -= n
    times = []
    for pack in packs:
        seconds = COST.c + sum(COST(n, degree) for n in pack)
        seconds += way(pack, degree, kv_heads)
        times.append(seconds)
    groups = [0.0] * (ranks // degree)
    for t in sorted(times, reverse=True):
        groups[groups.index(min(groups))] += t
    return max(groups)


def hybrid(plan: Plan, kv_heads: int) -> float:
    def seconds(m: MicroBatch) -> float:
        return m.seconds + (exchange(plan.lengths[m.sequences[0]], m.ranks, kv_heads) if m.ranks > 1 else 0.0)

    return plan.seconds(cost=seconds)


def pipelines(found: list[int], ranks: int) -> dict[str, float]:
    """Columns of STAGES stages: times against other plans, steps, and how much of what is computed is padding."""
    plan = make_plan(found, ranks, CAPACITY, cost=COST, balance="pp", stages=STAGES, one_shape=True)
    sums = make_plan(found, ranks, CAPACITY, cost=COST).at_one_shape(CAPACITY, COST)
    ragged = make_plan(found, ranks, CAPACITY, cost=COST, balance="pp", stages=STAGES)
    return {
        "of_dp_balance": plan.seconds(STAGES) / sums.seconds(STAGES),
        "of_ragged": plan.seconds(STAGES) / ragged.seconds(STAGES),
        "steps": plan.steps,
        "steps_dp_balance": sums.steps,
        "padding": 1 - sum(found) / (plan.steps * ranks * CAPACITY),
        "bubble": 1 - sum(plan.load()) / (ranks * plan.seconds(STAGES)),
    }


def run(quick: bool) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for name, (mu, sigma, longest, ranks, count) in CASES.items():
        least = math.ceil(longest / CAPACITY)
        degrees = [2**i for i in range(ranks.bit_length()) if 2**i >= least and ranks % 2**i == 0]
        runs: dict[int, list[dict[str, Any]]] = {8: [], 32: []}
        staged = []
        for seed in range(1 if quick else 5):
            found = lengths(mu, sigma, longest, count, seed)
            staged.append(pipelines(found, ranks))
            started = time.perf_counter()
            plan = make_plan(found, ranks, CAPACITY, cost=COST)
            planner = time.perf_counter() - started
            for kv_heads, results in runs.items():
                rings = {f"ring {d}": static(found, ranks, d, ring, kv_heads) for d in degrees}
                meshes = rings | {f"USP {d}": static(found, ranks, d, usp, kv_heads) for d in degrees}
                meshes |= {f"Ulysses {d}": static(found, ranks, d, ulysses, kv_heads) for d in degrees if d <= HEADS}
                step = hybrid(plan, kv_heads)
                results.append(
                    {
                        "speedup": min(meshes.values()) / step,
                        "over_ring": min(rings.values()) / step,
                        "best_static": min(meshes, key=lambda k: meshes[k]),
                        "step_s": step,
                        "planner_share": planner / step,
                        "imbalance": plan.imbalance,
                        "traffic": plan.sent() / sum(n * (least - 1) for n in found),
                        "waiting": plan.seconds() * ranks / sum(plan.load()),
                    }
                )
        columns[name] = {key: float(np.mean([s[key] for s in staged])) for key in staged[0]}
        for kv_heads, results in runs.items():
            mean = {k: float(np.mean([r[k] for r in results])) for k in results[0] if k != "best_static"}
            cases[f"{name}, {kv_heads} KV heads"] = {
                **mean,
                "least_speedup": min(r["speedup"] for r in results),
                "best_static": results[0]["best_static"],
            }
    reached = {n: c["least_speedup"] >= 1.5 for n, c in cases.items() if n.startswith("long tail")}
    return {"cases": cases, "pipelines": columns, "reached": reached}


def table(result: dict[str, Any]) -> str:
    head = (
        "| lengths | best static mesh | speed-up, mean (least) | over the best ring | load max/mean | "
        "time / mean load | traffic / static ring | planner / step |\n|---|---|---|---|---|---|---|---|\n"
    )
    rows = [
        f"| {name} | {c['best_static']} | {c['speedup']:.2f} ({c['least_speedup']:.2f}) | {c['over_ring']:.2f} | "
        f"{c['imbalance']:.3f} | {c['waiting']:.3f} | {c['traffic']:.2f} | {c['planner_share']:.1%} |"
        for name, c in result["cases"].items()
    ]
    head2 = (
        f"\n\n| lengths, columns of {STAGES} stages | time / DP-balance | time / ragged | micro-batches (DP-balance) | "
        "padding | waiting |\n|---|---|---|---|---|---|\n"
    )
    rows2 = [
        f"| {name} | {c['of_dp_balance']:.3f} | {c['of_ragged']:.2f} | {c['steps']:.1f} "
        f"({c['steps_dp_balance']:.1f}) | {c['padding']:.0%} | {c['bubble']:.0%} |"
        for name, c in result["pipelines"].items()
    ]
    return (
        head
        + "\n".join(rows)
        + head2
        + "\n".join(rows2)
        + f"\n\nat least 1.5 times the best static mesh: {result['reached']}"
    )
