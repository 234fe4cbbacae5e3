"""Rows of 32,768 tokens on four ranks: an uneven pipeline, ring and Ulysses against one process that works in chunks.

A small decoder (5 layers, 4 heads), two rows, the second of three documents; float32. The one process attends to
keys and values by chunks of queries with a mask of its own, and shares no attention code with the others. Differences
are relative: of the loss, and for each parameter the norm of the gradient's difference over the gradient's norm, of
which the largest is given. Seconds are those of one forward and backward pass with all ranks on this machine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BOUND = 1e-5
LENGTH, QUICK_LENGTH, ROWS, VOCAB, CHUNK = 32_768, 2_048, 2, 257, 1024
MODEL = {"family": "llama", "dim": 64, "n_layers": 5, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 128}
WAYS: dict[str, dict[str, Any]] = {
    "pipeline 1-2-1-1": {"pp": 4, "pipeline": {"schedule": "gpipe", "layers": [1, 2, 1, 1]}},
    "ring": {"cp": 4, "context": "ring"},
    "ulysses": {"cp": 4, "context": "ulysses"},
}


def run(quick: bool) -> dict[str, Any]:
    import torch

    length = QUICK_LENGTH if quick else LENGTH
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _start(1, length, "chunks", folder)
        (want,) = _read(folder, "chunks", 1)
        result: dict[str, Any] = {
            "length": length,
            "rows": ROWS,
            "bound": BOUND,
            "chunks_s": want["seconds"],
            "ways": {},
        }
        for way in WAYS:
            _start(4, length, way, folder)
            ranks = _read(folder, way, 4)
            gradients = {n: g for rank in ranks for n, g in rank["gradients"].items()}
            if gradients.keys() != want["gradients"].keys():
                raise RuntimeError(f"{way}: gradients of {sorted(gradients)}")
            off = {
                n: float(torch.dist(g, want["gradients"][n]) / want["gradients"][n].norm())
                for n, g in gradients.items()
            }
            worst = max(off, key=lambda n: off[n])
            loss = abs(ranks[0]["loss"] / want["loss"] - 1)
            result["ways"][way] = {
                "loss": loss,
                "gradient": off[worst],
                "worst": worst,
                "seconds": max(r["seconds"] for r in ranks),
                "peak": max(r["peak"] for r in ranks),
                "within": loss <= BOUND and off[worst] <= BOUND,
            }
    return result


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['rows']} rows of {result['length']:,} tokens, four ranks; bound {result['bound']:g}. One process in "
        f"chunks: {result['chunks_s']:.0f} s.",
        "",
        "| | loss off by | gradient off by at most | of | seconds | peak MiB of a rank | within |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, r in result["ways"].items():
        lines.append(
            f"| {way} | {r['loss']:.1e} | {r['gradient']:.1e} | {r['worst']} | {r['seconds']:.0f} | "
            f"{r['peak'] / 2**20:,.0f} | {'yes' if r['within'] else 'NO'} |"
        )
    return "\n".join(lines)


def _start(world: int, length: int, way: str, folder: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, way, str(length), str(folder)], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in range(world)
    ]
    if any([p.wait() for p in ranks]):
        raise RuntimeError(f"{way}: a rank failed; its message is above")


def _read(folder: Path, way: str, world: int) -> list[dict[str, Any]]:
    import torch

    return [torch.load(folder / f"{way}.{r}") for r in range(world)]


def _batch(length: int) -> Any:
    import torch

    from trainwright.core.batch import Batch

    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (ROWS, length + 1), generator=g)
    starts = torch.zeros(ROWS, length, dtype=torch.bool)
    starts[:, 0] = True
    starts[1, [length // 3, length // 2 + 5]] = True
    slots = torch.arange(length).expand(ROWS, length)
    positions = slots - torch.where(starts, slots, 0).cummax(1).values
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(ROWS, length), positions, (starts.cumsum(1) - 1).int())


def _in_chunks(q: Any, k: Any, v: Any, doc_ids: Any) -> Any:
    """Attention within documents, ``[B, T, H, D]``: CHUNK queries at a time over all keys up to theirs."""
    import torch
    import torch.nn.functional as F

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = []
    for start in range(0, q.shape[2], CHUNK):
        stop = min(start + CHUNK, q.shape[2])
        causal = torch.arange(start, stop)[:, None] >= torch.arange(stop)
        mask = causal & (doc_ids[:, start:stop, None] == doc_ids[:, None, :stop])
        out.append(F.scaled_dot_product_attention(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], mask[:, None]))
    return torch.cat(out, 2).transpose(1, 2)


def _rank(way: str, length: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from trainwright.core.distributed import full_tensor, rank
    from trainwright.core.hardware import process_memory
    from trainwright.core.registry import build
    from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig
    from trainwright.objectives.next_token import NextTokenConfig
    from trainwright.parallel.apply import parallelize
    from trainwright.parallel.config import ParallelConfig
    from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
    from trainwright.precision.base import Precision
    from trainwright.train.executor import AutogradExecutor
    from trainwright.train.pipeline_executor import PipelineExecutor

    torch.set_num_threads(1)
    world, cpu = int(os.environ["WORLD_SIZE"]), torch.device("cpu")
    if world > 1:
        init_distributed(cpu, timeout_s=1800)
    config = ParallelConfig(**WAYS.get(way, {}))
    torch.manual_seed(0)
    spec = {"name": "decoder", "max_seq_len": length, "tie_embeddings": False, **MODEL}
    model = build("model", spec).build(VOCAB, length)  # type: ignore[attr-defined]
    if way == "chunks":
        ActivationCheckpointingConfig().apply(model)
        model.plan_attention = lambda doc_ids, *_: doc_ids
        for block in model.blocks:
            block.attn.attend = _in_chunks
    precision = Precision(torch.float32, "cpu")
    parallel = parallelize(model, build_mesh(config.resolve(world), cpu), config, precision, cpu)
    kind = AutogradExecutor if parallel.pipeline is None else PipelineExecutor
    started = time.perf_counter()
    result = kind(1, precision).run(parallel, NextTokenConfig().build(), _batch(length))
    seconds = time.perf_counter() - started
    loss = result.loss_sum.clone()
    if world > 1:
        dist.all_reduce(loss)
        loss /= parallel.copies
    torch.save(
        {
            "loss": (loss / result.weight).item(),
            "gradients": {
                n: full_tensor(p.grad).clone() for n, p in parallel.model.named_parameters() if p.grad is not None
            },
            "seconds": seconds,
            "peak": process_memory()[1],
        },
        folder / f"{way}.{rank()}",
    )
    if world > 1:
        shutdown()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
