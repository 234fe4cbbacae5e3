"""Memory of one rank: parameters, gradients and optimizer state under FSDP2 on two ranks against one process.

Bytes are those of the live tensors after a step's backward pass and update, the state of AdamW included: exact, the
same on every machine. Resident memory is the process's peak during the steps, over what it was before the model was
built; it holds activations and buffers too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BOUND = 0.55
STEPS = 2
ROWS, LENGTH = 2, 64


def run(quick: bool) -> dict[str, Any]:
    size = "2m" if quick else "125m"
    one, (first, second) = _start(1, size)[0], _start(2, size)
    ranks = {"one process": one, "rank 0 of 2": first, "rank 1 of 2": second}
    share = {name: r["bytes"] / one["bytes"] for name, r in ranks.items()}
    return {
        "size": size,
        "ranks": ranks,
        "share": share,
        "bound": BOUND,
        "within": max(share["rank 0 of 2"], share["rank 1 of 2"]) <= BOUND,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"Model {result['size']}, AdamW; MiB. Bound of the share: {result['bound']}.",
        "",
        "| | parameters | gradients | optimizer | together | share | peak resident |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in result["ranks"].items():
        figures = [f"{r[key] / 2**20:.2f}" for key in ("parameters", "gradients", "optimizer", "bytes")]
        resident = f"{r['resident'] / 2**20:.0f}"
        lines.append(f"| {name} | {' | '.join(figures)} | {result['share'][name]:.3f} | {resident} |")
    return "\n".join(lines)


def _start(world: int, size: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        # Large tensors straight from the system, and back to it: else freed memory stays in the resident figure.
        fixed = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
        env = {**os.environ, **fixed, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, size, f"{folder}/{r}.json"],
                env={**env, "RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": "1"},
            )
            for r in range(world)
        ]
        if any([p.wait() for p in ranks]):
            raise RuntimeError("a rank failed; its message is above")
        return [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(world)]


def _rank(size: str, out: Path) -> None:
    import torch

    from trainwright.core.batch import Batch
    from trainwright.core.distributed import local_tensor, rank
    from trainwright.core.hardware import process_memory
    from trainwright.core.registry import build
    from trainwright.objectives.next_token import NextTokenConfig
    from trainwright.parallel.apply import parallelize
    from trainwright.parallel.config import ParallelConfig
    from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
    from trainwright.precision.base import Precision
    from trainwright.train.executor import AutogradExecutor

    torch.set_num_threads(1)
    world, cpu = int(os.environ["WORLD_SIZE"]), torch.device("cpu")
    init_distributed(cpu)
    before = process_memory()[0]
    config = ParallelConfig(dp_shard=world)
    mesh = build_mesh(config.resolve(world), cpu)
    torch.manual_seed(0)
    vocab = 4096
    settings = {"name": "decoder", "size": size, "max_seq_len": LENGTH, "tie_embeddings": True}
    model = build("model", settings).build(vocab, LENGTH)  # type: ignore[attr-defined]
    precision = Precision(torch.float32, "cpu")
    parallel = parallelize(model, mesh, config, precision, cpu)
    params = [p for p in parallel.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    gc.collect()
    _reset_peak()
    tokens = torch.randint(0, vocab, (ROWS, LENGTH + 1))
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    ones, zeros = torch.ones(ROWS, LENGTH), torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ones, positions, zeros)
    found: dict[str, Any] = {}
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        AutogradExecutor(ROWS, precision).run(parallel, NextTokenConfig().build(), batch)
        optimizer.step()
        state = [t for entries in optimizer.state.values() for t in entries.values() if torch.is_tensor(t)]
        found = {
            "parameters": sum(_bytes(local_tensor(p)) for p in params),
            "gradients": sum(_bytes(local_tensor(p.grad)) for p in params if p.grad is not None),
            "optimizer": sum(_bytes(local_tensor(t)) for t in state),
        }
    found["bytes"] = sum(found.values())
    found["resident"] = process_memory()[1] - before
    found["rank"] = rank()
    out.write_text(json.dumps(found))
    shutdown()


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _reset_peak() -> None:
    """Forget the peak of the set-up, in which every rank holds the whole model for a moment (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    _rank(sys.argv[1], Path(sys.argv[2]))
