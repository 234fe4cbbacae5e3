"""FlashCP against cutting every document: bytes of keys and values, and how even the work is.

Packs of documents of lognormal lengths; per pack the plan of planning/flashcp.py against per-document sharding of all
documents, whose keys are all-gathered (static), and whose chunks go only where they are needed (aware). ``sequence`` is
the imbalance of zig-zag pieces of the whole row, without regard to documents. Figures are exact; ``ms`` is the planner.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np

from trainwright.planning.flashcp import chunks_of, make_plan, per_document

# name: mean and sigma of the log of the length, tokens of a pack, ranks
CASES = {
    "card: mu 7.5, sigma 1.4, 128K, 8 ranks": (7.5, 1.4, 131072, 8),
    "4 ranks": (7.5, 1.4, 131072, 4),
    "longer: mu 8.5, sigma 1.4, 256K, 8 ranks": (8.5, 1.4, 262144, 8),
    "shorter: mu 6.5, sigma 1.2, 128K, 16 ranks": (6.5, 1.2, 131072, 16),
}


def packs(mu: float, sigma: float, total: int, count: int, seed: int = 0) -> list[list[int]]:
    """Rows of ``total`` tokens; the last document of each is cut off."""
    g = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        row: list[int] = []
        while (left := total - sum(row)) > 0:
            row.append(min(left, max(1, int(g.lognormal(mu, sigma)))))
        found.append(row)
    return found


def sequence_imbalance(lengths: list[int], ranks: int) -> float:
    """Largest over mean work where the row is cut in zig-zag as one."""
    total = sum(lengths)
    position = np.concatenate([np.arange(1, n + 1) for n in lengths])
    summed = np.concatenate([[0], np.cumsum(position)])
    work = [sum(summed[c.stop] - summed[c.start] for c in chunks_of(total, ranks, r)) for r in range(ranks)]
    return float(max(work) * ranks / sum(work))


def run(quick: bool) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name, (mu, sigma, total, ranks) in itertools.islice(CASES.items(), 1 if quick else None):
        rows = packs(mu, sigma, total, 4 if quick else 40)
        started = time.perf_counter()
        plans = [make_plan(row, ranks, total=total) for row in rows]
        seconds = (time.perf_counter() - started) / len(rows)
        sent = [sum(p.sent()) for p in plans]
        aware = [sum(per_document(row, ranks).sent()) for row in rows]
        cases[name] = {
            "cut_tokens": statistics.median(sum(p.lengths[k] for k in p.cut) / total for p in plans),
            "bytes_of_static": statistics.median(s / (total * (ranks - 1)) for s in sent),
            "bytes_of_aware": statistics.median(s / max(a, 1) for s, a in zip(sent, aware, strict=True)),
            "imbalance_median": statistics.median(p.imbalance for p in plans),
            "imbalance_worst": max(p.imbalance for p in plans),
            "sequence_imbalance": statistics.median(sequence_imbalance(row, ranks) for row in rows),
            "tokens_worst": max(max(p.tokens()) * ranks / total for p in plans),
            "planner_ms": seconds * 1e3,
        }
    first = next(iter(cases.values()))
    reached = first["bytes_of_static"] <= 0.6 and first["imbalance_worst"] <= 1.05
    return {"cases": cases, "reached": reached}


def table(result: dict[str, Any]) -> str:
    head = (
        "| lengths | tokens cut | bytes / static | bytes / aware | work max/mean, median (worst) | sequence | "
        "tokens max/mean | ms |\n|---|---|---|---|---|---|---|---|\n"
    )
    rows = [
        f"| {name} | {c['cut_tokens']:.2f} | {c['bytes_of_static']:.2f} | {c['bytes_of_aware']:.2f} | "
        f"{c['imbalance_median']:.3f} ({c['imbalance_worst']:.3f}) | {c['sequence_imbalance']:.2f} | "
        f"{c['tokens_worst']:.2f} | {c['planner_ms']:.0f} |"
        for name, c in result["cases"].items()
    ]
    return head + "\n".join(rows) + f"\n\nbytes <= 0.6 static and work within 5 %: {result['reached']}"
