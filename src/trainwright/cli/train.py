"""``trainwright train``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainwright.cli.output import complain, log_to_terminal
from trainwright.core.errors import ConfigError, Interrupted
from trainwright.parallel import launch


def run(recipe: Path | None, overrides: list[str], nproc: int, resume: Path | None) -> int:
    """Train in this process, or in ``nproc`` of them; the exit code."""
    if launch.launched():
        launch.follow_launcher()
    elif nproc > 1:
        return _launch(recipe, overrides, nproc, resume)
    config = load(recipe, overrides, resume)
    from trainwright.train import Trainer

    log_to_terminal()
    try:
        summary = Trainer(config, resume=resume is not None).fit()
    except KeyboardInterrupt:  # during the set-up, or a second Ctrl-C, which does not wait for the step
        raise Interrupted("interrupted; what came after the last checkpoint is not saved") from None
    finally:
        _leave_process_group()
    if os.environ.get("RANK", "0") == "0":
        print(closing(summary))
    return 0


def load(recipe: Path | None, overrides: list[str], resume: Path | None) -> Any:
    """The recipe of the run: as given, or that of the run to go on with; a resumed run stays in its folder."""
    from trainwright.config import RunConfig

    if resume is None:
        return RunConfig.load(recipe, overrides)
    from trainwright.config.run_config import apply_override, read_recipe
    from trainwright.train.run_dir import saved_config

    saved = saved_config(resume)
    data = saved if recipe is None else read_recipe(recipe)
    for override in overrides:
        apply_override(data, override)
    place = {"dir": str(resume.resolve().parent), "name": resume.resolve().name}
    data["run"] = {**(data.get("run") or {}), **place}
    return RunConfig.load(data)


def closing(summary: dict[str, Any]) -> str:
    parts = [f"done: step {summary['step']}"] if "step" in summary else ["done"]
    for label, key in (("loss", "loss"), ("validation loss", "val_loss"), ("bits/byte", "val_bits_per_byte")):
        if isinstance(summary.get(key), float):
            parts.append(f"{label} {summary[key]:.4f}")
    where = summary.get("report") or summary.get("run_dir")
    return "  ".join(parts) + (f"\n{where}" if where else "")


def _launch(recipe: Path | None, overrides: list[str], nproc: int, resume: Path | None) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this process was started by torchrun already; leave out --nproc", key="--nproc", value=nproc)
    load(recipe, overrides, resume).parallel.resolve(nproc)  # what is wrong is said once, before anything starts
    arguments = ["train", *([str(recipe)] if recipe else []), *overrides]
    if resume is not None:
        arguments += ["--resume", str(resume)]
    outcome = launch.launch(nproc, arguments)
    for message in outcome.messages:
        complain(outcome.code, message)
    return outcome.code


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
