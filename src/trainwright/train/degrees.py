"""The degrees of parallelism of a recipe on so many processes: as given, or chosen where it says ``parallel: auto``."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

from trainwright.config.run_config import RunConfig
from trainwright.core.distributed import gather_objects, launched_world_size
from trainwright.core.errors import ConfigError
from trainwright.models.architecture import Architecture
from trainwright.models.base import LanguageModel
from trainwright.parallel.auto import Machine, Work, choose
from trainwright.parallel.config import Degrees, micro_batch_rows
from trainwright.parallel.legal import check_cut, check_parts
from trainwright.parallel.pipeline.legal import check_early_exits, check_recipe
from trainwright.parallel.sppo.legal import check_recipe as check_chunks

log = logging.getLogger("trainwright")
_USUAL_VOCABULARY = 50_000  # where the tokenizer is not there yet and does not say


def settled(config: RunConfig, world_size: int | None = None, *, quietly: bool = False) -> RunConfig:
    """``config`` with the degrees that ``parallel: auto`` stands for; otherwise ``config`` itself.

    Every rank chooses for itself, by figures that are the same on all: no process group is needed.
    Raises ConfigError where no degrees are legal.
    """
    world_size = launched_world_size() if world_size is None else world_size
    if config.parallel.sharding is not None:
        from trainwright.train.sharding import settled_sharding

        return settled_sharding(config, world_size, quietly=quietly)
    if not config.parallel.auto:
        return config
    choice = choose(world_size, config.parallel, work(config), machine(config, world_size))
    if not quietly and os.environ.get("RANK", "0") == "0":
        log.log(logging.INFO if choice.fits else logging.WARNING, choice.sentence())
    chosen = {k: getattr(choice.degrees, k) for k in ("dp_replicate", "dp_shard", "cp", "tp")}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=chosen)})


def check(config: RunConfig, world_size: int) -> Degrees:
    """The degrees on ``world_size`` processes. Raises ConfigError where the recipe cannot run on these."""
    return check_settled(settled(config, world_size, quietly=True), world_size)


def check_settled(config: RunConfig, world_size: int) -> Degrees:
    """As :func:`check`, of a recipe whose degrees are chosen."""
    degrees = config.parallel.resolve(world_size)
    if config.train.known_steps is not None:
        try:
            config.optimizer.for_run(config.train.known_steps)
        except ConfigError as error:
            raise error.under("optimizer") from None
    if world_size > 1 or config.parallel.tensor is not None:
        check_cut(degrees, config.parallel, architecture(config), config.train.seq_len)
    rows, dp_size = config.train.global_batch_rows, degrees.dp_replicate * degrees.dp_shard
    if rows < dp_size:
        raise ConfigError(
            f"gives {rows} rows of seq_len={config.train.seq_len} a step, fewer than the {dp_size} data-parallel "
            f"ranks; use at least {dp_size * config.train.seq_len}",
            key="train.global_batch_tokens",
            value=config.train.global_batch_tokens,
        )
    if degrees.cp > 1:
        for i, transform in enumerate(config.transforms):
            if getattr(transform, "swaps_attention", False):
                raise ConfigError(
                    "swaps the attention, and parallel.cp spreads the tokens of dense attention; leave it out, or set "
                    "parallel.cp=1",
                    key=f"transforms.{i}",
                    value=transform.name,
                )
    if degrees.pp > 1:
        check_recipe(degrees, config, *local_rows(config, dp_size, degrees.pp))
    check_early_exits(degrees, config, architecture(config), *local_rows(config, dp_size, degrees.pp))
    check_chunks(degrees, config, architecture(config), local_rows(config, dp_size, degrees.pp)[1])
    if config.parallel.sharding is not None:
        local, micro = local_rows(config, dp_size, degrees.pp)
        config.parallel.sharding.check_steps(None if config.data.batcher.regroups else math.ceil(local / micro))
    if config.parallel.tensor is not None:
        config.parallel.tensor.check_recipe(config, *local_rows(config, dp_size, degrees.pp))
    check_parts(degrees, config, architecture(config), *local_rows(config, dp_size, degrees.pp))
    _check_transforms(config)
    return degrees


def _check_transforms(config: RunConfig) -> None:
    """Raises the ConfigError that a transform would raise, of a model without weights: of our own transforms and our
    own decoder, for others may look at weights."""
    arch = architecture(config)
    own = all(type(t).__module__.startswith("trainwright.") for t in config.transforms)
    if arch is not None and own and config.transforms:
        without_weights(arch, config.transforms)


def without_weights(arch: Architecture, transforms: Sequence[Any]) -> LanguageModel:
    """A decoder on the meta device, with ``transforms``."""
    import torch

    from trainwright.models.decoder import Decoder

    with torch.device("meta"):
        model: LanguageModel = Decoder(arch)
        for transform in transforms:
            model = transform.apply(model)
    return model


def local_rows(config: RunConfig, ranks: int, pp: int) -> tuple[int, int]:
    """Rows of a step, and those of a micro-batch, on each of the ranks that see different rows."""
    local = max(1, math.ceil(config.train.global_batch_rows / ranks))
    return local, micro_batch_rows(local, config.train.seq_len, pp, config.train.micro_batch_size)


def check_agreed(config: RunConfig, degrees: Degrees) -> None:
    """Raises ConfigError on every rank where machines with other memory chose other degrees. Collective."""
    sharding = config.parallel.sharding
    if not config.parallel.auto and sharding is None:
        return
    mine = degrees if sharding is None else (degrees, sharding.describe())
    others = [d for d in gather_objects(mine) if d != mine]
    if others:
        raise ConfigError(
            f"machines with different memory choose different degrees ({mine} and {others[0]}); set "
            "parallel.device_memory to the smallest, in GiB",
            key="parallel",
            value="auto",
        )


def work(config: RunConfig) -> Work:
    train = config.train
    rows = min(train.micro_batch_size or max(1, 8192 // train.seq_len), train.global_batch_rows)
    recompute = any(m.name == "activation_checkpointing" for m in config.memory)
    return Work(architecture(config), train.seq_len, train.global_batch_rows, rows * train.seq_len, recompute)


def machine(config: RunConfig, world_size: int) -> Machine:
    """Memory and number of devices of this machine, in whole GiB so that equal machines agree."""
    import torch

    from trainwright.core.hardware import total_memory

    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    given = config.parallel.device_memory
    if given is not None:
        return Machine(int(given * 2**30), here)
    if config.run.device != "cpu" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = total_memory() // here
    return Machine(max(memory // 2**30, 1) * 2**30, here)


def architecture(config: RunConfig) -> Architecture | None:
    """That of one of our own decoders, with as many ids as the recipe lets one know; None for other models."""
    find = getattr(config.model, "architecture", None)
    if find is None:
        return None
    found: Architecture = find(vocabulary(config) or _USUAL_VOCABULARY)
    return dataclasses.replace(found)


def vocabulary(config: RunConfig) -> int | None:
    """Ids of the recipe's model or tokenizer, where one of them says."""
    from trainwright.data.tokenizers.bytes import ByteTokenizer

    tokenizer: Any = config.tokenizer
    if given := getattr(config.model, "vocab_size", None):
        return int(given)
    if tokenizer is not None and tokenizer.name == "bytes":
        return ByteTokenizer.vocab_size
    return getattr(tokenizer, "vocab_size", None)
