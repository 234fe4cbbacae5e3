"""A run's folder: made, checked and opened again."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.config.run_config import RunConfig, parse_yaml
from trainwright.core.distributed import broadcast_object, is_main
from trainwright.core.errors import ConfigError, InputError

CONFIG = "config.yaml"
JOB = ".job"  # names the job that made the folder, see goes_on


def saved_config(run_dir: Path) -> dict[str, Any]:
    """The resolved recipe of an existing run. Raises ConfigError when the folder is no run."""
    path = Path(run_dir) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run: it has no {CONFIG}")
    data = parse_yaml(path.read_text("utf-8"), str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged; the run cannot be opened")
    return data


def goes_on(config: RunConfig, resume: bool) -> bool:
    """Whether to go on with the run in the folder: asked for, or this job's launcher has started its processes again.

    The folder carries the name of the job that made it; rank 0 looks. A cluster that queues a job anew under its old
    name (``--rdzv-id``) goes on likewise.
    """

    def same_job() -> bool:
        path, job = config.run_dir / JOB, _job()
        return job is not None and path.is_file() and path.read_text("utf-8") == job

    return bool(broadcast_object(resume or (is_main() and same_job())))


def _job() -> str | None:
    """Name of the job that torchrun or our launcher has started this process for; None for a process alone."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    if name != "none":
        return name
    import psutil

    launcher = psutil.Process().parent()  # torchrun without --rdzv-id
    return None if launcher is None else f"{socket.gethostname()}-{launcher.pid}-{int(launcher.create_time())}"


def check(config: RunConfig, resume: bool) -> None:
    """Before any work: can the run's folder be made, replaced or resumed? Leaves none behind that was not there.

    Rank 0 looks; what it finds is raised on every rank. Raises ConfigError.
    """
    _on_main(lambda: _check(config, resume))


def create(config: RunConfig, resume: bool) -> None:
    """Make the run's folder and write the resolved recipe; an older run goes only now. Raises ConfigError."""
    _on_main(lambda: _create(config, resume))


def _on_main(work: Callable[[], None]) -> None:
    problem: InputError | None = None
    if is_main():
        try:
            work()
        except InputError as error:
            problem = error
    problem = broadcast_object(problem)
    if problem is not None:
        raise problem


def _check(config: RunConfig, resume: bool) -> None:
    run_dir = config.run_dir
    exists = (run_dir / CONFIG).exists()
    if exists and resume:
        check_same_model(config, saved_config(run_dir))
    elif exists and not config.run.overwrite:
        raise ConfigError(
            f"{run_dir} already holds a run; go on with it by `--resume {run_dir}`, "
            "choose another run.name, or replace it with run.overwrite=true",
            key="run.name",
            value=config.run.name,
        )
    elif run_dir.is_dir() and not exists and any(run_dir.iterdir()) and not resume:
        raise ConfigError(
            f"{run_dir} exists and is not a run; choose another run.name or run.dir",
            key="run.name",
            value=config.run.name,
        )
    made = not run_dir.exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
        if made:
            with suppress(OSError):  # something lies in it by now
                run_dir.rmdir()
    except OSError as error:
        raise _unwritable(config, error) from None


def _create(config: RunConfig, resume: bool) -> None:
    run_dir = config.run_dir
    try:
        if (run_dir / CONFIG).exists() and not resume:
            shutil.rmtree(run_dir)
            if config.checkpoint.dir is not None:
                shutil.rmtree(config.checkpoint_dir, ignore_errors=True)
        config.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(run_dir / CONFIG, config.to_yaml())
        job = _job()
        if job is not None:
            write_atomic(run_dir / JOB, job)
    except OSError as error:
        raise _unwritable(config, error) from None


def _unwritable(config: RunConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write the run's folder {config.run_dir}: {error.strerror or error}; choose a writable run.dir",
        key="run.dir",
        value=str(config.run.dir),
    )


def check_same_model(config: RunConfig, saved: dict[str, Any]) -> None:
    """Raises ConfigError naming every field in which the model or tokenizer differs from the saved run's."""
    now = config.to_dict()
    different = []
    for section in ("model", "transforms", "tokenizer"):
        before = saved.get(section)
        different += [f"{key} was {a!r}, is {b!r}" for key, a, b in _differences(section, before, now[section])]
    if different:
        raise ConfigError(
            f"{config.run_dir} was trained with another model: {'; '.join(different)}. "
            "Resume with the same model, or start a new run with another run.name"
        )


def _differences(key: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        out = []
        for k in sorted({*a, *b}):
            out += _differences(f"{key}.{k}", a.get(k), b.get(k))
        return out
    return [] if a == b else [(key, a, b)]


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` so that a reader, or a crash, finds the old file or the new one whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")
