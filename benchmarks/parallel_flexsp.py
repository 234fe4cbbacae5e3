"""FlexSP: modelled time of a step over that of the best static mesh, and what planning it takes.

The cost model's constants are those of a 7B model on A100; from 16 ranks on groups span nodes, and 32 ranks get the
rate that was measured for 16. Lengths: those of the card (one of 150K, twenty of 5 to 40K, sixty of 1 to 10K), and long
tails: lognormal, 90 % below 8K and 99 % below 32K, and one of the longest, which a static mesh has to be made for. A
static mesh has groups of one size for all steps; the best of the sizes that hold the longest is taken, with the same
blaster and greedy. Planning is timed here, in CPU time: one step trains while the next is planned.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from trainwright.planning.flexsp import BANDWIDTH, CostModel, FlexSPPlanner, Plan, static_plan, token_cap

K = 1024
LOG = (7.32, 1.32)  # mean and deviation of the log: 90 % below 8K, 99 % below 32K, as of web text
COST = CostModel(bandwidth={**BANDWIDTH, 32: BANDWIDTH[16]})


def card(r: random.Random) -> list[int]:
    return [150 * K] + [r.choice([5, 9, 20, 40]) * K for _ in range(20)] + [r.randint(K, 10 * K) for _ in range(60)]


def long_tail(longest: int, count: int) -> Callable[[random.Random], list[int]]:
    def draw(r: random.Random) -> list[int]:
        return [longest] + [max(16, min(longest, int(r.lognormvariate(*LOG)))) for _ in range(count - 1)]

    return draw


CASES: dict[str, tuple[int, Callable[[random.Random], list[int]]]] = {
    "card": (16, card),
    "long tail to 128K": (16, long_tail(128 * K, 512)),
    "long tail to 192K": (16, long_tail(192 * K, 1024)),
    "long tail to 384K": (32, long_tail(384 * K, 1024)),
}


def best_static(planner: FlexSPPlanner, lengths: list[int]) -> tuple[Plan, int]:
    found = []
    for degree in planner.sizes:
        if max(lengths) <= planner.cap * degree:
            plan = static_plan(planner, lengths, degree)
            found.append((plan.time, degree, plan))
    _, degree, plan = min(found, key=lambda f: f[0])
    return plan, degree


def run(quick: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, (ranks, draw) in CASES.items():
        for method in ("layouts",) if quick else ("layouts", "milp"):
            ratios, plans, shares, degrees = [], [], [], []
            for seed in range(1 if quick else 3):
                lengths = draw(random.Random(seed))
                planner = FlexSPPlanner(ranks, token_cap(80, 7, ranks), COST, method=method, seconds=1.0)
                static, degree = best_static(planner, lengths)
                started, cpu = time.perf_counter(), time.process_time()
                plan = planner.plan(lengths)
                plans.append(time.perf_counter() - started)
                shares.append((time.process_time() - cpu) * 1e3 / plan.time)
                ratios.append(static.time / plan.time)
                degrees.append(degree)
            out[f"{name}, {method}"] = {
                "ranks": ranks,
                "sequences": len(lengths),
                "best_static": statistics.mode(degrees),
                "speed_up": statistics.mean(ratios),
                "least": min(ratios),
                "step_s": plan.time / 1e3,
                "solve_s": statistics.median(plans),
                "solver_cpu_share_of_step": statistics.median(shares),
                "layouts": [list(m.layout) for m in plan.micro_batches],
            }
    return out


def table(result: dict[str, Any]) -> str:
    lines = [
        "| lengths, method | ranks | sequences | best static | speed-up (least) | modelled step | planning / step |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, r in result.items():
        if isinstance(r, dict):
            lines.append(
                f"| {name} | {r['ranks']} | {r['sequences']} | {r['best_static']} | "
                f"{r['speed_up']:.2f} ({r['least']:.2f}) | {r['step_s']:.1f} s | "
                f"{100 * r['solver_cpu_share_of_step']:.1f} % |"
            )
    return "\n".join(lines)
