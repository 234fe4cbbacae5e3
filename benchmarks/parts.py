"""Runs the parts of a benchmark: each a module of this folder with ``run(quick) -> dict`` (plain JSON values) and
``table(result) -> str`` (Markdown), whose docstring's first line says what it measures."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import date
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
    parser.add_argument("--record", type=Path, help="Markdown file whose sections of these parts are written anew")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    results: dict[str, Any] = {"machine": machine(torch.get_num_threads()), "quick": args.quick}
    print(results["machine"], flush=True)
    for name in args.only:
        part = importlib.import_module(parts[name])
        started = time.perf_counter()
        results[name] = part.run(args.quick)
        results[name]["seconds"] = time.perf_counter() - started
        heading = f"## {name}: {(part.__doc__ or '').strip().splitlines()[0]}"
        print(f"\n{heading}\n\n{part.table(results[name])}", flush=True)
        if args.json:  # after each part, so that a later one's failure loses nothing
            args.json.write_text(json.dumps(results, indent=2))
        if args.record:
            where = f"{results['machine']}; `python {sys.argv[0]} --only {name}{' --quick' if args.quick else ''}`"
            _record(args.record, name, f"{heading}\n\n{where}, {date.today()}.\n\n{part.table(results[name])}")


def _record(file: Path, name: str, section: str) -> None:
    """Put ``section`` into the place of the one of this part, or behind the others."""
    title, *held = re.split(
        r"^(?=## )", file.read_text() if file.exists() else f"# Figures of {file.stem}\n", flags=re.M
    )
    by_name = {s.split(":")[0].removeprefix("## "): s.strip() for s in held}
    by_name[name] = section.strip()
    file.write_text("\n\n".join([title.strip(), *(by_name[n] for n in sorted(by_name))]) + "\n")
