"""Measuring a training re-evaluation curve: the loss of the final weights on each step's batch, in training order.

L_re(t) = L(batch of step t; final weights), in eval mode, nats a token. Batches differ in difficulty, which is taken
off by the curve of a model that was trained on other data: residual(t) = L(B_t; A) - L(B_t; other).
Levels are comparable within a run only. Prediction and placement are in planning/trec.py. arXiv:2509.25380.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trainwright.core.batch import Batch
from trainwright.core.errors import DataError
from trainwright.objectives.token_losses import token_losses
from trainwright.planning.trec import fit_m, pearson, predicted_curve, smoothed, timescale


def batch_digest(batch: Batch) -> str:
    """A hash of a batch's tokens and weights, to record while training and to compare with afterwards."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (batch.tokens, batch.weights):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def reevaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    device: torch.device | str = "cpu",
    micro_batch_size: int | None = None,
    digests: Sequence[str] | None = None,
    watch: Callable[[int], Any] | None = None,
) -> NDArray[np.float64]:
    """L_re of every batch, float64 ``[T]``: mean over its tokens, by their weights. The model's mode is kept.

    batches  as they were trained on, in order: all ranks' rows of a step in one batch
    digests  :func:`batch_digest` of each step as recorded; a batch that differs, one missing or one too many is a
             DataError: the curve of other batches than the model has seen says nothing
    """
    was_training = model.training
    model.eval()
    out: list[float] = []
    try:
        for t, batch in enumerate(batches):
            if digests is not None and (t >= len(digests) or batch_digest(batch) != digests[t]):
                raise DataError(
                    f"the batch of step {t + 1} is not the one that was recorded: the data, its order or the batch "
                    "size changed since the run"
                )
            nats = weight = 0.0
            for micro in batch.split(micro_batch_size or batch.shape[0]):
                micro = micro.to(device)
                losses = token_losses(model, micro)
                nats += float((losses.double() * micro.weights.double()).sum())
                weight += float(micro.weight())
            out.append(nats / weight if weight else float("nan"))
            if watch is not None:
                watch(t + 1)
    finally:
        model.train(was_training)
    if digests is not None and len(out) != len(digests):
        raise DataError(f"{len(digests)} batches were recorded and {len(out)} given")
    return np.array(out)


def compare(
    measured: NDArray[np.float64],
    lr: NDArray[np.float64],
    decay: float,
    m: float | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """How a measured curve (or residual) agrees with the predicted one; ``m`` None fits it.

    Both are smoothed over ``window`` steps, by default a hundredth of the run.
    """
    fitted = fit_m(measured, lr, decay, window)[0] if m is None else m
    low, predicted = smoothed(measured, window), smoothed(predicted_curve(lr, decay, fitted), window)
    steps = len(low)
    return {
        "steps": steps,
        "tau": timescale(float(np.max(lr)), decay, steps),
        "m": fitted,
        "pearson": pearson(low, predicted),
        "measured_minimum": (int(np.argmin(low)) + 1) / steps,
        "predicted_minimum": (int(np.argmin(predicted)) + 1) / steps,
        "depth": float(low.mean() - low.min()),
        "end_above_minimum": float(low[-1] - low.min()),
    }
