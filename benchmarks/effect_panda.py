"""Panda LLM's order of stages on a tiny model: what teaches a model to follow instructions (B003).

96 % text and 4 % instruction pairs at one budget of tokens, in three orders: mixed; the pairs up-sampled ten times;
staged, the text first and the pairs last. Figure: share of greedy answers to held-out instructions that have the format
of the pairs and end by themselves. Expected: staged or up-sampled ten points over mixed.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from trainwright.lab.stages import run_stages
from trainwright.models.generate import generate_ids
from trainwright.train.runs import open_model

CONTEXT = 256  # tokens that the models take
FORMAT = re.compile(r" Answer: [a-z ]+ is a kind of [a-z]+\.")
KINDS = {
    "animal": "ox cat dog hen bee elk fox owl pig rat emu yak ape cow ant",
    "tool": "saw axe awl adze pick rake file lathe drill wrench chisel hammer pliers spade hoe",
    "fruit": "fig pear plum lime peach mango apple grape lemon melon cherry date kiwi guava quince",
    "colour": "red blue green grey pink black white teal navy olive maroon purple orange violet brown",
}
ASKED = ["Define {}:", "What is {}?", "Explain {}:", "Describe {}:"]


def pairs(held_out: bool) -> list[dict[str, str]]:
    """Instructions about words; each fifth word is held out."""
    out = []
    for kind, words in KINDS.items():
        for i, word in enumerate(words.split()):
            if (i % 5 == 4) == held_out:
                out += [{"inputs": q.format(word), "targets": f"Answer: {word} is a kind of {kind}."} for q in ASKED]
    return out


def text(tokens: int, seed: int) -> list[dict[str, str]]:
    """Plain sentences about the same words, none of which is a question or an answer: ``tokens`` bytes of them."""
    rng = random.Random(seed)
    words = [w for ws in KINDS.values() for w in ws.split()]
    verbs, places = ["saw", "took", "left", "kept", "sold", "made"], ["in town", "at home", "by the sea", "last year"]
    out, size = [], 0
    while size < tokens:
        lines = [
            f"They {rng.choice(verbs)} a {rng.choice(words)} and a {rng.choice(words)} {rng.choice(places)}."
            for _ in range(rng.randint(1, 3))
        ]
        out.append({"text": " ".join(lines)})
        size += len(out[-1]["text"]) + 2
    return out


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def stage(
    sources: list[dict[str, Any]], tokens: int, seed: int, folder: Path, quick: bool, lr: float
) -> dict[str, Any]:
    size = (
        {"dim": 64, "n_layers": 2, "n_heads": 2, "ffn_dim": 128} if quick else {"dim": 128, "n_layers": 2, "n_heads": 4}
    )
    return {
        "run": {"seed": seed},
        "model": {"name": "decoder", **size, "max_seq_len": CONTEXT},
        "tokenizer": {"name": "bytes"},
        "data": {"sources": sources, "cache_dir": str(folder / "cache"), "validation_fraction": 0.0},
        "objective": "sft",
        "optimizer": {"name": "adamw", "lr": lr, "betas": [0.9, 0.99], "weight_decay": 0.0},
        "schedule": {"name": "cosine", "warmup": 0.02},
        "train": {"tokens": tokens, "seq_len": 128, "global_batch_tokens": 1024},
        "checkpoint": {"asynchronous": False},
        "log": {"loggers": [], "progress": "none", "report": False},
    }


def format_accuracy(folder: Path, prompts: list[str], max_new_tokens: int = 60) -> float:
    model, tokenizer = open_model(folder)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [[*begin, *tokenizer.encode(p)] for p in prompts]
    answers = generate_ids(model, ids, max_new_tokens=max_new_tokens, temperature=0.0, eos_id=tokenizer.eos_id)
    good = [len(a) < max_new_tokens and FORMAT.fullmatch(tokenizer.decode(a)) is not None for a in answers]
    return sum(good) / len(good)


def effect(seed: int, root: Path, quick: bool, budget: int) -> dict[str, float]:
    root.mkdir(parents=True)
    instructions = pairs(held_out=False)
    size = sum(len(r["inputs"]) + len(r["targets"]) + 3 for r in instructions)
    plain = {"name": "panda_llm", "path": write(root / "text.jsonl", text(size * 24, seed))}
    asked = {"name": "panda_llm", "path": write(root / "pairs.jsonl", instructions)}
    budget = 20_000 if quick else budget
    last = max(budget * 4 // 100 // 1024, 1) * 1024
    arms = {
        "mixed": [stage([plain, asked], budget, seed, root, quick, 3e-3)],
        "up_sampled_10": [stage([plain, {**asked, "up_sample": 10}], budget, seed, root, quick, 3e-3)],
        "staged": [
            stage([plain], budget - last, seed, root, quick, 3e-3),
            stage([asked], last, seed, root, quick, 3e-3),
        ],
    }
    prompts = [r["inputs"] for r in pairs(held_out=True)]
    return {arm: format_accuracy(run_stages(stages, root / arm), prompts) for arm, stages in arms.items()}


def run(quick: bool) -> dict[str, Any]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1 if quick else 3):
            found.append(effect(seed, Path(folder) / str(seed), quick, 300_000))
    return {"seeds": found}


def table(result: dict[str, Any]) -> str:
    lines = ["| arm | mean | by seed |", "|---|---|---|"]
    for arm in result["seeds"][0]:
        values = [f[arm] for f in result["seeds"]]
        lines.append(f"| {arm} | {sum(values) / len(values):.1%} | {', '.join(f'{v:.1%}' for v in values)} |")
    return "\n".join(lines)
