"""SALT: what a small teacher's labels in the first steps are worth, beside none and labels to the end.

Python source as bytes, a teacher of 0.12M parameters trained three times as long as the student of 0.63M, 400 steps, of
which 68 with the teacher, w 0.667, rho 0.25, three seeds. The gate: the mean of SALT is at most that of the baseline
less 0.003 nats, and labels on all steps are worse than SALT.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from trainwright import RunConfig, Trainer
from trainwright.optim.base import reported

TEACHER = {"name": "decoder", "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 170}
STUDENT = {"name": "decoder", "dim": 128, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 344}


def _train(folder: Path, name: str, seed: int, steps: int, model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    recipe = {
        "run": {"name": name, "dir": str(folder), "seed": seed, "device": "cpu"},
        "model": model,
        "tokenizer": {"name": "bytes"},
        "data": {"cache_dir": str(folder / "cache")},
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "precision": {"name": "fp32"},
        "monitors": [],
        "train": {"steps": steps, "seq_len": 128, "global_batch_tokens": 2048},
        "evaluate": {"tokens": 131072},
        "log": {"loggers": [], "progress": "none", "report": False},
        **changes,
    }
    trainer = Trainer(RunConfig.load(recipe))
    summary = trainer.fit()
    figures = {k: summary[k] for k in ("val_loss", "seconds")} | {"parameters": trainer.model.num_params()}
    return figures | {k: v for k, v in reported(trainer.objective).items() if k.startswith("teacher_flops")}


def run(quick: bool) -> dict[str, Any]:
    steps, seeds = (12, [1]) if quick else (400, [1, 2, 3])
    stage = round(0.17 * steps)
    found: dict[str, Any] = {"steps": steps, "teacher_steps": stage, "seeds": seeds, "arms": {}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found["teacher"] = _train(folder, "teacher", 0, 3 * steps, TEACHER)
        salt = {"name": "salt", "teacher": str(folder / "teacher"), "weight": 0.667, "rho": 0.25}
        arms: dict[str, dict[str, Any]] = {
            "baseline": {"name": "next_token"},
            "SALT": {**salt, "steps": stage},
            "labels on all steps": {**salt, "steps": steps},
            "SALT, rho 1": {**salt, "steps": stage, "rho": 1.0},
        }
        for name, objective in arms.items():
            found["arms"][name] = [
                _train(folder, f"{name} {seed}", seed, steps, STUDENT, objective=objective) for seed in seeds
            ]
    mean = {name: statistics.fmean(r["val_loss"] for r in runs) for name, runs in found["arms"].items()}
    found["mean"] = mean
    found["holds"] = {
        "SALT at least 0.003 below the baseline": mean["SALT"] <= mean["baseline"] - 0.003,
        "labels on all steps worse than SALT": mean["labels on all steps"] > mean["SALT"],
    }
    return found


def table(result: dict[str, Any]) -> str:
    lines = [
        f"Teacher: {result['teacher']['parameters']:,} parameters, validation loss {result['teacher']['val_loss']:.4f}",
        "",
        "| arm | " + " | ".join(f"seed {s}" for s in result["seeds"]) + " | mean | teacher's share of FLOPs |",
        "|---|" + "---|" * (len(result["seeds"]) + 2),
    ]
    for name, runs in result["arms"].items():
        losses = " | ".join(f"{r['val_loss']:.4f}" for r in runs)
        share = runs[0].get("teacher_flops_share", 0.0)
        lines.append(f"| {name} | {losses} | {result['mean'][name]:.4f} | {share:.1%} |")
    lines += ["", *(f"{what}: {'yes' if yes else 'no'}" for what, yes in result["holds"].items())]
    return "\n".join(lines)
