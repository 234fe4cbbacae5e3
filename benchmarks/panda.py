"""Panda LLM's question on a tiny model: what in the data teaches a model to follow instructions (B003).

    python benchmarks/panda.py effect [--quick] [--seeds 3] [--json FILE]
    python benchmarks/panda.py study --data data/panda [--quick] [--seeds 3] [--json FILE]

effect  96 % text and 4 % instruction pairs at one budget of tokens, in three orders: mixed; the pairs up-sampled ten
        times; staged, the text first and the pairs last. Figure: share of greedy answers to held-out instructions that
        have the format of the pairs and end by themselves. Expected: staged or up-sampled ten points over mixed.
study   quantity (parts of the pairs), quality (all pairs, or docstrings alone), language (shares of zh) and order at
        one budget, on the files of recipes/panda_data.py. Figure: multiple choice by the options' log-likelihood.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from trainwright.core.errors import DataError
from trainwright.lab.stages import run_stages
from trainwright.models.generate import generate_ids
from trainwright.train.multiple_choice import multiple_choice, read_questions
from trainwright.train.runs import open_model

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
        "model": {"name": "decoder", **size, "max_seq_len": 256},
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


def study(data: Path, seed: int, root: Path, quick: bool, budget: int) -> dict[str, float]:
    root.mkdir(parents=True)
    questions = read_questions(data / "choices.jsonl")[: 12 if quick else None]
    names = {p.stem: {"name": "panda_llm", "path": str(p)} for p in sorted(data.glob("*.jsonl")) if p.stem != "choices"}
    if "documents" not in names or "docstrings" not in names:
        raise DataError(f"{data} lacks documents.jsonl or docstrings.jsonl; make them with recipes/panda_data.py")
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
        print(f"  {arm}: {out[arm]:.3f}", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="What in the data teaches a model to follow instructions.")
    parser.add_argument("what", choices=["effect", "study"])
    parser.add_argument("--data", type=Path, default=Path("data/panda"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1 if args.quick else args.seeds):
            root = Path(folder) / str(seed)
            if args.what == "effect":
                found.append(effect(seed, root, args.quick, args.tokens))
            else:
                found.append(study(args.data, seed, root, args.quick, args.tokens))
            print(seed, found[-1], flush=True)
    print("| arm | mean | by seed |\n|---|---|---|")
    for arm in found[0]:
        values = [f[arm] for f in found]
        print(f"| {arm} | {sum(values) / len(values):.1%} | {', '.join(f'{v:.1%}' for v in values)} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
