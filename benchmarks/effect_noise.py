"""What do mixers and selectors spend on noise? Three domains: text, pure noise, and one that is learnt at once.

Each method trains the same small model on the same number of tokens, in equal shares to begin with. Given are the share
of the rows that were noise, that share over uniform's, and the validation loss on the text. Expected: the medium loss
band and DoReMi spend at most 0.6 of uniform's on noise, while the high band and ODM, which take a high loss for much to
learn, drift to it.
"""

from __future__ import annotations

import random
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from trainwright import RunConfig, Trainer
from trainwright.train.evaluate import evaluate


def make_domains(folder: Path, kilobytes: int) -> None:
    rng = random.Random(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    text = "".join(f.read_text("utf-8", "replace") for f in files if "site-packages" not in f.parts)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789 ()=.,:\n"
    domains = {
        "text": text,
        "noise": "".join(rng.choice(letters) for _ in range(kilobytes * 1000)),
        "learnt": "the same line again and again.\n" * (kilobytes * 1000 // 31 + 1),
    }
    for name, content in domains.items():
        (folder / name).mkdir()
        for i in range(kilobytes // 4):
            (folder / name / f"{i:04d}.txt").write_text(content[4000 * i : 4000 * (i + 1)])


def recipe(folder: Path, name: str, steps: int, seed: int, data: dict[str, Any]) -> dict[str, Any]:
    sources = [{"name": "text", "path": str(folder / n), "weight": 1.0} for n in ("text", "noise", "learnt")]
    return {
        "run": {"name": f"{name}-{seed}", "dir": str(folder / "runs"), "seed": seed, "device": "cpu"},
        "model": {"name": "decoder", "dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 128},
        "tokenizer": {"name": "bytes"},
        "data": {"sources": sources, "cache_dir": str(folder / "cache"), "validation_fraction": 0.05, **data},
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "precision": {"name": "fp32"},
        "train": {"steps": steps, "seq_len": 64, "global_batch_tokens": 1024},
        "evaluate": {"tokens": 16_384},
        "log": {"loggers": [], "progress": "none", "report": False},
    }


def noise_share(trainer: Trainer) -> list[str]:
    """Name of the domain of every row that was taken, filled while training."""
    taken: list[str] = []
    take = trainer.loader.mixture.take

    def watched(count: int) -> Any:
        refs = take(count)
        taken.extend(Path(ref.stream).name for ref in refs)
        return refs

    trainer.loader.mixture.take = watched  # type: ignore[method-assign]
    return taken


def one(folder: Path, name: str, steps: int, seed: int, data: dict[str, Any]) -> dict[str, float]:
    # Nothing is made ahead, so that only rows that are trained on are counted.
    trainer = Trainer(RunConfig.load(recipe(folder, name, steps, seed, {"prefetch": 0, **data})))
    taken = noise_share(trainer)
    trainer.fit()
    source = next(n for n in trainer.data.validation if Path(n).name == "text")
    held_out = trainer.data.validation_batches(64, 16_384, source=source)
    loss = evaluate(trainer.parallel, trainer.objective, held_out, trainer.device, trainer.precision)["val_loss"]
    return {f"{n} rows": taken.count(n) / len(taken) for n in ("noise", "text", "learnt")} | {"text loss": loss}


def methods(folder: Path, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    every = max(steps // 15, 2)
    pool = {"update_step": every, "pool_rows": every * 16 * 4, "renew": True}
    return {
        "uniform": {},
        "random selection": {"selector": {"name": "random", **pool}},
        "loss, medium": {"selector": {"name": "loss", "focus": "medium", "focus_weight": 5.0, **pool}},
        "loss, high": {"selector": {"name": "loss", "focus": "high", **pool}},
        "doremi": {"mixer": {"name": "doremi", "reference": str(folder / "runs" / f"reference-{seed}")}},
        "odm": {"mixer": {"name": "odm"}},
    }


def run(quick: bool) -> dict[str, Any]:
    steps, seeds, kilobytes = (12, 1, 200) if quick else (300, 3, 800)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_domains(folder, kilobytes)
        for seed in range(seeds):
            one(folder, "reference", 2 * steps, seed, {})
            for name, data in methods(folder, steps, seed).items():
                found.setdefault(name, []).append(one(folder, name, steps, seed, data))
    means = {name: {k: float(np.mean([r[k] for r in rows])) for k in rows[0]} for name, rows in found.items()}
    base = means["uniform"]["noise rows"]
    over = {name: {**row, "noise over uniform": row["noise rows"] / base} for name, row in means.items()}
    return {"steps": steps, "seeds": seeds, "means": over, "by_seed": found}


def table(result: dict[str, Any]) -> str:
    columns = list(next(iter(result["means"].values())))
    lines = [f"| method | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(f'{row[c]:.3f}' for c in columns)} |" for name, row in result["means"].items()]
    return "\n".join([f"{result['steps']} steps, mean of {result['seeds']} seeds.", "", *lines])
