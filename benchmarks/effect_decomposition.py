"""Dataset decomposition against concat-and-chunk: tokens/s of a training step, attention, loss on single documents.

Texts out of the standard library of this Python (docstrings, functions, whole modules), a tenth of them held out, in
rows of 512 tokens, each step of as many tokens. Everything else is the same for all:

concat      documents end to end, cut into rows, attention across documents: the paper's baseline
packed      the same rows, attention within documents
dd          dataset decomposition as the recipe's batcher, pieces of 32 to 512 tokens, grow_p2
dd shaped   the same batches, [b 2^(kmax-k), 2^k]

Tokens/s are measured in turns in one process, a step being forward, backward and update, batch included. Loss is that
of held-out documents one by one, cut at 512 tokens, after as many steps, over seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from data_batching import texts

from trainwright.core.batch import Batch
from trainwright.core.hardware import cache_dir
from trainwright.core.registry import build
from trainwright.data.batchers.dataset_decomposition import DatasetDecompositionConfig
from trainwright.data.dataset import ArrayDataset
from trainwright.data.decomposed import DecomposedBatches
from trainwright.data.loader import Loader
from trainwright.data.rows import RowStream
from trainwright.data.tokenize import TrainingCorpus
from trainwright.data.validation import validation_batches
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.objectives.next_token import NextTokenConfig

K_MAX, K_MIN, ROWS = 9, 5, 8
SEQ = 1 << K_MAX
DECOMPOSITION = {"name": "dataset_decomposition", "k_min": K_MIN, "cycles": 4}
CONTESTANTS = ("concat", "packed", "dd", "dd shaped")


def documents(most: int) -> tuple[ArrayDataset, ArrayDataset, int]:
    """Training and held-out documents, and the size of the vocabulary."""
    spec: Any = build("tokenizer", "bpe")
    tokenizer = spec.build(TrainingCorpus([build("source", "python_stdlib")], 0.02), cache_dir())
    rng = np.random.default_rng(0)
    found = texts()
    chosen: list[str] = []
    for part, share in (("docstrings", 0.35), ("functions", 0.5), ("modules", 0.15)):
        wanted = min(int(most * share), len(found[part]))
        chosen += [found[part][i] for i in rng.choice(len(found[part]), wanted, replace=False)]
    docs = [np.asarray([*tokenizer.encode(chosen[i]), tokenizer.eos_id]) for i in rng.permutation(len(chosen))]
    docs = [d for d in docs if len(d) >= 2]
    held = max(1, len(docs) // 10)
    return ArrayDataset(docs[held:]), ArrayDataset([d[:SEQ] for d in docs[:held]]), tokenizer.vocab_size


def batches(name: str, data: ArrayDataset, seed: int) -> Iterator[Batch]:
    if name == "dd shaped":
        config = build("batcher", DECOMPOSITION)
        assert isinstance(config, DatasetDecompositionConfig)
        shaped = DecomposedBatches(data, ROWS * SEQ, k_max=K_MAX, config=config, seed=seed)
        while True:
            yield from shaped
    batcher: Any = build("batcher", DECOMPOSITION if name == "dd" else "packed")
    loader = Loader({"pool": RowStream(data, batcher, SEQ, seed)}, global_batch_rows=ROWS, prefetch=0)
    for batch in loader:
        if name == "concat":
            batch.doc_ids = torch.zeros_like(batch.doc_ids)
            batch.positions = torch.arange(SEQ).expand(ROWS, SEQ)
        yield batch


class Run:
    """A model in training on the batches of one contestant."""

    def __init__(self, name: str, data: ArrayDataset, vocab: int, seed: int, steps: int, quick: bool):
        torch.manual_seed(seed)
        size: dict[str, Any] = {"dim": 64, "n_layers": 2} if quick else {"dim": 192, "n_layers": 4}
        self.model = DecoderModelConfig(n_heads=4, **size).build(vocab, SEQ)
        self.objective = NextTokenConfig().build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.033, betas=(0.9, 0.95))
        self.batches = batches(name, data, seed)
        self.steps, self.done, self.tokens, self.seconds = steps, 0, 0, 0.0

    def step(self) -> None:
        start = time.perf_counter()
        batch = next(self.batches)
        warm = min(1.0, (self.done + 1) / max(1, self.steps // 10))
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 * warm * (0.55 + 0.45 * math.cos(math.pi * self.done / self.steps))
        loss = self.objective(self.model, batch)
        (loss.sum / max(float(loss.weight), 1.0)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.tokens += batch.tokens.numel()
        self.seconds += time.perf_counter() - start

    def validate(self, held: ArrayDataset) -> float:
        total = weight = 0.0
        padded: Any = build("batcher", "padded")
        with torch.no_grad():
            for batch in validation_batches(held, seq_len=SEQ, pad_id=0, batch_rows=ROWS, batcher=padded):
                loss = self.objective(self.model, batch)
                total, weight = total + float(loss.sum), weight + float(loss.weight)
        return total / weight


def run(quick: bool) -> dict[str, Any]:
    data, held, vocab = documents(120 if quick else 6000)
    steps, seeds = (4, 1) if quick else (300, 3)
    plan: Any = RowStream(data, build("batcher", DECOMPOSITION), SEQ, 0)  # type: ignore[arg-type]
    plan.set_step_rows(ROWS)
    result: dict[str, Any] = {
        "documents": data.num_docs,
        "tokens": data.num_tokens,
        "rows": SEQ,
        "steps": steps,
        "attention": plan._at(0)[0].attention_cost(),
        "note": plan.note,
        "contestants": {name: {"tokens_per_s": [], "loss": []} for name in CONTESTANTS},
    }
    for seed in range(seeds):
        running = {name: Run(name, data, vocab, seed, steps, quick) for name in CONTESTANTS}
        result["parameters"] = running["dd"].model.num_params()
        for _ in range(steps):
            for one in running.values():  # in turns, so that whatever else the machine does hits all alike
                one.step()
        for name, one in running.items():
            result["contestants"][name]["tokens_per_s"].append(one.tokens / one.seconds)
            result["contestants"][name]["loss"].append(one.validate(held))
    return result


def table(result: dict[str, Any]) -> str:
    base = result["contestants"]["concat"]
    lines = [
        f"{result['documents']} documents, {result['tokens']:,} tokens; {result['parameters']:,} parameters, "
        f"{result['steps']} steps of {ROWS} x {result['rows']} tokens, {len(base['loss'])} seeds. {result['note']}",
        "",
        "| | tokens/s | over concat | held-out loss | minus concat's, by seed |",
        "|---|---|---|---|---|",
    ]
    for name, f in result["contestants"].items():
        ratio = np.mean(f["tokens_per_s"]) / np.mean(base["tokens_per_s"])
        gaps = ", ".join(f"{a - b:+.3f}" for a, b in zip(f["loss"], base["loss"], strict=True))
        lines.append(
            f"| {name} | {np.mean(f['tokens_per_s']):,.0f} | {ratio:.2f} | {np.mean(f['loss']):.3f} | {gaps} |"
        )
    return "\n".join(lines)
