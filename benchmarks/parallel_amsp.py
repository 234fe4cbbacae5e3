"""AMSP's planner: independent sharding factors against ZeRO's named points, by the cost model (simulated)."""

from __future__ import annotations

from typing import Any

from trainwright.parallel.amsp.chain import Chain, chains
from trainwright.planning.amsp import NothingFits, Problem, cost, plan

GIB = 2**30
PARAMETERS = 7e9
MICRO_STEPS = 4
MEMORY = (60, 40, 24, 16, 8, 5)  # GiB for parameters, gradients and states


def points(ranks: int) -> dict[str, Chain]:
    return {
        "DDP": Chain(1, 1, 1),
        "ZeRO-1": Chain(1, 1, ranks),
        "ZeRO-2": Chain(1, ranks, ranks),
        "ZeRO-3": Chain(ranks, ranks, ranks),
        "MiCS of 8": Chain(8, 8, 8),
        "MiCS of 64": Chain(64, 64, 64),
    }


def run(quick: bool) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for ranks in (64,) if quick else (64, 256, 1024):
        for memory in MEMORY:
            problem = Problem(PARAMETERS, ranks, micro_steps=MICRO_STEPS, memory=memory * GIB)
            try:
                found = plan(problem)
            except NothingFits as error:
                cases[f"{ranks} ranks, {memory} GiB"] = {"nothing_fits": str(error)}
                continue
            named = {name: cost(problem, chain) for name, chain in points(ranks).items()}
            fitting = {name: p for name, p in named.items() if p.bytes <= problem.memory}
            best = min(fitting, key=lambda name: fitting[name].rank)
            cases[f"{ranks} ranks, {memory} GiB"] = {
                "chain": str(found.chain),
                "held_gib": found.bytes / GIB,
                "seconds": found.exposed_s,
                "zero3_seconds": named["ZeRO-3"].exposed_s,
                "best_named": best,
                "best_named_seconds": fitting[best].exposed_s,
                "leaving_over_zero3": found.leaving / named["ZeRO-3"].leaving,
            }
    many = Problem(PARAMETERS, 1024, micro_steps=MICRO_STEPS)
    once = Problem(PARAMETERS, 1024, micro_steps=1)
    inside, zero3 = Chain(8, 8, 8), Chain(1024, 1024, 1024)
    return {
        "cases": cases,
        "chains": {n: len(chains(n)) for n in (8, 1024)},
        "gib": {
            "(1, 1, 8)": cost(Problem(PARAMETERS, 8), Chain(1, 1, 8)).bytes / GIB,
            "(8, 8, 64)": cost(Problem(PARAMETERS, 64), Chain(8, 8, 64)).bytes / GIB,
        },
        "leaving_ratio": cost(many, inside).leaving / cost(many, zero3).leaving,
        "leaving_ratio_one_micro_step": cost(once, inside).leaving / cost(once, zero3).leaving,
    }


def table(result: dict[str, Any]) -> str:
    head = (
        "| 7B, nodes of 8, 150 and 25 GB/s, 4 micro-steps | plan | GiB held | transfers, s | ZeRO-3, s | best named "
        "point that fits | its transfers, s | bytes leaving a node / ZeRO-3 |\n|---|---|---|---|---|---|---|---|\n"
    )
    rows = [
        f"| {name} | nothing fits | | | | | | |"
        if "chain" not in c
        else f"| {name} | {c['chain']} | {c['held_gib']:.2f} | {c['seconds']:.2f} | {c['zero3_seconds']:.2f} | "
        f"{c['best_named']} | {c['best_named_seconds']:.2f} | {c['leaving_over_zero3']:.3f} |"
        for name, c in result["cases"].items()
    ]
    return (
        head
        + "\n".join(rows)
        + f"\n\nchains: {result['chains']}; GiB: "
        + ", ".join(f"{k} {v:.2f}" for k, v in result["gib"].items())
        + f"; bytes leaving a node, (8, 8, 8) over ZeRO-3: {result['leaving_ratio']:.3f}, with one micro-step "
        f"{result['leaving_ratio_one_micro_step']:.3f}"
    )
