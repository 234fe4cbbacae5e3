"""Real tokens/s of a training step by how batches are made: fixed padded, bucketed, packed, ODB, offline oracle.

Three sets of texts out of the standard library of this Python, as ids of the recipe's default tokenizer: short
(docstrings, of the length of chat turns), mixed (functions and docstrings) and heavy-tailed (those and whole modules),
cut at MAX_LEN tokens. Every contestant gets the same documents and the same limit of BUDGET positions a batch:

fixed       BUDGET / MAX_LEN documents in shuffled order, padded to the longest of the batch: as many as fit at worst
bucketed    as many documents, sorted by length within windows of 1024
packed, best_fit, multipack    rows of MAX_LEN with several documents each, attention within documents
odb         Online Dynamic Batching with its default window of 1024 documents; ``odb 256`` with a smaller one. Full from
            the start, as the runs are short: what warm-up costs the first 10 windows would look as if it were lasting.
oracle      the whole set sorted by its known lengths, as many documents as the budget holds

A step is forward and backward of a decoder of two layers with the loss of the recipe; making the batch is timed too.
Contestants work in turns in one process. ``padding`` is the share of positions that hold no token; ``balance`` is what
ranks use of the time that the slowest of four takes: sum of the mean over sum of the largest number of positions of a
step.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainwright.core.batch import Batch
from trainwright.core.hardware import cache_dir
from trainwright.core.registry import build
from trainwright.data.batchers.bucketed import BucketBatchSampler
from trainwright.data.dataset import ArrayDataset
from trainwright.data.odb import OnlineDynamicBatches
from trainwright.data.odb_align import Entry, Window
from trainwright.data.packing import assemble
from trainwright.data.rows import RowStream
from trainwright.data.tokenize import TrainingCorpus
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.objectives.next_token import NextTokenConfig

MAX_LEN, BUDGET, RANKS = 1024, 4096, 4
PAD = 0
TURN = 8192  # real tokens of a contestant's turn
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def texts() -> dict[str, list[str]]:
    """Docstrings, functions and modules of the standard library."""
    source: Any = build("source", "python_stdlib")
    out: dict[str, list[str]] = {"docstrings": [], "functions": [], "modules": []}
    for doc in source.documents("train", 0.0):
        out["modules"].append(doc.text)
        lines = doc.text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(doc.text)):
            if isinstance(node, DEFINITIONS):
                docstring = ast.get_docstring(node)
                if docstring:
                    out["docstrings"].append(docstring)
                if not isinstance(node, ast.ClassDef):
                    out["functions"].append("".join(lines[node.lineno - 1 : node.end_lineno]))
    return out


def sets(most: int) -> tuple[dict[str, list[np.ndarray]], int]:
    """Documents by set, at most ``most`` each, and the size of the vocabulary."""
    spec: Any = build("tokenizer", "bpe")
    tokenizer = spec.build(TrainingCorpus([build("source", "python_stdlib")], 0.02), cache_dir())
    rng = np.random.default_rng(0)
    parts = texts()
    shares = {
        "short": {"docstrings": 1.0},
        "mixed": {"docstrings": 0.5, "functions": 0.5},
        "heavy-tailed": {"docstrings": 0.55, "functions": 0.35, "modules": 0.1},
    }
    out = {}
    for name, mix in shares.items():
        chosen = []
        for part, share in mix.items():
            wanted = min(int(most * share), len(parts[part]))
            chosen += [parts[part][i] for i in rng.choice(len(parts[part]), wanted, replace=False)]
        docs = [np.asarray([*tokenizer.encode(text)[: MAX_LEN - 1], tokenizer.eos_id]) for text in chosen]
        docs = [d for d in docs if len(d) >= 2]
        out[name] = [docs[i] for i in rng.permutation(len(docs))]
    return out, tokenizer.vocab_size


def padded(docs: list[np.ndarray]) -> Batch:
    """Documents as rows, padded to the longest; causal attention alone, as padding lies behind."""
    width = max(len(d) for d in docs)
    tokens = torch.full((len(docs), width), PAD)
    weights = torch.zeros(len(docs), width)
    for row, doc in enumerate(docs):
        tokens[row, : len(doc)] = torch.from_numpy(doc)
        weights[row, : len(doc) - 1] = 1.0
    targets = tokens.roll(-1, dims=1)
    positions = torch.arange(width).expand(len(docs), width)
    return Batch(tokens, targets, weights, positions, torch.zeros(len(docs), width, dtype=torch.int32))


def rows(docs: list[np.ndarray], batcher: str) -> Iterator[tuple[Batch, int]]:
    dataset = ArrayDataset(docs)
    stream = RowStream(dataset, build("batcher", batcher), MAX_LEN, seed=0)  # type: ignore[arg-type]
    for start in range(0, stream.num_rows(0), BUDGET // MAX_LEN):
        segments = stream.segments(0, range(start, min(start + BUDGET // MAX_LEN, stream.num_rows(0))))
        real = sum(int((s.stops - s.starts).sum()) for s in segments)
        yield assemble([(dataset, s) for s in segments], MAX_LEN, PAD), real


def sampled(docs: list[np.ndarray], **settings: Any) -> Iterator[tuple[Batch, int]]:
    for batch in BucketBatchSampler([len(d) for d in docs], **settings):
        yield padded([docs[i] for i in batch]), sum(len(docs[i]) for i in batch)


def dynamic(docs: list[np.ndarray], window: int) -> Iterator[tuple[Batch, int]]:
    for step in OnlineDynamicBatches(docs, BUDGET, window=window, warmup=1.0, collate=padded, exchange=None):
        yield step.batch, step.weight


def contestants(docs: list[np.ndarray]) -> dict[str, Iterator[tuple[Batch, int]]]:
    each = BUDGET // MAX_LEN
    return {
        "fixed": sampled(docs, batch_size=each, window=each),
        "bucketed": sampled(docs, batch_size=each, window=1024),
        "packed": rows(docs, "packed"),
        "best_fit": rows(docs, "best_fit"),
        "multipack": rows(docs, "multipack"),
        "odb": dynamic(docs, 1024),
        "odb 256": dynamic(docs, 256),
        "oracle": sampled(docs, budget=BUDGET, window=None),
    }


@dataclass
class Tally:
    seconds: float = 0.0
    real: int = 0
    positions: int = 0
    batches: int = 0
    per_batch: list[int] | None = None

    def figures(self) -> dict[str, float]:
        sizes = np.array(self.per_batch or [0])
        return {
            "tokens_per_s": self.real / self.seconds,
            "padding": 1 - self.real / self.positions,
            "batches": self.batches,
            "tokens_per_batch": self.real / self.batches,
            "balance": balance([sizes[r::RANKS].tolist() for r in range(RANKS)]),
        }


def balance(ranks: list[list[int]]) -> float:
    steps = min(len(r) for r in ranks)
    positions = np.array([r[:steps] for r in ranks], dtype=float)
    return float(positions.mean(axis=0).sum() / positions.max(axis=0).sum()) if steps else 1.0


def odb_balance(lengths: list[int], window: int) -> float:
    """Of four ranks with a quarter of the documents each, by the arithmetic alone."""
    windows = [Window(window, BUDGET) for _ in range(RANKS)]
    shards = [iter(lengths[r::RANKS]) for r in range(RANKS)]
    out: list[list[int]] = [[] for _ in range(RANKS)]
    while True:
        for w, shard in zip(windows, shards, strict=True):
            while len(w) < window and (n := next(shard, None)) is not None:
                w.add(Entry(None, 0, n, n))
        gathered = np.stack([w.row(0, window, None if len(w) else -1) for w in windows])
        if (gathered[:, 2] == -1).all():
            return balance(out)
        for rank, w in enumerate(windows):
            steps = w.take(gathered, rank)
            out[rank] += [len(s.entries) * max((e.length for e in s.entries), default=0) for s in steps]


def run(quick: bool) -> dict[str, Any]:
    documents, vocab = sets(60 if quick else 2500)
    torch.manual_seed(0)
    model = DecoderModelConfig(dim=128, n_layers=2, n_heads=4).build(vocab, MAX_LEN)
    objective = NextTokenConfig().build()
    result: dict[str, Any] = {"max_len": MAX_LEN, "budget": BUDGET, "sets": {}}
    for name, docs in documents.items():
        running = contestants(docs)
        tallies = {contestant: Tally(per_batch=[]) for contestant in running}
        _step(model, objective, padded(docs[:2]))  # warm
        while running:
            for contestant, batches in list(running.items()):
                if not _turn(model, objective, batches, tallies[contestant]):
                    del running[contestant]
        figures = {contestant: tally.figures() for contestant, tally in tallies.items()}
        lengths = [len(d) for d in docs]
        for contestant, window in (("odb", 1024), ("odb 256", 256)):
            figures[contestant]["balance"] = odb_balance(lengths, window)
        for f in figures.values():
            f["over_fixed"] = f["tokens_per_s"] / figures["fixed"]["tokens_per_s"]
            f["over_oracle"] = f["tokens_per_s"] / figures["oracle"]["tokens_per_s"]
        result["sets"][name] = {
            "documents": len(docs),
            "tokens": sum(lengths),
            "mean": float(np.mean(lengths)),
            "median": float(np.median(lengths)),
            "cv": float(np.std(lengths) / np.mean(lengths)),
            "contestants": figures,
        }
    return result


def _turn(model: Any, objective: Any, batches: Iterator[tuple[Batch, int]], tally: Tally) -> bool:
    """Some steps of a contestant; whether it has more."""
    until = tally.real + TURN
    while tally.real < until:
        start = time.perf_counter()
        got = next(batches, None)
        if got is None:
            return False
        batch, real = got
        _step(model, objective, batch)
        tally.seconds += time.perf_counter() - start
        tally.real += real
        tally.positions += batch.tokens.numel()
        tally.batches += 1
        assert tally.per_batch is not None
        tally.per_batch.append(batch.tokens.numel())
    return True


def _step(model: Any, objective: Any, batch: Batch) -> None:
    model.zero_grad(set_to_none=True)
    loss = objective(model, batch)
    (loss.sum / max(float(loss.weight), 1.0)).backward()


def table(result: dict[str, Any]) -> str:
    lines = [f"At most {result['budget']} positions a batch, documents cut at {result['max_len']} tokens."]
    for name, one in result["sets"].items():
        lines += [
            "",
            f"**{name}**: {one['documents']} documents, {one['tokens']} tokens, mean {one['mean']:.0f}, median "
            f"{one['median']:.0f}, CV {one['cv']:.2f}",
            "",
            "| | real tokens/s | over fixed | over oracle | padding | tokens a batch | batches | balance of 4 ranks |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for contestant, f in one["contestants"].items():
            lines.append(
                f"| {contestant} | {f['tokens_per_s']:,.0f} | {f['over_fixed']:.2f} | {f['over_oracle']:.2f} | "
                f"{100 * f['padding']:.1f} % | {f['tokens_per_batch']:,.0f} | {f['batches']} | {f['balance']:.2f} |"
            )
    return "\n".join(lines)
