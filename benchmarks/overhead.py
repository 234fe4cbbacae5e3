"""What the tool itself costs a user: the command line's start, and the log's and display's share of a step.

    python benchmarks/overhead.py [--json FILE]

Best of many turns, in microseconds; ``--help`` in milliseconds. Asked: ``--help`` below 500 ms, a step's display below
50 us, a row of metrics.jsonl below 200 us, which is 0.02 % of a step of a second.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from trainwright.train.metrics import MetricsWriter
from trainwright.train.progress import Bar, Lines

ROW = {"step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 2e4, "seconds": 1.0, "tokens": 4096}
ASKED = {"help_ms": 500.0, "bar_us": 50.0, "lines_us": 50.0, "metrics_row_us": 200.0}


def best(turn: Callable[[], None], turns: int, each: int = 1) -> float:
    """Seconds of the fastest of ``turns``, over ``each``."""
    found = []
    for _ in range(turns):
        start = time.perf_counter()
        turn()
        found.append((time.perf_counter() - start) / each)
    return min(found)


def display(kind: type, **extra: object) -> float:
    shown = kind(100_000, **extra)
    shown.start(0)
    shown.update(ROW)

    def turn() -> None:
        for step in range(100):
            shown.update({**ROW, "step": step})

    seconds = best(turn, 10, 100)
    shown.close()
    return seconds


def metrics() -> float:
    row = {f"figure_{i}": 1.0 / (i + 3) for i in range(15)}
    with tempfile.TemporaryDirectory() as folder, MetricsWriter(Path(folder) / "m.jsonl") as writer:

        def turn() -> None:
            for _ in range(50):
                writer.write(row)

        return best(turn, 20, 50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    command = [sys.executable, "-m", "trainwright", "--help"]
    figures = {
        "help_ms": 1e3 * best(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL) and None, 5),
        "bar_us": 1e6 * display(Bar, console=Console(file=io.StringIO(), force_terminal=True, width=140)),
        "lines_us": 1e6 * display(Lines, out=io.StringIO()),
        "metrics_row_us": 1e6 * metrics(),
    }
    for name, value in figures.items():
        print(f"{name:16}{value:10.1f}   asked: at most {ASKED[name]:.0f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
