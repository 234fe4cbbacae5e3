"""``trainwright train``."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainwright.cli.output import complain, log_to_terminal
from trainwright.core.errors import ConfigError, Interrupted
from trainwright.parallel import launch


@dataclass(frozen=True)
class Processes:
    """How many processes to start, where, and how often again. Each range is its fewest and its most."""

    here: tuple[int, int] = (1, 1)
    restarts: int = 0
    machines: launch.Machines | None = None

    @classmethod
    def parse(cls, nproc: str, nnodes: str, rdzv: str | None, rdzv_id: str | None, restarts: int) -> Processes:
        """From the options of the command. Raises ConfigError."""
        here, (fewest, most) = _range("--nproc", nproc), _range("--nnodes", nnodes)
        if rdzv is None:
            if most > 1:
                raise ConfigError("needs --rdzv HOST:PORT, the same on every machine", key="--nnodes", value=nnodes)
            return cls(here, restarts)
        host, _, port = rdzv.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError("should be HOST:PORT", key="--rdzv", value=rdzv)
        job = rdzv_id or os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise ConfigError("is needed with --rdzv: a name of the job, the same on every machine", key="--rdzv-id")
        return cls(here, restarts, launch.Machines(fewest, most, rdzv, job))

    @property
    def alone(self) -> bool:
        """Whether one process is asked for, with nobody to watch over it."""
        return self.here[1] == 1 and self.machines is None and self.restarts == 0


_IN_SET_UP = "interrupted before the first step: nothing was trained; data that is ready stays in the cache"


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _leave_set_up() -> NoReturn:
    """Ends the process from a thread beside one that does not come back."""
    from trainwright.train.progress import terminal

    terminal().show_cursor(True)
    complain(Interrupted.exit_code, _IN_SET_UP)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Interrupted.exit_code)


def _range(key: str, text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not low.isdigit() or (colon and not high.isdigit()):
        raise ConfigError("should be a number, or MIN:MAX", key=key, value=text)
    fewest, most = int(low), int(high or low)
    if not 1 <= fewest <= most:
        raise ConfigError("should be at least 1, and MIN no more than MAX", key=key, value=text)
    return fewest, most


def run(recipe: Path | None, overrides: list[str], processes: Processes, resume: Path | None) -> int:
    """Train in this process, or in those asked for; the exit code."""
    if launch.launched():
        launch.follow_launcher()
    elif not processes.alone:
        return _launch(recipe, overrides, processes, resume)
    config = load(recipe, overrides, resume)
    from trainwright.train import Trainer
    from trainwright.train.signals import EndedByTerm

    log_to_terminal()
    trainer: Trainer | None = None
    try:
        # A rank that its launcher ends is to die of the signal, by which the launcher tells it from one that failed.
        with nullcontext() if launch.launched() or _world_size() > 1 else EndedByTerm(_leave_set_up):
            trainer = Trainer(config, resume=resume is not None)
        summary = trainer.fit()
    except KeyboardInterrupt:  # during the set-up, or a second Ctrl-C, which does not wait for the step
        after = "interrupted; what came after the last checkpoint is not saved"
        raise Interrupted(_IN_SET_UP if trainer is None else after) from None
    except Exception as error:
        reason = launch.lost_another(error)
        if reason and _world_size() > 1:
            launch.leave_after_loss(reason)
        raise
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
    if "finished" in summary:
        return f"{summary['run_dir']} {summary['finished']}"
    parts = [f"done: step {summary['step']}"] if "step" in summary else ["done"]
    for label, key in (("loss", "loss"), ("validation loss", "val_loss"), ("bits/byte", "val_bits_per_byte")):
        if isinstance(summary.get(key), float):
            parts.append(f"{label} {summary[key]:.4f}")
    if "ended" in summary:
        parts[-1] += f"\n{summary['ended']}"
    where = summary.get("report") or summary.get("run_dir")
    return "  ".join(parts) + (f"\n{where}" if where else "")


def _launch(recipe: Path | None, overrides: list[str], processes: Processes, resume: Path | None) -> int:
    from trainwright.config.inputs import check_inputs
    from trainwright.train.degrees import check

    fewest, most = processes.here
    if _world_size() > 1:
        raise ConfigError("this process was started by torchrun already; leave out --nproc", key="--nproc", value=most)
    config = load(recipe, overrides, resume)
    machines = processes.machines
    # What is wrong is said once, before anything starts.
    check_inputs(config)
    check(config, most * (machines.most if machines else 1))

    def legal(workers: int) -> bool:
        """With how many other machines is not known here; a fault is named by the workers then."""
        try:
            check(config, workers)
        except ConfigError:
            return machines is not None
        return True

    arguments = ["train", *([str(recipe)] if recipe else []), *overrides]
    if resume is not None:
        arguments += ["--resume", str(resume)]
    outcome = launch.launch(
        most,
        arguments,
        min_nproc=fewest,
        machines=machines,
        restarts=processes.restarts,
        legal=legal,
        patience=2 * config.parallel.timeout + 60,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    for message in outcome.messages:
        complain(outcome.code, message)
    return outcome.code


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
