"""``trainwright plan sppo``: what SPPO decides by, measured here, as lines of the recipe."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from trainwright.core.distributed import default_device
from trainwright.core.errors import ConfigError


def sppo(recipe: Path | None, overrides: list[str]) -> None:
    from trainwright.config import RunConfig
    from trainwright.parallel.sppo.measure import measure
    from trainwright.train.degrees import architecture, local_rows

    config = RunConfig.load(recipe, overrides)
    arch = architecture(config)
    if arch is None:
        raise ConfigError("is for our own decoder", key="model", value=config.model.name)
    device = default_device() if config.run.device == "auto" else torch.device(config.run.device)
    model = config.model.build(arch.vocab_size, config.train.seq_len).to(device)
    parallel = config.parallel
    rows = local_rows(config, max(1, parallel.dp_replicate) * parallel.dp_shard, parallel.pp)[1]
    found = measure(
        model, config.train.seq_len, rows=rows, stages=parallel.pp, precision=config.precision.build(device)
    )
    figures = {name: float(f"{value:.4g}") for name, value in found.model_dump().items()}
    print(yaml.safe_dump({"parallel": {"context": {"name": "sppo", "measured": figures}}}, sort_keys=False), end="")
