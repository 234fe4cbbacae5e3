"""Where does a model remember its batches best? The measured re-evaluation curve beside the predicted one.

A small Llama, one epoch of unrepeated text (Python's standard library, as bytes), AdamW with tau = 0.15, the rate cut
to a fiftieth after 70 % of the steps. L(B_t; A) - L(B_t; other), where ``other`` was trained on other text, takes the
difficulty of the batches off; mean over seeds, smoothed over 8 % of the run. Expected: a minimum near 0.70 and not at
the end, and a correlation with the prediction of at least 0.5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.analysis.trec import compare, reevaluate
from trainwright.core.batch import Batch
from trainwright.core.registry import build
from trainwright.objectives.next_token import NextToken
from trainwright.planning.trec import decay_for

VOCAB, LENGTH = 256, 64


def text_rows(count: int, seed: int) -> np.ndarray:
    """``[count, LENGTH + 1]`` bytes of the standard library, no byte twice, in random order."""
    import sysconfig

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    data = b"".join(f.read_bytes() for f in files if "site-packages" not in f.parts)
    rows = len(data) // (LENGTH + 1)
    if rows < count:
        raise SystemExit(f"the standard library here gives {rows} rows, {count} are needed")
    whole = np.frombuffer(data, np.uint8)[: rows * (LENGTH + 1)].reshape(rows, LENGTH + 1)
    return whole[np.random.default_rng(seed).permutation(rows)[:count]].astype(np.int64)


def batches(rows: np.ndarray, size: int) -> list[Batch]:
    out = []
    for start in range(0, len(rows), size):
        part = torch.from_numpy(rows[start : start + size])
        n = len(part)
        positions = torch.arange(LENGTH).expand(n, LENGTH).contiguous()
        docs = torch.zeros(n, LENGTH, dtype=torch.int32)
        out.append(Batch(part[:, :-1], part[:, 1:], torch.ones(n, LENGTH), positions, docs))
    return out


def train(data: list[Batch], rates: np.ndarray, decay: float, dim: int, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    spec = {"name": "decoder", "dim": dim, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 2 * dim}
    model = build("model", spec).build(VOCAB, LENGTH)  # type: ignore[attr-defined]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=float(rates[0]), betas=(0.9, 0.95))
    objective = NextToken()
    for rate, batch in zip(rates, data, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        loss = objective(model, batch)
        (loss.sum / float(loss.weight)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def run(quick: bool) -> dict[str, Any]:
    steps, seeds, rows, dim = (40, 1, 4, 32) if quick else (600, 3, 16, 64)
    lr, tau = 3e-3, 0.15
    rates = np.where(np.arange(steps) < 0.7 * steps, lr, lr * 0.02)
    decay = decay_for(tau, lr, steps)
    residuals = []
    for seed in range(seeds):
        both = text_rows(2 * steps * rows, seed)
        own, others = batches(both[: steps * rows], rows), batches(both[steps * rows :], rows)
        model, other = (train(data, rates, decay, dim, seed) for data in (own, others))
        residuals.append(reevaluate(model, own) - reevaluate(other, own))
    curve = np.mean(residuals, 0)
    found = compare(curve, rates, decay, window=round(0.08 * steps))
    plain = compare(curve, rates, decay, m=1.0, window=round(0.08 * steps))
    return {
        **found,
        "pearson_at_m_1": plain["pearson"],
        "weight_decay": decay,
        "steps": steps,
        "seeds": seeds,
        "curve": curve.tolist(),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['steps']} steps, {result['seeds']} seeds.", "", "| quantity | value |", "|---|---|"]
    figures = {k: v for k, v in result.items() if isinstance(v, float) and k != "seconds"}
    return "\n".join([*lines, *(f"| {k.replace('_', ' ')} | {v:.4f} |" for k, v in figures.items())])
