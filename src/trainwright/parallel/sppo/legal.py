"""What does not go with rows in chunks, refused before any process group is made."""

from __future__ import annotations

from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.models.architecture import Architecture
from trainwright.parallel.config import Degrees
from trainwright.parallel.sppo.sppo import sppo_of

# Memory methods that the backward pass of a chunk does not go with.
_MEMORY = {
    "activation_checkpointing": "makes the activations anew that sppo keeps or offloads; leave it out",
    "fused_backward": "steps the parameters in a backward pass, and sppo has one for each chunk; leave it out",
}
_TRANSFORMS = {"early_exit": "has losses inside the stages"}


def check_recipe(degrees: Degrees, config: Any, arch: Architecture | None, micro_batch_size: int) -> None:
    """Raises ConfigError for parts of a recipe that do not go with ``parallel.context: sppo``; nothing without it.

    config            the RunConfig
    arch              None: a model whose inside is not known here
    micro_batch_size  rows
    """
    sppo = sppo_of(config.parallel)
    if sppo is None:
        return
    if arch is None:
        raise ConfigError(
            "needs attention that looks back only, as our own decoder's does, and this model's is not known; load the "
            "weights with model: {name: pretrained}, or leave it out",
            key="parallel.context",
            value="sppo",
        )
    if degrees.cp > 1:
        sppo.check(degrees.cp, arch.n_heads, arch.n_kv_heads, config.train.seq_len)
    if degrees.ep > 1:
        raise ConfigError(
            "does not go with context: sppo in this release; set ep=1", key="parallel.ep", value=degrees.ep
        )
    for key in ("tensor", "sharding"):
        other = getattr(config.parallel, key)
        if other is not None:
            raise ConfigError(
                "was not made for rows in chunks (context: sppo); leave one out",
                key=f"parallel.{key}",
                value=other.name,
            )
    section = config.parallel.pipeline
    if section.schedule not in ("1f1b", "gpipe") or section.stages_per_rank > 1:
        raise ConfigError(
            "is an order of work, and sppo has its own; leave it out",
            key="parallel.pipeline.schedule",
            value=section.schedule,
        )
    if config.data.batcher.regroups:
        raise ConfigError(
            "makes rows of different lengths, and sppo cuts all alike; use another batcher",
            key="data.batcher",
            value=config.data.batcher.name,
        )
    if config.train.compile:
        raise ConfigError(
            "does not go with context: sppo, whose attention keeps the keys of past chunks; set it to false",
            key="train.compile",
            value=True,
        )
    for i, transform in enumerate(config.transforms):
        why = "swaps the attention" if getattr(transform, "swaps_attention", False) else _TRANSFORMS.get(transform.name)
        if why is not None:
            raise ConfigError(
                f"{why}, and sppo cuts rows of dense causal attention; leave one out",
                key=f"transforms.{i}",
                value=transform.name,
            )
    for method in config.memory:
        if method.name in _MEMORY:
            raise ConfigError(_MEMORY[method.name], key="memory", value=method.name)
    sppo.layout(arch, config.train.seq_len, degrees.pp, micro_batch_size)
