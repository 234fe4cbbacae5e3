"""EE-LLM (B017): what an early exit costs the model and saves in generation, and what the bubbles of a pipeline hold.

    python benchmarks/early_exit.py [--quick] [--json FILE] [--record benchmarks/results/parallel.md]

A decoder of 6 layers on the bytes of this Python's own sources, trained twice from the same seed on the same rows:
without an exit, and with one behind layer 3 (weight 0.5, tied). Then, on held-out rows with all tokens given, which
positions would leave at probability 0.8, the share of the layers' work that saves, and how many of them the last layer
agrees with. Generation by both methods: seconds over those of plain generation in the same process, and the layers
between a token's input and its choice. Bubbles: steps in unit time (forward 1, backward 2 a stage) with and without
partial micro-batches; exact. Two cores (OMP_NUM_THREADS=2) need some 5 minutes.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SEED, LAYERS, EXIT, WEIGHT, THRESHOLD = 0, 6, 3, 0.5, 0.8
TOKENS, LENGTH, STEP_TOKENS = 500_000, 256, 4096


def run(quick: bool) -> dict[str, Any]:
    from trainwright.models.exit_decoding import teacher_forced
    from trainwright.parallel.pipeline.fill import fill_counts

    tokens = 16_384 if quick else TOKENS
    with tempfile.TemporaryDirectory() as place:
        plain = _train(Path(place), quick, tokens, exits=False)
        trained = _train(Path(place), quick, tokens, exits=True)
        model = trained.pop("trainer")
        rows = _held_out(model, 2 if quick else 32)
        found = teacher_forced(model.model.eval(), rows, THRESHOLD)
        generation = _generation(model, rows[0, :64].tolist(), 24 if quick else 128)
        plain.pop("trainer")
    agreement = found.agree / max(found.left, 1)
    return {
        "parameters": model.model.num_params(),
        "tokens": tokens,
        "plain": plain,
        "exit": trained,
        "held_out": {"tokens": found.tokens, "left": found.left, "agree": agreement, "skipped": found.skipped},
        "generation": generation,
        "bubbles": {str(p): _bubbles(p) for p in (4, 8)},
        "counts": fill_counts(4, 2.0, 9, 9),
        "holds": {
            "final loss within 0.05 nats of the model without an exit": trained["val_loss"] - plain["val_loss"] <= 0.05,
            "10% or more of the layers' work skipped": found.skipped >= 0.10,
            "95% or more of those that leave agree with the last layer": agreement >= 0.95,
        },
    }


def _train(folder: Path, quick: bool, tokens: int, exits: bool) -> dict[str, Any]:
    from trainwright import RunConfig, Trainer

    dim = 64 if quick else 256
    recipe = {
        "run": {"name": f"exit-{exits}", "dir": str(folder), "seed": SEED, "device": "cpu"},
        "model": {"name": "decoder", "dim": dim, "n_layers": LAYERS, "n_heads": dim // 32, "n_kv_heads": dim // 32,
                  "ffn_dim": 11 * dim // 4},
        "transforms": [{"name": "early_exit", "after": [EXIT], "weights": [WEIGHT]}] if exits else [],
        "tokenizer": {"name": "bytes"},
        "data": {"sources": [{"name": "python_stdlib"}], "cache_dir": str(folder / "cache")},
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "precision": {"name": "fp32"},
        "train": {"tokens": tokens, "seq_len": LENGTH, "global_batch_tokens": STEP_TOKENS},
        "evaluate": {"tokens": 4096 if quick else 65_536},
        "log": {"loggers": [], "progress": "none", "report": False},
    }  # fmt: skip
    started = time.perf_counter()
    trainer = Trainer(RunConfig.load(recipe))
    threads = torch.get_num_threads()
    summary = trainer.fit()
    torch.set_num_threads(threads)
    return {
        "trainer": trainer,
        "seconds": time.perf_counter() - started,
        **{k: summary[k] for k in ("loss", "nll", "val_loss", "exit_3_nll") if k in summary},
    }


def _held_out(trainer: Any, rows: int) -> torch.Tensor:
    batches = trainer.data.validation_batches(batch_rows=rows, max_tokens=rows * LENGTH)
    return next(iter(batches)).tokens


def _generation(trainer: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """Medians of three turns; each method at its threshold in every turn."""
    from trainwright.models.exit_decoding import ExitDecoding
    from trainwright.models.generate import generate_ids

    kinds = {"plain": None, "recompute": "recompute", "pipelined": "pipelined"}
    seconds: dict[str, list[float]] = {k: [] for k in kinds}
    depth, texts = {}, {}
    for _ in range(3):
        for kind, method in kinds.items():
            early = None if method is None else ExitDecoding(THRESHOLD, method)  # type: ignore[arg-type]
            started = time.perf_counter()
            texts[kind] = generate_ids(trainer.model, [prompt], max_new_tokens=count, temperature=0, early_exit=early)
            seconds[kind].append(time.perf_counter() - started)
            if early is not None:
                depth[kind] = early.stats.depth / (early.stats.passes * LAYERS)
    middle = {k: sorted(v)[1] for k, v in seconds.items()}
    return {
        k: {
            "seconds_over_plain": middle[k] / middle["plain"],
            "depth": depth[k],
            "same_tokens_as_plain": sum(a == b for a, b in zip(texts[k][0], texts["plain"][0], strict=False)),
            "tokens": len(texts[k][0]),
        }
        for k in ("recompute", "pipelined")
    }


# -- bubbles ----------------------------------------------------------------------------------------------------------


def _bubbles(stages: int, beta: float = 2.0) -> dict[str, Any]:
    """Time of a step of 2 P whole micro-batches, alone and with what its bubbles hold, and what the filling adds."""
    from trainwright.parallel.pipeline.fill import FillPlan, fill_plan

    whole = 2 * stages
    extra = fill_plan(0, beta, 99, 99, [1] * stages).full  # minus the partial ones
    plan = fill_plan(whole - extra, beta, 99, 99, [1] * stages)
    alone, filled = (_time(p, stages, beta) for p in (FillPlan(whole), plan))
    passes = sum(plan.warmup(r) + plan.cooldown(r) for r in range(stages))
    return {
        "whole": whole,
        "partial": len(plan.deepest) + len(plan.shallowest),
        "alone": alone,
        "filled": filled,
        "passes_more": passes / (whole * stages),
    }


def _time(plan: Any, stages: int, beta: float) -> float:
    """Of a step whose stages do their operations in order, as soon as needs are there; forward 1, backward beta."""
    waiting = {r: _operations(plan, r, stages) for r in range(stages)}
    clock, done = [0.0] * stages, {}
    while any(waiting.values()):
        for r, queue in waiting.items():
            while queue and all(need in done for need in queue[0][1]):
                (kind, index), needs = queue.pop(0)
                start = max([clock[r], *(done[n] for n in needs)])
                clock[r] = done[(kind, index, r)] = start + (1.0 if kind == "F" else beta)
    return max(clock)


def _operations(plan: Any, r: int, stages: int) -> list[tuple[tuple[str, int], list[tuple[str, int, int]]]]:
    """What stage ``r`` does in order, as trainwright's FilledSchedule does, and what each operation waits for."""

    def forward(i: int) -> Any:
        return ("F", i), [("F", i, r - 1)] if r else []

    def backward(i: int, last: int) -> Any:
        return ("B", i), [("B", i, r + 1)] if r < last else [("F", i, r)]

    warmup = min(plan.stream, stages - r)
    partial, back = plan.warmup(r), plan.backward(r)
    out = [forward(i) for i in range(warmup)]
    out += [forward(plan.stream + i) for i in range(partial)]
    out += [backward(plan.stream + i, plan.deepest[i]) for i in reversed(range(partial))]
    ahead = warmup
    for i in range(max(back, plan.stream - warmup)):
        out += [backward(i, stages - 1)] if i < back else []
        out += [forward(ahead)] if ahead < plan.stream else []
        ahead += 1
    return out


def table(result: dict[str, Any]) -> str:
    held, gen = result["held_out"], result["generation"]
    lines = [
        f"{result['parameters']:,} parameters, {result['tokens']:,} training bytes, seed {SEED}; exit behind layer "
        f"{EXIT} of {LAYERS}, weight {WEIGHT}.",
        "",
        "| model | held-out loss, last layer (nats) | training loss of the exit | seconds |",
        "|---|---|---|---|",
        f"| without an exit | {result['plain']['val_loss']:.4f} | | {result['plain']['seconds']:.0f} |",
        f"| with | {result['exit']['val_loss']:.4f} | {result['exit']['exit_3_nll']:.4f} | "
        f"{result['exit']['seconds']:.0f} |",
        "",
        f"Threshold {THRESHOLD}, all tokens given: {held['left'] / held['tokens']:.1%} of {held['tokens']:,} leave, "
        f"{held['skipped']:.1%} of the layers' work skipped, {held['agree']:.1%} of them as the last layer.",
        "",
        "| generation | seconds over plain | layers to a choice | tokens as plain |",
        "|---|---|---|---|",
        *(
            f"| {k} | {g['seconds_over_plain']:.2f} | {g['depth']:.2f} | {g['same_tokens_as_plain']} of {g['tokens']} |"
            for k, g in gen.items()
        ),
        "",
        f"Partial micro-batches of 4 stages: {result['counts'][0]} in warm-up, {result['counts'][1]} in cool-down.",
        "",
        "| stages | whole micro-batches | partial | step alone | filled | stage passes more |",
        "|---|---|---|---|---|---|",
        *(
            f"| {p} | {b['whole']} | {b['partial']} | {b['alone']:g} | {b['filled']:g} | {b['passes_more']:.1%} |"
            for p, b in result["bubbles"].items()
        ),
        "",
        *(f"- {'holds' if ok else 'DOES NOT HOLD'}: {what}" for what, ok in result["holds"].items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    from parts import main

    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main(__doc__, {"early_exit": "early_exit"})
