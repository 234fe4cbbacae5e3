"""What quality filters are worth: a scorer's precision at the top, and a candidate verified by a short anneal.

scorer      documents are stretches of installed Python packages' sources and of the texts beside them (documentation,
            licences). A judge rates 2,000 of them 0..5 by how much running prose they are, one rating in five being off
            by one; the regressor of 10 epochs learns from those. precision: among the tenth that it scores highest,
            the share that the judge without noise rates 4 or 5; base: that share among all.
annealing   a decoder of about 3M parameters (--quick: smaller) is trained on the standard library's sources with a
            schedule that stays at its peak. From there two candidates are verified, 3 seeds each: sources of installed
            packages as they are, and the same with their words shuffled. Then the same mixes are trained from scratch.
            Held-out loss is on the standard library. share: tokens of one anneal over those of one run from scratch.
"""

from __future__ import annotations

import json
import os
import random
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainwright import RunConfig, Trainer
from trainwright.data.build.quality.hashed import HashedRegressor
from trainwright.data.build.quality.training import precision_at, spearman
from trainwright.lab.statistics import mean_interval
from trainwright.lab.verification import verify_candidate

SEEDS = 3
_WORD = re.compile(r"[A-Za-z]+")


def stretches(size: int = 1200) -> Iterator[str]:
    """Of the files of installed packages, in a fixed shuffled order."""
    root = Path(sysconfig.get_paths()["purelib"])
    names = re.compile(r".*\.(?:py|txt|md|rst)|LICENSE.*|METADATA")
    files = sorted(Path(f, n) for f, _, found in os.walk(root) for n in found if names.fullmatch(n))
    random.Random(0).shuffle(files)
    for path in files:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for start in range(0, min(len(text), 4 * size), size):
            if len(part := text[start : start + size]) > size // 2:
                yield part


def judged(text: str) -> int:
    """0..5: lines that read like sentences, of all."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    prose = sum(len(_WORD.findall(x)) >= 5 and not re.search(r"[={}()\[\]<>_]", x) for x in lines)
    return min(5, int(6 * prose / max(len(lines), 1)))


def score(quick: bool) -> dict[str, Any]:
    count, labels = (1_000, 400) if quick else (20_000, 2_000)
    texts = [t for t, _ in zip(stretches(), range(count + labels), strict=False)]
    truth = np.array([judged(t) for t in texts])
    rng = np.random.default_rng(0)
    noisy = np.clip(truth + rng.choice([-1, 0, 1], len(texts), p=[0.1, 0.8, 0.1]), 0, 5)
    model = HashedRegressor.fit(texts[:labels], noisy[:labels].tolist())
    rest, good = texts[labels:], truth[labels:] >= 4
    scores = np.array(model(rest))
    base, top = float(good.mean()), precision_at(scores, good, 0.1)
    return {
        "documents": len(rest), "labels": labels, "spearman": spearman(scores, truth[labels:]), "base": base,
        "precision_top_tenth": top, "ratio": top / base,
    }  # fmt: skip


def candidates(folder: Path, characters: int) -> dict[str, Path]:
    """JSON Lines of package sources, and of the same with the words of each document shuffled."""
    rng = random.Random(1)
    rows, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).glob("t*/**/*.py")):
        text = path.read_text("utf-8", errors="ignore")[:8000]
        if len(text) > 500 and size < characters:
            rows.append(text)
            size += len(text)
    out = {}
    for name in ("clean", "shuffled"):
        out[name] = folder / f"{name}.jsonl"
        with out[name].open("w") as file:
            for text in rows:
                if name == "shuffled":
                    words = text.split(" ")
                    rng.shuffle(words)
                    text = " ".join(words)
                file.write(json.dumps({"text": text}) + "\n")
    return out


def anneal(quick: bool) -> dict[str, Any]:
    tokens, model = (
        (20_480, {"dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 128})
        if quick
        else (2_048_000, {"dim": 192, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512})
    )
    short = tokens // 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = candidates(folder, 60_000 if quick else 4_000_000)
        recipe: dict[str, Any] = {
            "run": {"name": "base", "dir": str(folder), "seed": 0},
            "model": {"name": "decoder", **model},
            "tokenizer": {"name": "bpe", "vocab_size": 512 if quick else 2048},
            "data": {"cache_dir": str(folder / "cache")},
            "optimizer": {"name": "adamw", "lr": 2e-3},
            "schedule": {"name": "constant", "warmup": 0.05},
            "train": {"tokens": tokens, "seq_len": 128 if quick else 256, "global_batch_tokens": 2048},
            "evaluate": {"tokens": 16_384 if quick else 131_072},
            "log": {"loggers": [], "progress": "none", "report": False},
        }
        trainer = Trainer(RunConfig.from_dict(recipe))
        params = trainer.model.num_params()
        trainer.fit()
        out: dict[str, Any] = {"params": params, "run_tokens": tokens, "anneal_tokens": short, "arms": {}}
        found = {
            arm: verify_candidate(folder / "base", path, tokens=short, seeds=SEEDS, out=folder / "verification")
            for arm, path in sources.items()
        }
        for arm, v in found.items():
            out["arms"][arm] = {"difference": v.difference, "interval": v.interval, "verdict": v.verdict}
            out["arms"][arm]["by_seed"] = list(v.differences.values())
        pairs = [
            found["clean"].losses["candidate"][s]["validation"] - found["shuffled"].losses["candidate"][s]["validation"]
            for s in range(SEEDS)
        ]
        out["clean_less_shuffled"] = pairs
        out["seeds_won"] = sum(p < 0 for p in pairs)
        scratch = [_from_scratch(recipe, sources, seed, folder) for seed in range(1 if quick else SEEDS)]
        out["from_scratch"] = scratch
        out["same_ranking"] = all(s["clean"] < s["shuffled"] for s in scratch) == (out["seeds_won"] == SEEDS)
        out["share"] = short / tokens
        out["mean_interval"] = mean_interval(pairs)
    return out


def _from_scratch(recipe: dict[str, Any], sources: dict[str, Path], seed: int, folder: Path) -> dict[str, float]:
    """Held-out loss on the standard library of the 70/30 mix with each candidate, trained from the start."""
    from trainwright.data.loader import Loader
    from trainwright.data.module import DataConfig, build_data
    from trainwright.lab.annealing import Mix, Slot

    losses = {}
    for arm, path in sources.items():
        run = {**recipe["run"], "name": f"scratch-{arm}-{seed}", "seed": seed}
        data = {**recipe, "run": run, "schedule": {"name": "linear", "warmup": 0.05}}
        trainer = Trainer(RunConfig.from_dict(data))
        config = trainer.config
        own = DataConfig.model_validate(
            config.data.model_dump(mode="json") | {"sources": [{"name": "jsonl", "path": str(path)}]}
        )
        tried = Slot.of(build_data(own, trainer.tokenizer, seq_len=config.train.seq_len, seed=0))
        mix = Mix.of({"base": (Slot.of(trainer.data), 0.7), "slot": (tried, 0.3)}, config, seed)
        trainer.loader.close()
        trainer.loader = Loader(
            mix.streams, mix.weights, global_batch_rows=trainer.rows, pad_id=trainer.tokenizer.pad_id
        )
        losses[arm] = float(trainer.fit()["val_loss"])
    return losses


def run(quick: bool) -> dict[str, Any]:
    return {"scorer": score(quick), "annealing": anneal(quick)}


def table(result: dict[str, Any]) -> str:
    s, a = result["scorer"], result["annealing"]
    lines = [
        f"scorer: {s['labels']:,} labels, {s['documents']:,} documents, Spearman {s['spearman']:.3f}; precision of the "
        f"top tenth {s['precision_top_tenth']:.3f}, base {s['base']:.3f}: {s['ratio']:.2f} times",
        "",
        f"anneal: {a['params']:,} parameters, {a['run_tokens']:,} tokens, anneals of {a['anneal_tokens']:,} "
        f"({a['share']:.0%}); clean below shuffled in {a['seeds_won']} of {SEEDS} seeds, "
        f"{'the same' if a['same_ranking'] else 'another'} ranking as from scratch",
        "",
        "| candidate | difference to the default mix | 95 % interval | verdict | from scratch |",
        "|---|---|---|---|---|",
    ]
    for arm, row in a["arms"].items():
        low, high = row["interval"]
        scratch = sum(x[arm] for x in a["from_scratch"]) / len(a["from_scratch"])
        lines.append(
            f"| {arm} | {row['difference']:+.4f} | {low:+.4f} to {high:+.4f} | {row['verdict']} | {scratch:.4f} |"
        )
    return "\n".join(lines)
