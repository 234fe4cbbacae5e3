"""Whether a model can be cut by the degrees that a recipe asks for: checked before any process group is made."""

from __future__ import annotations

from trainwright.core.errors import ConfigError
from trainwright.models.architecture import Architecture
from trainwright.parallel.config import Degrees, ParallelConfig, context_method


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
    if cp > 1:
        context_method(config).check(cp, arch.n_heads // tp, arch.n_kv_heads // tp, seq_len)
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


def _divisors(*sizes: int) -> str:
    return ", ".join(str(d) for d in range(1, min(sizes) + 1) if all(n % d == 0 for n in sizes))
