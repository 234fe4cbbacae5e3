"""Panda LLM's ablation on a tiny model: quantity, quality, language and order of instruction data (B003).

At one budget of tokens, on the files that recipes/panda_data.py makes: quantity (parts of the pairs), quality (all
pairs, or docstrings alone), language (shares of zh, where chatterbot-corpus is installed) and order. Figure: multiple
choice of four options by the options' log-likelihood; 25 % is chance.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from effect_panda import CONTEXT, stage, table

from trainwright.lab.stages import run_stages
from trainwright.train.multiple_choice import Question, multiple_choice, read_questions
from trainwright.train.runs import open_model

__all__ = ["run", "table"]
MAKE = Path(__file__).resolve().parents[1] / "recipes" / "panda_data.py"


def _fits(question: Question) -> bool:
    """Whether the models, of bytes, can read it with each of its options."""
    return all(len(f"{question.prompt} {option}".encode()) < CONTEXT for option in question.options)


def study(data: Path, seed: int, root: Path, quick: bool, budget: int) -> dict[str, float]:
    root.mkdir(parents=True)
    questions = [q for q in read_questions(data / "choices.jsonl") if _fits(q)][: 12 if quick else None]
    names = {p.stem: {"name": "panda_llm", "path": str(p)} for p in sorted(data.glob("*.jsonl")) if p.stem != "choices"}
    plain = names.pop("documents")
    every = list(names.values())
    budget = 20_000 if quick else budget

    def one(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [stage(sources, budget, seed, root, quick, 3e-3)]

    arms = {f"quantity {q:g}": one([plain, *({**s, "up_sample": q} for s in every)]) for q in (0.25, 0.5, 1.0)}
    arms["quality docstrings alone"] = one([plain, names["docstrings"]])
    if "zh" in names:
        for zh in (0.1, 0.5, 0.9):
            arms[f"language zh {zh:g}"] = one([{**names["en"], "weight": 1 - zh}, {**names["zh"], "weight": zh}])
    arms["order up-sampled 10"] = one([plain, *({**s, "up_sample": 10} for s in every)])
    half = budget // 2 // 1024 * 1024
    arms["order staged"] = [
        stage([plain], budget - half, seed, root, quick, 3e-3), stage(every, half, seed, root, quick, 1e-3),
    ]  # fmt: skip
    out = {}
    for arm, stages in arms.items():
        model, tokenizer = open_model(run_stages(stages, root / re.sub(r"\W+", "-", arm)))
        out[arm] = multiple_choice(model, tokenizer, questions, normalise="bytes")["accuracy"]
    return out


def run(quick: bool) -> dict[str, Any]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        subprocess.run([sys.executable, str(MAKE), str(data)], check=True, capture_output=True)
        for seed in range(1 if quick else 3):
            found.append(study(data, seed, Path(folder) / str(seed), quick, 300_000))
    return {"seeds": found}
