"""URL conditioning: loss with and without the context, and how often guided samples hit the source that was asked for.

Four sources of real text that come with the packages: Python code, docstrings, C++ headers of torch, and the
descriptions of installed packages. Documents are at most 1500 characters, each with a URL of its source. A model
trained with contexts (rate 0.9) is held beside a plain one of as many steps. Looked for: conditioned loss below free
loss by 0.02 nats, free loss within 0.02 of the plain model's, and a classifier by character trigrams that finds the
source asked for more often at guidance 2 than at 1.
"""

from __future__ import annotations

import ast
import json
import math
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from trainwright import RunConfig, Trainer
from trainwright.core.batch import Batch
from trainwright.core.seeds import derive
from trainwright.data.context_tokens import context_tokens
from trainwright.data.module import DataModule, build_data
from trainwright.models.generate import generate
from trainwright.models.guidance import Context
from trainwright.train.evaluate import evaluate

SITES = {
    "code": "https://github.com/python/cpython/blob/main/Lib/",
    "docs": "https://docs.python.org/3/library/",
    "headers": "https://github.com/pytorch/pytorch/blob/main/",
    "packages": "https://pypi.org/project/",
}
LONGEST = 1500


def _texts(kind: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each document of a source."""
    if kind in ("code", "docs"):
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
            if "site-packages" in path.parts or "test" in path.parts:
                continue
            text = path.read_text("utf-8", errors="replace")
            if kind == "code":
                yield path.name, text
                continue
            try:
                nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            except SyntaxError:
                continue
            found = [ast.get_docstring(n) or "" for n in nodes]
            yield path.stem, "\n\n".join(d for d in found if len(d) > 60)
    elif kind == "headers":
        root = Path(torch.__file__).parent / "include" / "ATen"
        for path in sorted(root.rglob("*.h")):
            yield str(path.relative_to(root.parent)), path.read_text("utf-8", errors="replace")
    else:
        for dist in sorted(distributions(), key=lambda d: d.name or ""):
            yield dist.name or "?", dist.metadata.get_payload() or ""  # type: ignore[attr-defined]


def _corpus(file: Path, size: int) -> dict[str, list[str]]:
    """Write some ``size`` bytes of each source into a JSON Lines file; the texts by source."""
    held: dict[str, list[str]] = {}
    with file.open("w") as out:
        for kind, site in SITES.items():
            used, held[kind] = 0, []
            for name, text in _texts(kind):
                for at in range(0, min(len(text), 20 * LONGEST), LONGEST):
                    piece = text[at : at + LONGEST]
                    if len(piece.strip()) < 40 or used >= size:
                        continue
                    used += len(piece)
                    held[kind].append(piece)
                    out.write(json.dumps({"text": piece, "url": site + name}) + "\n")
    return held


class Trigrams:
    """Naive Bayes over character trigrams: the source that a text most likely is of."""

    def __init__(self, texts: dict[str, list[str]]):
        self.counts = {k: Counter(g for t in v for g in self._grams(t)) for k, v in texts.items()}
        self.totals = {k: sum(c.values()) for k, c in self.counts.items()}

    @staticmethod
    def _grams(text: str) -> list[str]:
        return [text[i : i + 3] for i in range(len(text) - 2)]

    def __call__(self, text: str) -> str:
        def score(kind: str) -> float:
            seen = (self.counts[kind][g] + 0.01 for g in self._grams(text))
            return sum(math.log(x / (self.totals[kind] + 1e4)) for x in seen)

        return max(self.counts, key=score)


def _trainer(folder: Path, file: Path, quick: bool, steps: int, metadata: dict[str, Any] | None) -> Trainer:
    dim, layers = (32, 1) if quick else (224, 5)
    shape = {"dim": dim, "n_layers": layers, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 5 * dim // 2}
    recipe = {
        "run": {"name": "plain" if metadata is None else "context", "dir": str(folder), "seed": 1, "device": "cpu"},
        "model": {"name": "decoder", **shape},
        "tokenizer": {"name": "bpe", "vocab_size": 512 if quick else 2048},
        "data": {
            "sources": [{"name": "jsonl", "path": str(file)}], "cache_dir": str(folder / "cache"),
            "batcher": "best_fit", "validation_fraction": 0.1, "metadata": metadata,
        },
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "precision": {"name": "fp32"},
        "train": {"steps": steps, "seq_len": 512 if quick else 1024, "global_batch_tokens": 4096},
        "log": {"loggers": [], "progress": "none", "report": False},
    }  # fmt: skip
    trainer = Trainer(RunConfig.load(recipe))
    trainer.fit()
    return trainer


def _document_loss(trainer: Trainer, validation: str | None) -> float:
    """Nats per document token of the validation documents, free of context or each with its own."""
    config = trainer.config
    data = config.data
    if validation is not None and data.metadata is not None:
        data = data.model_copy(update={"metadata": data.metadata.model_copy(update={"validation": validation})})
    module = build_data(data, trainer.tokenizer, seq_len=config.train.seq_len, seed=derive(1, "data"))
    found = evaluate(
        trainer.parallel.module, trainer.objective, _same_targets(module), trainer.device, trainer.precision
    )
    return found["val_loss"]


def _same_targets(module: DataModule) -> Iterator[Batch]:
    """Validation rows without the first token of a document as target: in bare documents nothing predicts it."""
    names = module.config.metadata.tokens if module.config.metadata is not None else None
    last = context_tokens(module.tokenizer, names).eoc if names else -1
    for batch in module.validation_batches(4):
        batch.weights = batch.weights * (batch.tokens != last)
        yield batch


def run(quick: bool) -> dict[str, Any]:
    steps, size, samples = (8, 60_000, 2) if quick else (600, 1_500_000, 25)
    metadata = {"kinds": ["url"], "rate": 0.9, "max_tokens": 32}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = _corpus(folder / "corpus.jsonl", size)
        plain = _trainer(folder, folder / "corpus.jsonl", quick, steps, None)
        model = _trainer(folder, folder / "corpus.jsonl", quick, steps, metadata)
        losses = {
            "plain model": _document_loss(plain, None),
            "free of context": _document_loss(model, "free"),
            "with its context": _document_loss(model, "context"),
        }
        judge, hits = Trigrams(texts), {}
        setting = model.config.data.metadata
        if setting is None:
            raise RuntimeError("the run was trained without metadata")
        for guidance in (0.0, 1.0, 2.0):
            hits[str(guidance)] = sum(
                judge(text) == kind
                for kind, site in SITES.items()
                for text in generate(
                    model.model, model.tokenizer, ["\n"] * samples, context=Context(site, guidance, setting),
                    max_new_tokens=20 if quick else 96, seed=7,
                )
            ) / (samples * len(SITES))  # fmt: skip
        report = next(iter(model.data.summary()["contexts"].values()))
        parameters = model.model.num_params()
    holds = {
        "conditioned loss below the free one by 0.02": losses["with its context"] <= losses["free of context"] - 0.02,
        "free loss within 0.02 of the plain model's": losses["free of context"] <= losses["plain model"] + 0.02,
        "source hit more often at guidance 2 than at 1": hits["2.0"] > hits["1.0"],
    }
    return {"parameters": parameters, "steps": steps, "losses": losses, "hits": hits, "report": report, "holds": holds}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['parameters']:,} parameters, {result['steps']} steps", ""]
    lines += ["| validation | nats per token |", "|---|---|"]
    lines += [f"| {name} | {loss:.4f} |" for name, loss in result["losses"].items()]
    lines += ["", "| guidance | samples of the source asked for |", "|---|---|"]
    lines += [f"| {g} | {share:.0%} |" for g, share in result["hits"].items()]
    lines += ["", *(f"{what}: {'yes' if yes else 'no'}" for what, yes in result["holds"].items())]
    return "\n".join(lines)
