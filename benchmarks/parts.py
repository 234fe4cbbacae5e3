"""Runs the parts of a benchmark: each a module of this folder with ``run(quick) -> dict`` (plain JSON values) and
``table(result) -> str`` (Markdown), whose docstring's first line says what it measures."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peers import machine


def main(about: str | None, parts: Mapping[str, str]) -> None:
    """The command line of a benchmark. parts  module by name"""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    parser.add_argument("--only", nargs="+", choices=sorted(parts), default=sorted(parts), metavar="PART")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    results: dict[str, Any] = {"machine": machine(torch.get_num_threads()), "quick": args.quick}
    print(results["machine"], flush=True)
    for name in args.only:
        part = importlib.import_module(parts[name])
        started = time.perf_counter()
        results[name] = part.run(args.quick)
        results[name]["seconds"] = time.perf_counter() - started
        print(f"\n## {name}: {(part.__doc__ or '').strip().splitlines()[0]}\n\n{part.table(results[name])}", flush=True)
        if args.json:  # after each part, so that a later one's failure loses nothing
            args.json.write_text(json.dumps(results, indent=2))
