"""Whether telling what code does helps a small model to run it: outputs of unseen programs got right.

Arms see the same programs, as often, with the same model, order and number of updates; only what stands before the
answer differs. Judged by greedy decoding on programs of another seed that none of them has seen, by the answer alone.
The aim of the card (SemCoder, arXiv:2406.01006): monologue at least 10 points above answer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainwright import RunConfig, Trainer
from trainwright.core import registry
from trainwright.data.synthetic.pyx.rows import answer_of
from trainwright.models.generate import generate

FAMILY = "both"  # programs over integers and over lists
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


def one(arm: str, seed: int, options: SimpleNamespace, folder: Path) -> dict[str, Any]:
    recipe = {
        "run": {"name": f"{arm}-{seed}", "dir": str(folder / "runs"), "seed": seed},
        "model": {"name": "decoder", "family": "llama", **SIZES[options.size]},
        "tokenizer": {"name": "bytes"},
        "data": {
            "sources": [source(arm, options.samples, seed, FAMILY)],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.02,
        },
        "objective": "sft",
        "optimizer": {"name": "adamw", "lr": 2e-3},
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
    seen = {r.question for r in registry.build("source", source(arm, options.samples, seed, FAMILY)).rows()}
    unseen = registry.build("source", source(arm, options.test + 200, TEST_SEED, FAMILY)).rows()
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


def run(quick: bool) -> dict[str, Any]:
    full = {"size": "3m", "samples": 4000, "epochs": 6, "test": 300}
    options = SimpleNamespace(**({"size": "1m", "samples": 60, "epochs": 1, "test": 8} if quick else full))
    with tempfile.TemporaryDirectory() as folder:
        runs = [one(arm, seed, options, Path(folder)) for seed in range(1 if quick else 3) for arm in ARMS]
    return {**vars(options), "runs": runs}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['samples']} programs, {result['epochs']} epochs, model {result['size']}.", ""]
    lines += ["| arm | outputs right | by seed |", "|---|---|---|"]
    for arm in ARMS:
        right = [r["accuracy"] for r in result["runs"] if r["arm"] == arm]
        lines.append(f"| {arm} | {statistics.mean(right):.1%} | {', '.join(f'{v:.1%}' for v in right)} |")
    return "\n".join(lines)
