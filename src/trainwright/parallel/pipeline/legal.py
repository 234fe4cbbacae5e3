"""What a pipeline cannot do, refused before any process group is made."""

from __future__ import annotations

import itertools
import math
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.models.architecture import Architecture
from trainwright.parallel.config import Degrees, PipelineSection
from trainwright.parallel.pipeline.fill import exits_by_stage, fill_plan
from trainwright.parallel.pipeline.layout import stage_layers

# Optimizers that compare parameters with each other, of which a stage sees only its own.
_COMPARING = {"llr": "spreads rates over the layers by comparing them all"}

# Ways of spreading documents that choose the number of micro-batches by the schedule.
_COUNTING = ("bytescale", "flexsp")


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


def check_pipeline(degrees: Degrees, parallel: Any, count: int) -> None:
    """Raises ConfigError where the schedule of a ParallelConfig does not take ``count`` micro-batches a step."""
    check_schedule(parallel.pipeline, degrees.pp)
    context = getattr(parallel, "context", None)
    name = None if context is None else context.name
    # What follows the documents makes as many as the schedule takes.
    if name != "sppo" and not (degrees.cp > 1 and name in _COUNTING):
        check_micro_batches(parallel.pipeline, degrees.pp, count)


def legal_micro_batches(section: PipelineSection, pp: int, count: int) -> int:
    """The least number of micro-batches from ``count`` on that :func:`check_micro_batches` lets through."""
    count = max(1, count)
    if section.schedule == "1f1b":
        return max(count, pp)
    if section.schedule == "interleaved":
        return next(n for n in itertools.count(count) if n % max(1, n // pp) == 0)
    return count


def check_recipe(degrees: Degrees, config: Any, rows: int, micro_batch_size: int) -> None:
    """Raises ConfigError for parts of a recipe that do not go with ``parallel.pp``.

    config            the RunConfig
    rows              of a rank's share of the global batch
    micro_batch_size  rows
    """
    section: PipelineSection = config.parallel.pipeline
    check_pipeline(degrees, config.parallel, math.ceil(rows / micro_batch_size))
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


def check_early_exits(
    degrees: Degrees, config: Any, arch: Architecture | None, rows: int, micro_batch_size: int
) -> None:
    """Raises ConfigError where a recipe's early exits, if it has some, do not go with its model or the degrees."""
    section: PipelineSection = config.parallel.pipeline
    fills = section.fill_warmup + section.fill_cooldown > 0 and degrees.pp > 1
    spec = next((t for t in getattr(config, "transforms", ()) if t.name == "early_exit"), None)
    if spec is None:
        if fills:
            raise ConfigError(
                "fills bubbles with the work of early exits, and there are none; add transforms: [{name: early_exit, "
                "after: [...]}], or set fill_warmup and fill_cooldown to 0",
                key="parallel.pipeline",
            )
        return
    if arch is None:
        raise ConfigError(
            "transforms.early_exit is for our own decoder; load the weights with model: {name: pretrained}"
        )
    settings = spec.settings(arch.n_layers)
    if getattr(config.parallel, "tensor", None) is not None:
        raise ConfigError(
            "has sums under way between blocks, where early exits look at the stream; leave it out (tp alone goes with "
            "them), or transforms.early_exit",
            key="parallel.tensor",
            value=config.parallel.tensor.name,
        )
    width = arch.ffn_dim or arch.moe_ffn_dim
    if spec.mlp and width % degrees.tp:
        raise ConfigError(
            f"gives each exit a feed-forward of width {width}, which parallel.tp={degrees.tp} does not divide; set "
            "false, or another tp",
            key="transforms.early_exit.mlp",
            value=True,
        )
    if degrees.pp == 1:
        return
    if section.schedule not in ("1f1b", "gpipe") or (fills and section.schedule != "1f1b"):
        raise ConfigError(
            f"{'has no bubbles to fill in' if fills else 'does not go with early exits'}: their losses are timed for "
            "one stage a rank; use 1f1b",
            key="parallel.pipeline.schedule",
            value=section.schedule,
        )
    context = getattr(config.parallel, "context", None)
    if fills and degrees.cp > 1 and context is not None and context.name in _COUNTING:
        raise ConfigError(
            "makes as many micro-batches as the documents ask for, and which of them fill bubbles is settled before "
            "the start; set parallel.pipeline.fill_warmup and fill_cooldown to 0, or use flashcp",
            key="parallel.context",
            value=context.name,
        )
    count = math.ceil(rows / micro_batch_size)
    exits = exits_by_stage(settings.positions, stage_layers(arch.n_layers, degrees.pp, section.layers))
    if section.schedule == "1f1b" and count <= degrees.pp:
        raise ConfigError(
            f"makes {count} micro-batches a step, and 1f1b with early exits needs more than its {degrees.pp} stages; "
            "lower it, raise train.global_batch_tokens, or use schedule=gpipe",
            key="train.micro_batch_size",
        )
    if fills:
        plan = fill_plan(count, section.backward_ratio, section.fill_warmup, section.fill_cooldown, exits)
        if plan.full < 1 or plan.stream < degrees.pp:
            raise ConfigError(
                f"makes {count} micro-batches a step, of which {count - plan.full} fill bubbles: "
                f"too few are left for {degrees.pp} stages; lower it, or fill_warmup and fill_cooldown",
                key="train.micro_batch_size",
            )
    idle = next((r for r, n in enumerate(exits) if not n), None)
    if settings.frozen and idle is not None:
        raise ConfigError(
            f"stage {idle} of {degrees.pp} has no exit, and freeze leaves it without a trainable parameter; name a "
            "layer of each stage in transforms.early_exit.after, change parallel.pipeline.layers, or use dp_shard",
            key="parallel.pp",
            value=degrees.pp,
        )
