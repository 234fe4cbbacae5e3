"""What asynchronous checkpoints cost: tokens/s with a save every 50 steps against none, in turn, in one run.

    python benchmarks/checkpoint.py [--quick] [--json FILE]

A 10M-parameter model through the real Trainer. Each turn trains without and with checkpoints from the same start; the
time runs from the fifth step to the last, so that set-up and the closing save of both arms are left out and every
periodic save, its snapshot and its background writing are in. Writes benchmarks/results/checkpoint.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from trainwright import RunConfig, Trainer

WARM_UP = 5


def seconds_per_step(folder: str, name: str, steps: int, every: int | None) -> float:
    config = RunConfig.load(
        {
            "run": {"name": name, "dir": folder},
            "model": {"name": "decoder", "size": "10m"},
            "tokenizer": {"name": "bpe", "vocab_size": 4096},
            "precision": "fp32",
            "train": {"steps": steps, "seq_len": 256, "global_batch_tokens": 1024},
            "checkpoint": {"every": every},
            "evaluate": {"tokens": 256},
            "log": {"loggers": [], "progress": "none", "report": False},
        }
    )
    times: list[float] = []
    Trainer(config).fit(on_step=lambda row: times.append(time.perf_counter()))
    return (times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    turns, steps = (1, 106) if args.quick else (5, 156)
    pairs = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            plain = seconds_per_step(folder, "plain", steps, None)
            saving = seconds_per_step(folder, "saving", steps, 50)
        pairs.append((plain, saving))
        print(
            f"turn {turn + 1}: {plain * 1e3:.1f} ms a step without, {saving * 1e3:.1f} ms with checkpoints", flush=True
        )
    costs = [1 - plain / saving for plain, saving in pairs]
    result = {"tokens_per_s_lost": statistics.median(costs), "range": [min(costs), max(costs)], "turns": turns}
    print(f"tokens/s lost to a checkpoint every 50 steps: {100 * result['tokens_per_s_lost']:.2f} % (median)")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))
    if not args.quick:
        out = Path(__file__).parent / "results" / "checkpoint.md"
        out.parent.mkdir(exist_ok=True)
        rows = "\n".join(f"| {i + 1} | {a * 1e3:.1f} | {b * 1e3:.1f} |" for i, (a, b) in enumerate(pairs))
        lost = (
            f"**{100 * result['tokens_per_s_lost']:.2f} %** (range {100 * min(costs):.2f} to {100 * max(costs):.2f} %)"
        )
        out.write_text(
            "# Cost of asynchronous checkpoints\n\n`benchmarks/checkpoint.py`: 10M parameters, fp32, CPU, a save "
            f"every 50 steps.\n\n| turn | ms/step without | ms/step with |\n|---|---|---|\n{rows}\n\n"
            f"Tokens/s lost, median: {lost}.\n"
        )


if __name__ == "__main__":
    main()
