"""Whether a model can be cut by the degrees that a recipe asks for, and whether the recipe's other parts go with these:
checked before any process group is made."""

from __future__ import annotations

import re
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.models.architecture import Architecture
from trainwright.parallel.config import Degrees, ParallelConfig, PipelineSection, context_method
from trainwright.parallel.sppo.sppo import sppo_of


def check_cut(degrees: Degrees, config: ParallelConfig, arch: Architecture | None, seq_len: int) -> None:
    """Raises ConfigError, naming both numbers and the legal ones, where ``arch`` cannot be cut by ``degrees``.

    arch  None: a model whose inside is not known here; it can be replicated and sharded, nothing else
    """
    if config.sharding is not None:
        config.sharding.check(degrees, config)
    if arch is None:
        for key in ("tp", "pp", "cp", "ep"):
            if getattr(degrees, key) > 1:
                raise ConfigError(
                    "is for our own decoder; load the weights with model: {name: pretrained}, or use dp_shard",
                    key=f"parallel.{key}",
                    value=getattr(degrees, key),
                )
        if config.tensor is not None:
            config.tensor.check(degrees, config, arch)
        return
    tp, cp, pp, ep = degrees.tp, degrees.cp, degrees.pp, degrees.ep
    for what, size in (
        ("n_heads", arch.n_heads),
        ("n_kv_heads", arch.n_kv_heads),
        ("the feed-forward width", arch.moe_ffn_dim if arch.n_experts else arch.ffn_dim),
    ):
        if size % tp:
            raise ConfigError(
                f"does not divide {what}={size}; use one of {_divisors(arch.n_heads, arch.n_kv_heads, size)}",
                key="parallel.tp",
                value=tp,
            )
    if config.tensor is not None:
        config.tensor.check(degrees, config, arch)
    if tp > 1 and arch.n_experts and not config.sequence_parallel:
        raise ConfigError(
            "leaves the whole stream to each rank, and experts take the tokens that a rank has: leave it out, or set "
            "parallel.tp=1 (experts are spread by parallel.ep)",
            key="parallel.sequence_parallel",
            value=False,
        )
    if cp > 1:
        context_method(config).check(cp, arch.n_heads // tp, arch.n_kv_heads // tp, seq_len)
    if cp > 1 and pp > 1:
        context_method(config).check_pipeline()
    stages = pp * config.pipeline.stages_per_rank
    if pp > 1 and stages > arch.n_layers:
        raise ConfigError(
            f"makes {stages} stages of {arch.n_layers} layers; use at most "
            f"{arch.n_layers // config.pipeline.stages_per_rank}",
            key="parallel.pp",
            value=pp,
        )
    if config.pipeline.layers is not None:
        layers = config.pipeline.layers
        if len(layers) != stages or sum(layers) != arch.n_layers:
            raise ConfigError(
                f"should be {stages} numbers that add up to {arch.n_layers} layers, these are {len(layers)} that add "
                f"up to {sum(layers)}",
                key="parallel.pipeline.layers",
                value=layers,
            )
    if ep > 1 and not arch.n_experts:
        raise ConfigError("needs a model with experts, and this one has none; set ep=1", key="parallel.ep", value=ep)
    if ep > 1 and arch.n_experts % ep:
        raise ConfigError(
            f"does not divide the {arch.n_experts} experts; use one of {_divisors(arch.n_experts)}",
            key="parallel.ep",
            value=ep,
        )
    ranks = degrees.dp_shard * cp // ep  # with the same experts: FSDP2 shards these, or each of them
    if ep > 1 and (arch.n_experts // ep) % ranks and (arch.moe_ffn_dim % ranks or arch.dim % ranks):
        raise ConfigError(
            f"leaves {arch.n_experts // ep} experts of widths {arch.moe_ffn_dim} and {arch.dim} to {ranks} ranks "
            "(dp_shard x cp / ep) to shard evenly; use a larger ep",
            key="parallel.ep",
            value=ep,
        )


def check_parts(degrees: Degrees, config: Any, arch: Architecture | None, rows: int, micro_batch_size: int) -> None:
    """Raises ConfigError for parts of a recipe that do not go with its degrees, or that these leave without a use.

    config            the RunConfig
    arch              None: a model whose inside is not known here
    rows              of a rank's share of the global batch
    micro_batch_size  rows
    """
    _check_used(degrees, config.parallel)
    _check_divided(degrees, config)
    for i, transform in enumerate(config.transforms):
        why = _why_not(transform, degrees, arch, config.parallel)
        if why is not None:
            raise ConfigError(why, key=f"transforms.{i}", value=transform.name)
    if any(method.name == "fused_backward" for method in config.memory):
        _check_fused_backward(degrees, config, rows, micro_batch_size)


def _check_used(degrees: Degrees, parallel: ParallelConfig) -> None:
    """Settings that say how something is done which is not done."""
    context = parallel.context
    if context is not None and degrees.cp == 1 and sppo_of(parallel) is None and not parallel.auto:
        raise ConfigError(
            "says how the tokens of a row are spread over parallel.cp ranks, and cp is 1; set cp, or leave it out",
            key="parallel.context",
            value=context.name,
        )
    if degrees.pp == 1:
        usual = PipelineSection()
        for key in PipelineSection.model_fields:
            value = getattr(parallel.pipeline, key)
            if value != getattr(usual, key):
                raise ConfigError(
                    "is for the stages of a pipeline, and parallel.pp is 1; set pp, or leave it out",
                    key=f"parallel.pipeline.{key}",
                    value=value,
                )
    if parallel.auto:  # may leave any of them without a use
        return
    if degrees.tp == 1 and parallel.tensor is None and not parallel.sequence_parallel:
        raise ConfigError(
            "says how tensor-parallel ranks hold the stream, and parallel.tp is 1; set tp, or leave it out",
            key="parallel.sequence_parallel",
            value=False,
        )
    sharded = degrees.dp_shard > 1 or degrees.ep > 1
    for key, default in (("accumulate", "sharded"), ("reshard_after_forward", True)):
        value = getattr(parallel, key)
        if not sharded and value != default:
            raise ConfigError(
                "is for FSDP2, and parallel.dp_shard is 1; set dp_shard, or leave it out",
                key=f"parallel.{key}",
                value=value,
            )
    if parallel.find_unused_parameters and parallel.sharding is None:
        unlike_ddp = degrees.tp > 1 or sppo_of(parallel) is not None
        if degrees.pp > 1 or (unlike_ddp and not sharded):
            key = next((k for k in ("pp", "tp") if getattr(degrees, k) > 1), "context")
            raise ConfigError(
                f"is for DDP and for FSDP2 without a pipeline, and with parallel.{key} there is neither; leave it out",
                key="parallel.find_unused_parameters",
                value=True,
            )


def _check_divided(degrees: Degrees, config: Any) -> None:
    """Parts that want whole rows and the whole model on each rank."""
    divided = next((key for key in ("tp", "cp", "pp") if getattr(degrees, key) > 1), None)
    if divided is not None:
        from trainwright.data.mixers.base import UpdatingMixerConfig

        data = config.data
        for key, looks in (
            ("mixer", isinstance(data.mixer, UpdatingMixerConfig)),
            ("selector", data.selector.selects),
            ("weighter", data.weighter.weighs),
        ):
            if looks:
                raise ConfigError(
                    f"chooses data by what the model says of whole rows, and works with data parallelism alone; set "
                    f"parallel.{divided}=1, and use dp_replicate or dp_shard",
                    key=f"data.{key}",
                    value=getattr(data, key).name,
                )
    if config.objective.name == "salt":
        divided = divided or ("context" if sppo_of(config.parallel) is not None else None)
        if divided is not None and _has_teacher(config):
            raise ConfigError(
                f"takes a whole row and the whole head on each rank, and parallel.{divided} divides them; train with "
                "dp_replicate or dp_shard, or with objective=next_token",
                key="objective.name",
                value="salt",
            )


def _has_teacher(config: Any) -> bool:
    """Whether soft labels are asked for; where the run's length is not known yet, whether a share of it has them."""
    salt, total = config.objective, config.train.known_steps
    if salt.weight == 0:
        return False
    try:
        steps = salt.stage_steps(total) if total is not None else salt.share if salt.steps is None else salt.steps
    except ConfigError as error:
        raise error.under("objective") from None
    return bool(steps > 0)


def _why_not(transform: Any, degrees: Degrees, arch: Architecture | None, parallel: ParallelConfig) -> str | None:
    if transform.name == "grass_linear":
        return _why_not_sliced(degrees, parallel)
    if transform.name != "lora":
        return None
    if degrees.tp > 1:
        return "puts adapters in linear layers, and parallel.tp cuts plain ones; set tp=1, and use dp_shard"
    if degrees.ep > 1 and arch is not None and _adapts_experts(transform.targets, arch):
        return (
            "puts adapters in experts, and parallel.ep spreads plain ones; set ep=1, or name layers that are no "
            "experts in targets, such as attn.(q|k|v|o)"
        )
    return None


def _why_not_sliced(degrees: Degrees, parallel: ParallelConfig) -> str | None:
    """Slices are added up over ranks that hold the same weights or shards of whole ones, and nothing else."""
    out = "leave it out, optimizer=grass works without"
    for key in ("tp", "pp", "ep"):
        if getattr(degrees, key) > 1:
            return f"adds slices of gradients up over replicas and FSDP2's shards, and not with parallel.{key}; {out}"
    if degrees.world_size == 1:
        return None
    if parallel.sharding is not None:
        return f"adds slices of gradients up itself, and parallel.sharding takes whole ones; {out}"
    if sppo_of(parallel) is not None:
        return f"adds slices of gradients up after whole rows, and parallel.context=sppo cuts these; {out}"
    if parallel.find_unused_parameters:
        return f"gives no gradient where it gives a slice, and parallel.find_unused_parameters makes zeros of it; {out}"
    return None


def _adapts_experts(targets: list[str], arch: Architecture) -> bool:
    names = [
        f"blocks.{i}.mlp.{part}" for i in range(arch.n_layers) for part in ("gate", "up", "down") if arch.is_moe(i)
    ]
    patterns = [rf"(?:^|\.)(?:{target})$" for target in targets if target not in ("matrix", "expert")]
    return "expert" in targets or any(re.search(pattern, name) for pattern in patterns for name in names)


def _check_fused_backward(degrees: Degrees, config: Any, rows: int, micro_batch_size: int) -> None:
    if degrees.world_size > 1:
        raise ConfigError(
            f"steps before {degrees.world_size} ranks could add their gradients up; train in one process, or leave it "
            "out (dp_shard divides the gradients over the ranks)",
            key="memory",
            value="fused_backward",
        )
    if rows > micro_batch_size or config.data.batcher.regroups:
        raise ConfigError(
            f"takes the whole batch at once, and this is {micro_batch_size} of {rows} rows: set "
            f"train.micro_batch_size={rows} or lower train.global_batch_tokens, and use a batcher other than odb",
            key="memory",
            value="fused_backward",
        )


def _divisors(*sizes: int) -> str:
    return ", ".join(str(d) for d in range(1, min(sizes) + 1) if all(n % d == 0 for n in sizes))
