"""One of two ranks that share experts out: gradients, an optimizer that takes whole matrices, checkpoints.

python expert_worker.py FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from parallel_worker import CPU, ROWS, decoder, global_batch, my_rows, precision

from trainwright.core.distributed import full_tensor, rank
from trainwright.core.params import named_params
from trainwright.core.registry import build
from trainwright.models.moe import MoE
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
from trainwright.parallel.weights import model_state
from trainwright.train.checkpoint import Checkpointer
from trainwright.train.executor import AutogradExecutor

EXPERTS = {"family": "mixtral", "n_heads": 4, "n_kv_heads": 2, "n_experts": 4, "moe_ffn_dim": 32, "balance": "bias"}
CONFIG = ParallelConfig(dp_shard=2, ep=2)


def model(favoured: tuple[int, ...] = ()) -> Any:
    """All tokens go to the ``favoured`` experts, where there are some."""
    found = decoder(**EXPERTS).double()
    for moe in found.modules():
        if isinstance(moe, MoE) and favoured:
            assert moe.expert_bias is not None
            moe.expert_bias[list(favoured)] += 100.0
    return found


def spread(whole: Any) -> Any:
    return parallelize(whole, build_mesh(CONFIG.resolve(2), CPU), CONFIG, precision(), CPU)


def parallelize_alone(whole: Any) -> Any:
    return parallelize(whole, build_mesh(Degrees(), CPU), ParallelConfig(), precision(), CPU)


def gradients(favoured: tuple[int, ...]) -> dict[str, Any]:
    """Of one step in two micro-batches."""
    parallel = spread(model(favoured))
    mesh = build_mesh(CONFIG.resolve(2), CPU)
    with CommTrace() as trace:
        AutogradExecutor(2, precision()).run(parallel, NextTokenConfig().build(), my_rows(global_batch(0), mesh))
    moes = [m for m in parallel.model.modules() if isinstance(m, MoE)]
    return {
        "gradients": {n: full_tensor(p.grad).clone() for n, p in parallel.model.named_parameters()},
        "kinds": {g: [kind for kind, _ in made] for g, made in trace.sequence().items()},
        "exchanged": sum(r.size for r in trace.records if r.kind == "all_to_all"),
        "load": torch.stack([m.load for m in moes]),
        "held": [m.gate.to_local().shape[0] for m in moes],
    }


def optimized(name: str, parallel: Any, batch: Any) -> dict[str, Any]:
    """Weights after two steps."""
    params = named_params(parallel.model)
    optimizer = build("optimizer", name).build(params)
    for _ in range(2):
        AutogradExecutor(ROWS, precision()).run(parallel, NextTokenConfig().build(), batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {n: full_tensor(t).clone() for n, t in model_state(parallel.model).items()}


def numbered() -> Any:
    """A model whose weights can be told apart."""
    found = model()
    with torch.no_grad():
        for i, p in enumerate(found.parameters()):
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).view_as(p) + 1000 * i)
    return found


def checkpoints(folder: Path) -> dict[str, Any]:
    """Loads what one process saved in ``one``, and saves in ``spread`` the same plus 0.5."""
    parallel = spread(model())
    weights = parallel.state()
    with Checkpointer(folder / "one") as reader:
        reader.load(reader.latest(), weights=weights)
    loaded = {n: full_tensor(t).clone() for n, t in weights.items()}
    with torch.no_grad():
        for p in parallel.model.parameters():
            p.add_(0.5)
    with Checkpointer(folder / "spread", asynchronous=False) as writer:
        writer.save(1, {}, {}, weights=parallel.state())
    return loaded


def main(folder: str) -> None:
    torch.set_num_threads(1)
    init_distributed(CPU, timeout_s=300)
    mesh = build_mesh(CONFIG.resolve(2), CPU)
    results = {
        "even": gradients(()),
        "first": gradients((0, 1)),
        "second": gradients((2, 3)),
        "muon": optimized("muon", spread(model()), my_rows(global_batch(0), mesh)),
        "checkpoint": checkpoints(Path(folder)),
    }
    torch.save(results, f"{folder}/result.{rank()}")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
