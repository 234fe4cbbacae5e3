"""One of four ranks of BASP's checks: gradients, bytes and activations by rows of a micro-batch.

python basp_worker.py RESULT_FILE      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from parallel_worker import CPU, VOCAB, precision

from trainwright.core.batch import Batch
from trainwright.core.distributed import rank
from trainwright.models.base import LanguageModel
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
from trainwright.train.executor import AutogradExecutor

TOKENS = 64  # of a micro-batch, whatever its rows
RANKS, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 4, 4, 8, 2
SIZES = {1: 4, 2: 2, 4: 1}  # rows -> ranks of a group


def model(dtype: torch.dtype = torch.float32, kv_heads: int = KV_HEADS, window: int | None = None) -> LanguageModel:
    torch.manual_seed(0)
    spec: dict[str, Any] = {"dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": kv_heads, "ffn_dim": 48}
    if window is not None:
        spec["sliding_window"] = window
    return DecoderModelConfig(family="qwen3", **spec).build(VOCAB, TOKENS).to(dtype)


def batch(rows: int, length: int, documents: bool = True) -> Batch:
    g = torch.Generator().manual_seed(rows)
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=g)
    weights = (torch.rand(rows, length, generator=g) < 0.7).float()
    starts = torch.rand(rows, length, generator=g) < (0.15 if documents else 0.0)
    starts[:, 0] = True
    slots = torch.arange(length).expand(rows, length)
    positions = slots - torch.where(starts, slots, 0).cummax(1).values
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, (starts.cumsum(1) % 3).int())


def step(
    whole: LanguageModel, data: Batch, settings: dict[str, Any], micro: int | None = None, traced: bool = False
) -> dict[str, Any]:
    """Loss and gradients of one step over the four ranks, and what it sent and kept for the backward pass."""
    config = ParallelConfig(cp=RANKS, context=settings)
    mesh = build_mesh(Degrees(cp=RANKS), CPU)
    parallel = parallelize(whole, mesh, config, precision(), CPU)
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point() and not isinstance(t, torch.nn.Parameter):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
        return t

    executor = AutogradExecutor(micro or data.shape[0], precision())
    with CommTrace() as trace, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = executor.run(parallel, NextTokenConfig().build(), data)
    torch.distributed.all_reduce(result.loss_sum)
    exchanges = [r for r in trace.records if r.kind == "all_to_all"]
    return {
        "loss": (result.loss_sum / result.weight).item(),
        "gradients": {n: p.grad.clone() for n, p in parallel.model.named_parameters()},  # type: ignore[union-attr]
        "bytes": sum(r.bytes for r in exchanges),
        "calls": len(exchanges),
        "groups": sorted({r.group for r in exchanges}),
        "sequence": trace.sequence(),
        "kept": sum(kept.values()),
        "positions": result.positions,
    }


def exact_cases() -> dict[str, tuple[dict[str, Any], Batch, dict[str, Any], int | None]]:
    """Name -> model, rows, strategy, rows of a micro-batch; compared with one process in float64."""
    f64: dict[str, Any] = {"dtype": torch.float64}
    basp: dict[str, Any] = {"name": "basp"}
    return {
        "rows1": (f64, batch(1, 64), basp, None),
        "rows2": (f64, batch(2, 32), basp, None),
        "rows4": (f64, batch(4, 16), basp, None),
        "rows8": (f64, batch(8, 8), basp, None),
        "rows6_of_2_window": ({**f64, "window": 5}, batch(6, 16), basp, None),
        "rows3_coprime": (f64, batch(3, 16), basp, None),
        "rows3_padded": (f64, batch(3, 16), {"name": "basp", "padding": 0.34}, None),
        "short_last": (f64, batch(7, 16), basp, 4),
        "few_keys": ({**f64, "kv_heads": 2}, batch(1, 32), basp, None),
    }


def main(out: str) -> None:
    torch.set_num_threads(1)
    init_distributed(CPU, timeout_s=300)
    results: dict[str, Any] = {}
    for rows in SIZES:
        data = batch(rows, TOKENS // rows, documents=False)
        results[f"basp{rows}"] = step(model(), data, {"name": "basp"})
    results["ulysses1"] = step(model(), batch(1, TOKENS, documents=False), {"name": "ulysses"})
    results["ulysses2"] = step(model(), batch(2, TOKENS // 2, documents=False), {"name": "ulysses"})
    for name, (spec, data, settings, micro) in exact_cases().items():
        results[name] = step(model(**spec), data, settings, micro)
    torch.save(results, f"{out}.{rank()}")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
