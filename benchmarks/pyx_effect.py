"""Whether telling what code does helps a small model to run it: outputs of unseen programs got right.

    python benchmarks/pyx_effect.py                    # 3 seeds x (answer, scratchpad, monologue), 3m model
    python benchmarks/pyx_effect.py --quick            # a minute, for the script's own sake
    python benchmarks/pyx_effect.py --json FILE --seeds 0 1 2 --samples 4000 --epochs 4

Arms see the same programs, as often, with the same model, order and number of updates; only what stands before the
answer differs. Judged by greedy decoding on programs of another seed that none of them has seen, by the answer alone.
The aim of the card (SemCoder, arXiv:2406.01006): monologue at least 10 points above answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from trainwright import RunConfig, Trainer
from trainwright.core import registry
from trainwright.data.synthetic.pyx.rows import answer_of
from trainwright.models.generate import generate

ARMS = ("answer", "scratchpad", "monologue")
TEST_SEED = 10_000
SIZES: dict[str, dict[str, Any]] = {
    "1m": {"size": "1m"},
    "3m": {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 704},  # 3.3M with bytes
}


def source(reasoning: str, samples: int, seed: int, family: str) -> dict[str, Any]:
    return {
        "name": "pyx", "samples": samples, "seed": seed, "kinds": ["forward"], "reasoning": reasoning,
        "style": "brief", "family": family,
    }  # fmt: skip


def run(arm: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    recipe = {
        "run": {"name": f"{arm}-{seed}", "dir": str(folder / "runs"), "seed": seed},
        "model": {"name": "decoder", "family": "llama", **SIZES[options.size]},
        "tokenizer": {"name": "bytes"},
        "data": {
            "sources": [source(arm, options.samples, seed, options.family)],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.02,
        },
        "objective": "sft",
        "optimizer": {"name": "adamw", "lr": options.lr},
        "schedule": {"name": "cosine"},
        # Rows are counted and not tokens: each arm passes all programs the same number of times.
        "train": {"epochs": options.epochs, "seq_len": 1024, "global_batch_tokens": 8192},
        "evaluate": {"tokens": 8192},
        "log": {"loggers": [], "progress": "none", "report": False},
    }
    started = time.monotonic()
    trainer = Trainer(RunConfig.load(recipe))
    trainer.fit()
    trained = time.monotonic() - started
    seen = {r.question for r in registry.build("source", source(arm, options.samples, seed, options.family)).rows()}
    unseen = registry.build("source", source(arm, options.test + 200, TEST_SEED, options.family)).rows()
    rows = [r for r in unseen if r.question not in seen][: options.test]
    right = 0
    for start in range(0, len(rows), 32):
        batch = rows[start : start + 32]
        said = generate(
            trainer.model, trainer.tokenizer, [r.to_pair()["prompt"] for r in batch],
            max_new_tokens=600, temperature=0.0, stop=["[/ANSWER]"],
        )  # fmt: skip
        right += sum(answer_of(s + "[/ANSWER]") == answer_of(r.response) for s, r in zip(said, batch, strict=True))
    return {
        "arm": arm, "seed": seed, "accuracy": right / len(rows), "tested": len(rows), "seconds": round(trained, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--size", default="3m", choices=SIZES)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--family", default="both", choices=("integers", "lists", "both"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.size, options.samples, options.epochs, options.test = [0], "1m", 60, 1, 8
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for arm in options.arms:
                found.append(run(arm, seed, options, Path(folder)))
                print(found[-1], flush=True)
    table = {}
    for arm in options.arms:
        scores = [100 * f["accuracy"] for f in found if f["arm"] == arm]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        table[arm] = {"accuracy": statistics.mean(scores), "sd": spread}
        print(f"{arm:>12}: {statistics.mean(scores):5.1f} % of outputs right (sd {spread:.1f}, {len(scores)} seeds)")
    if options.json:
        options.json.write_text(json.dumps({"runs": found, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
