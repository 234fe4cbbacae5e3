"""What a pipeline cannot do, refused before any process group is made."""

from __future__ import annotations

import math
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.parallel.config import Degrees, PipelineSection

# Optimizers that compare parameters with each other, of which a stage sees only its own.
_COMPARING = {"llr": "spreads rates over the layers by comparing them all"}


def check_schedule(section: PipelineSection, pp: int) -> None:
    """Raises ConfigError where the number of stages a rank is not what the schedule is made for."""
    n, schedule = section.stages_per_rank, section.schedule
    wanted = {"zero_bubble": n == 2, "interleaved": n > 1}.get(schedule, n == 1)
    if not wanted:
        need = {"zero_bubble": "2", "interleaved": "2 or more"}.get(schedule, "1")
        other = "interleaved" if n > 1 else "1f1b"
        raise ConfigError(
            f"{schedule} takes {need} stages a rank; set it to {need.split()[0]}, or schedule={other}",
            key="parallel.pipeline.stages_per_rank",
            value=n,
        )


def check_micro_batches(section: PipelineSection, pp: int, count: int) -> None:
    """Raises ConfigError where ``count`` micro-batches a step cannot go through the schedule."""
    rounds = max(1, count // pp)
    if section.schedule == "1f1b" and count < pp:
        why, use = f"1f1b needs at least one for each of the {pp} stages", "schedule=gpipe"
    elif section.schedule == "interleaved" and count % rounds:
        why, use = f"interleaved needs rounds of equal length over {pp} ranks", f"a multiple of {pp}"
    else:
        return
    raise ConfigError(
        f"makes {count} micro-batches a step, and {why}; lower it (or raise train.global_batch_tokens), or use {use}",
        key="train.micro_batch_size",
    )


def check_recipe(degrees: Degrees, config: Any, rows: int, micro_batch_size: int) -> None:
    """Raises ConfigError for parts of a recipe that do not go with ``parallel.pp``.

    config            the RunConfig
    rows              of a rank's share of the global batch
    micro_batch_size  rows
    """
    section: PipelineSection = config.parallel.pipeline
    check_schedule(section, degrees.pp)
    check_micro_batches(section, degrees.pp, math.ceil(rows / micro_batch_size))
    if degrees.ep > 1:
        raise ConfigError("does not go with ep in this release; set ep=1", key="parallel.pp", value=degrees.pp)
    if config.data.batcher.regroups:
        raise ConfigError(
            "makes micro-batches of different shapes, and a pipeline passes on one shape; use another batcher",
            key="data.batcher",
            value=config.data.batcher.name,
        )
    if config.precision.name == "fp16":
        raise ConfigError(
            "has a loss scale that the stages would have to agree on; use bf16", key="precision", value="fp16"
        )
    if section.schedule == "zero_bubble" and config.train.compile:
        raise ConfigError(
            "does not go with schedule=zero_bubble, which parts the backward pass; use 1f1b or interleaved",
            key="train.compile",
            value=True,
        )
    spec: Any = config.optimizer
    while spec is not None:
        if spec.name in _COMPARING:
            raise ConfigError(
                f"{_COMPARING[spec.name]}, and a stage has only some; use parallel.pp=1 or another optimizer",
                key="optimizer",
                value=spec.name,
            )
        spec = getattr(spec, "inner", None)
