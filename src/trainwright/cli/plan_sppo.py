"""``trainwright plan sppo``: what SPPO decides by, measured here, as lines of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    if (line := _multiplexed(config, arch, found, rows)) is not None:
        print(f"# {line}")


def _multiplexed(config: Any, arch: Any, measured: Any, rows: int) -> str | None:
    """What sharing the first and last chunks of the recipe's would save; None where there are no stages or chunks."""
    from trainwright.parallel.sppo.multiplex import best
    from trainwright.parallel.sppo.simulator import simulate
    from trainwright.parallel.sppo.solver import BACKWARD
    from trainwright.parallel.sppo.sppo import sppo_of

    stages, method = config.parallel.pp, sppo_of(config.parallel)
    if stages == 1 or method is None:
        return None
    method = method.model_copy(update={"measured": measured})
    cut = method.layout(arch, config.train.seq_len, stages, rows).bounds
    times = method.machine(arch, rows).work.of(cut)
    back = [BACKWARD * t for t in times]
    plain, shared = simulate(times, stages, back), best(times, stages, back)
    return (
        f"{len(times)} chunks on {stages} stages: idle for {plain.bubble:.0%} of a step. Were the first and last "
        f"chunks shared by idle stages, {shared.bubble:.0%}, and a step {shared.seconds / plain.seconds:.3f} as long "
        "(planned only; without what weights and keys take)"
    )
