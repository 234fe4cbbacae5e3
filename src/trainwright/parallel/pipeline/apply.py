"""A whole decoder cut into stages, of which this rank keeps its own; data parallelism inside of each."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.errors import ConfigError
from trainwright.models.base import LanguageModel
from trainwright.models.decoder import Decoder
from trainwright.parallel.config import ParallelConfig
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.pipeline.layout import stage_layers, stage_ranks
from trainwright.parallel.pipeline.pipeline import Pipeline
from trainwright.parallel.pipeline.stage import Stage, StageModel


def apply_pipeline(
    model: LanguageModel,
    mesh: Mesh,
    config: ParallelConfig,
    precision: Any,
    device: torch.device,
    experts_over: DeviceMesh | None = None,
    chunks: Any = None,
) -> Pipeline:
    """This rank's stages of ``model``, a decoder cut already by what cuts layers; the rest of it is let go.

    experts_over  the ranks that hold the same experts, where these are spread
    chunks        what rows go by chunk by chunk (parallel/sppo/rows.py), where they do

    Raises ConfigError for other models, and where a rank would have nothing to train.
    """
    if not isinstance(model, Decoder):
        raise ConfigError("cuts our own decoder alone; use dp_shard for other models", key="parallel.pp")
    section = config.pipeline
    layout = stage_ranks(mesh.degrees.pp, section)
    model_, stages, idle = cut_stages(model, mesh.rank_in("pp"), layout, config)
    if idle is not None:
        raise ConfigError(
            f"leaves rank {idle} of {mesh.degrees.pp} without a trainable parameter; unfreeze some of its layers, or "
            "use dp_shard",
            key="parallel.pp",
            value=mesh.degrees.pp,
        )
    dtype = model.embed.weight.dtype
    if mesh.dp_size * mesh.degrees.cp > 1:
        for stage in stages.values():
            _spread_data(stage, mesh, precision, experts_over)
        dtype = precision.fsdp_param_dtype or dtype
    for stage in stages.values():
        stage.to(device)
        stage.dtype = dtype
    group = cast(dist.ProcessGroup, mesh.group("pp"))
    if chunks is not None:
        from trainwright.parallel.sppo.pipeline import SppoPipeline

        return SppoPipeline(model_, stages, section, layout, group, device, chunks)
    return Pipeline(model_, stages, section, layout, group, device)


def cut_stages(
    model: Decoder, pp_rank: int, layout: list[int], config: ParallelConfig
) -> tuple[StageModel, dict[int, Stage], int | None]:
    """What ``pp_rank`` holds of a whole decoder, its stages by number, and a rank that has nothing to train, if any."""
    layers = stage_layers(model.arch.n_layers, len(layout), config.pipeline.layers)
    last = len(layout) - 1

    def stages_of(rank: int) -> dict[int, Stage]:
        return {
            i: Stage(
                model,
                layers[i],
                first=i == 0,
                last=i == last,
                own_head=model.head is None and i == last and layout[0] == layout[last],
            )
            for i, owner in enumerate(layout)
            if owner == rank
        }

    idle = None
    for rank in sorted(set(layout)):
        trained = any(p.requires_grad for s in stages_of(rank).values() for p in s.parameters())
        if not trained and idle is None:
            idle = rank
    stages = stages_of(pp_rank)
    return StageModel(model, list(stages.values())), stages, idle


def _spread_data(stage: Stage, mesh: Mesh, precision: Any, experts_over: DeviceMesh | None) -> None:
    """FSDP2 (or its machinery, where each rank has the whole stage) over the ranks that see other tokens.

    What is gathered stays so for all micro-batches of a step, and gradients are reduced once, at its end: gathering
    for each of them again would cost as many collectives as there are micro-batches.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    over = mesh.data_mesh()
    reduce_dtype = torch.promote_types(torch.float32, next(stage.parameters()).dtype)
    dtypes: dict[str, Any] = {"param_dtype": precision.fsdp_param_dtype, "reduce_dtype": reduce_dtype}
    inner = MixedPrecisionPolicy(**dtypes)
    outer = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)  # balancing losses stay float32
    blocks = list(stage.blocks.values())
    if mesh.degrees.dp_shard == 1 and experts_over is None:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for block in blocks:
            replicate(block, mesh=over, mp_policy=inner)
        replicate(stage, mesh=over, mp_policy=outer)
        return
    for block in blocks:
        if experts_over is not None:
            from trainwright.parallel.expert import fully_shard_experts

            settings = {"mp_policy": inner, "reshard_after_forward": False}
            fully_shard_experts(block, experts_over, cast(DeviceMesh, over), mesh.degrees.ep, **settings)
        fully_shard(block, mesh=over, mp_policy=inner, reshard_after_forward=False)
    fully_shard(stage, mesh=over, mp_policy=outer, reshard_after_forward=False)
