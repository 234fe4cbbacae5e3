"""Validation: mean loss, perplexity and bits per byte over a fixed set of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_reduce_sum
from trainwright.core.seeds import rng_state, set_rng_state
from trainwright.objectives.base import Objective
from trainwright.parallel.apply import Parallelized
from trainwright.parallel.context.host import sent
from trainwright.train.executor import forward_only


def evaluate(
    module: Parallelized | torch.nn.Module,
    objective: Objective,
    batches: Iterable[Batch],
    device: torch.device,
    precision: Any,
) -> dict[str, float]:
    """Mean over all ranks of the plain cross-entropy where the objective reports it (``nll``), else of its loss.

    Returns val_loss (nats per token), val_perplexity, val_tokens, and val_bits_per_byte where the batches carry
    ``extras["target_bytes"]``. All ranks must have the same number of batches. Random state is left as it was.
    """
    state = rng_state()
    spread = module if isinstance(module, Parallelized) else None
    whole = spread.module if spread is not None else cast(torch.nn.Module, module)
    was_training = whole.training
    whole.eval()
    # How often a sum over all ranks counts the nats, and the weights and bytes.
    copies = (spread.copies, spread.weight_copies, spread.weight_copies) if spread is not None else (1, 1, 1)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # nats, weight, bytes
    try:
        for batch in batches:
            if spread is not None and spread.context is not None:
                batch = sent(spread.shard(batch), device)  # planned on the host
            else:
                batch = batch.to(device)
            loss = forward_only(module, objective, batch, precision)
            nats = loss.metrics.get("nll", loss.sum)
            size = (
                batch.extras["target_bytes"].sum() if "target_bytes" in batch.extras else torch.zeros((), device=device)
            )
            totals += torch.stack([nats.double(), loss.weight.double(), size.double()])
    finally:
        whole.train(was_training)
        set_rng_state(state)
    totals = all_reduce_sum(totals) / torch.tensor(copies, dtype=totals.dtype, device=device)
    nats, weight, size = totals.tolist()
    if weight == 0:
        return {"val_loss": math.nan, "val_perplexity": math.nan, "val_tokens": 0}
    mean = nats / weight
    out = {"val_loss": mean, "val_perplexity": math.exp(min(mean, 700.0)), "val_tokens": int(weight)}
    if size > 0:
        out["val_bits_per_byte"] = nats / (math.log(2) * size)
    return out
