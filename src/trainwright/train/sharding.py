"""``parallel: {sharding: amsp}``: the chain for a recipe's model, batch and machines."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.parallel.amsp.chain import FACTORS
from trainwright.parallel.amsp.config import KEY, AmspConfig
from trainwright.parallel.auto import SHARE, STATE_BYTES, device_bytes, root_params
from trainwright.parallel.auto import block_params as params_of_block
from trainwright.parallel.config import Degrees
from trainwright.planning.amsp import Hop, NothingFits, Problem, plan
from trainwright.planning.comm_plan import Cluster

log = logging.getLogger("trainwright")
MOMENTS = 8  # AdamW's, in float32


def settled_sharding(config: Any, world_size: int, cluster: Cluster | None = None, *, quietly: bool = False) -> Any:
    """``config`` (a RunConfig) with the factors that ``sharding: amsp`` stands for; otherwise ``config`` itself.

    cluster  None: that of the recipe's ``sharding.cluster``, and the memory of this machine's devices
    Raises ConfigError where no chain fits, with the closest one, and for models whose size is not known beforehand.
    """
    sharding = config.parallel.sharding
    if not isinstance(sharding, AmspConfig) or not sharding.auto:
        return config
    config = _with(config, sharding, dict.fromkeys(FACTORS))
    if world_size == 1:
        return _with(config, sharding, dict.fromkeys(FACTORS, 1))
    degrees = config.parallel.resolve(world_size)
    problem = problem_of(config, degrees, cluster)
    try:
        found = plan(problem)
    except NothingFits as error:
        raise ConfigError(str(error), key=KEY, value="amsp") from None
    if not quietly and os.environ.get("RANK", "0") == "0":
        named = ", ".join(f"{key}={getattr(found.chain, key)}" for key in FACTORS)
        log.info(
            "sharding: amsp plans %s: %.2f GiB a rank, %.1f ms of transfers a step, %.1f ms of these exposed",
            named,
            found.bytes / 2**30,
            found.seconds * 1e3,
            found.exposed_s * 1e3,
        )
    return _with(config, sharding, {key: getattr(found.chain, key) for key in FACTORS})


def problem_of(config: Any, degrees: Degrees, cluster: Cluster | None = None) -> Problem:
    """The planner's problem for a recipe on so many ranks."""
    from trainwright.train.degrees import local_rows, machine, work

    sharding: AmspConfig = config.parallel.sharding
    given = cluster is not None or sharding.cluster is not None
    cluster = cluster or Cluster.load(sharding.cluster)
    needs = work(config)
    arch = needs.arch
    if arch is None:
        raise ConfigError(
            "plans for our own decoder, whose size is known beforehand; give parameters, gradients and states",
            key=KEY,
            value="amsp",
        )
    counts = [params_of_block(arch, layer)[0] for layer in range(arch.n_layers)]
    numbers = sum(counts) + root_params(arch)
    ranks = degrees.dp_replicate * degrees.cp
    memory = cluster.memory_gb * 1e9 if given else float(machine(config, ranks).memory)
    if config.parallel.device_memory is not None:
        memory = config.parallel.device_memory * 2**30
    # Beside the states: activations, and two layers and the root whole.
    activations = device_bytes(Degrees(ranks // degrees.cp, cp=degrees.cp), config.parallel, needs)
    activations -= STATE_BYTES * numbers
    compute = _compute_bytes(config)
    other = activations + compute * (2 * max(counts) + root_params(arch))
    rows, micro = local_rows(config, degrees.dp_replicate, 1)
    tokens = micro * needs.seq_len / degrees.cp
    seconds = 6 * numbers * tokens / (cluster.tflops * 1e12 * cluster.efficiency)
    return Problem(
        parameters=numbers,
        ranks=ranks,
        ranks_per_node=cluster.ranks_per_node,
        inside=Hop((sharding.inside_gb_per_s or cluster.inside.gb_per_s) * 1e9, cluster.inside.latency_us * 1e-6),
        between=Hop((sharding.between_gb_per_s or cluster.between.gb_per_s) * 1e9, cluster.between.latency_us * 1e-6),
        micro_steps=math.ceil(rows / micro),
        layers=arch.n_layers + 1,
        compute_s=seconds,
        memory=SHARE * memory - other,
        parameter_size=compute,
        gradient_size=4 if sharding.gradient_dtype == "float32" else compute,
        state_size=MOMENTS + (4 if compute != 4 else 0),
    )


def _compute_bytes(config: Any) -> int:
    """Bytes of a number in the copy of the weights that the model computes with."""
    import torch

    if config.precision.name != "auto":
        return int(config.precision.build(torch.device("cpu")).compute_dtype.itemsize)
    return 4 if config.run.device == "cpu" or not torch.cuda.is_available() else 2


def _with(config: Any, sharding: AmspConfig, factors: dict[str, int | None]) -> Any:
    chosen = sharding.model_copy(update=factors)
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"sharding": chosen})})
