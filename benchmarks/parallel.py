"""Figures of training on several processes: one run, one table a part.

    python benchmarks/parallel.py [--quick] [--only PART ...] [--json FILE]

A part is a module of this folder with ``run(quick) -> dict`` (plain JSON values) and ``table(result) -> str``
(Markdown); its docstring's first line says what it measures. New parts are entered in PARTS. Bytes and balance are
exact; times are ratios within one run, or simulated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from peers import machine

PARTS = {
    "bytescale": "parallel_bytescale",
    "flashcp": "parallel_flashcp",
    "basp": "parallel_basp",
    "flexsp": "parallel_flexsp",
    "memory": "parallel_memory",
    "s2": "parallel_s2",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), default=sorted(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    results: dict[str, Any] = {"machine": machine(torch.get_num_threads()), "quick": args.quick}
    print(results["machine"], flush=True)
    for name in args.only:
        part = importlib.import_module(PARTS[name])
        started = time.perf_counter()
        results[name] = part.run(args.quick)
        results[name]["seconds"] = time.perf_counter() - started
        print(f"\n## {name}: {(part.__doc__ or '').strip().splitlines()[0]}\n\n{part.table(results[name])}", flush=True)
        if args.json:  # after each part, so that a later one's failure loses nothing
            args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
