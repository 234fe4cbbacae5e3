"""What static and dynamic noise in traces do to a model trained on them from scratch (B058, arXiv:2402.04004).

A model of some 2.5M parameters learns running sums with their traces: clean, with static noise p=0.1 and with dynamic
noise p=0.1, in all samples (rho=1). Accuracy is that of greedy answers to clean questions that were held out.
Expected: static within 10 points of clean, dynamic at least 10 points below static. Some 12 minutes of one core a seed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trainwright import RunConfig, Trainer
from trainwright.data.sources.tint import TintSource
from trainwright.data.synthetic.tint_check import exact_match, trace_validity
from trainwright.models.generate import generate_ids

ARMS: dict[str, dict[str, Any]] = {
    "clean": {},
    "static": {"noise": "static", "p": 0.1},
    "dynamic": {"noise": "dynamic", "p": 0.1},
}
TASK = {"name": "tint", "task": "running_sum", "count": [3, 5], "low": 0, "high": 99}


def recipe(arm: str, seed: int, folder: Path, quick: bool, steps: int) -> dict[str, Any]:
    size = (
        {"dim": 64, "n_layers": 2, "n_heads": 2, "ffn_dim": 128} if quick else {"dim": 256, "n_layers": 3, "n_heads": 4}
    )
    return {
        "run": {"name": f"{arm}-{seed}", "dir": str(folder), "seed": seed},
        "model": {"name": "decoder", **size},
        "tokenizer": {"name": "bytes"},
        "data": {
            "sources": [{**TASK, "samples": 400 if quick else 20_000, "seed": seed, **ARMS[arm]}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.05,
        },
        "objective": "sft",
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "schedule": {"name": "cosine", "warmup": 0.05},
        "train": {"steps": 20 if quick else steps, "seq_len": 256, "global_batch_tokens": 4096},
        "checkpoint": {"asynchronous": False},
        "log": {"loggers": [], "progress": "none", "report": False},
    }


def measure(arm: str, seed: int, folder: Path, quick: bool, steps: int) -> dict[str, float]:
    trainer = Trainer(RunConfig.load(recipe(arm, seed, folder, quick, steps)))
    figures = trainer.fit()
    source = trainer.config.data.sources[0]
    assert isinstance(source, TintSource)
    generator = source.generator(clean=True)
    held = [int(d.id.rsplit("/", 1)[1]) for d in source.documents("validation", 0.05)]
    samples = [generator(i) for i in held[: 20 if quick else 200]]
    tokenizer = trainer.tokenizer
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompts = [[*begin, *tokenizer.encode(s.question + "\n")] for s in samples]
    model = trainer.parallel.model.eval()
    out = []
    for start in range(0, len(prompts), 50):
        ids = generate_ids(
            model, prompts[start : start + 50], max_new_tokens=128, temperature=0.0, eos_id=tokenizer.eos_id
        )
        out += [tokenizer.decode(i) for i in ids]
    return {
        "accuracy": exact_match(out, samples),
        "valid_traces": trace_validity(out, samples),
        "val_loss": float(figures["val_loss"]),
    }


def run(quick: bool) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1 if quick else 3):
            for arm, rows in found.items():
                rows.append(measure(arm, seed, Path(folder), quick, 1500))
    return {"seeds": found}


def table(result: dict[str, Any]) -> str:
    lines = ["| arm | accuracy | by seed | valid traces |", "|---|---|---|---|"]
    for arm, rows in result["seeds"].items():
        right = [r["accuracy"] for r in rows]
        traces = sum(r["valid_traces"] for r in rows) / len(rows)
        each = ", ".join(f"{v:.1%}" for v in right)
        lines.append(f"| {arm} | {sum(right) / len(right):.1%} | {each} | {traces:.1%} |")
    return "\n".join(lines)
