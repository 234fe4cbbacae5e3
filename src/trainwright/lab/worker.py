"""One trial in a process of its own: ``python -m trainwright.lab.worker FOLDER/spec.json``.

Trains through the Trainer's public interface and leaves ``result.json`` beside the spec, written whole at the end.
Killed at any moment and started again it goes on from its newest checkpoint. With ``--with-parent`` it ends when its
standard input closes, so it does not outlive a comparison that was killed.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.lab.identity import code_digest
from trainwright.lab.trial import BATCHES, EVALUATIONS, TrialResult, read_result

PACE_STEPS = 5  # steps before the pace of a run by the clock is believed
STUCK = 2  # steps without effect at the end of a run; one alone may be a bad batch


def main(arguments: list[str]) -> int:
    code_digest()  # of what is imported from here on, not of what somebody writes meanwhile
    path = Path(arguments[0])
    if "--with-parent" in arguments:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    with locked(path.parent):
        done = read_result(path.parent)
        if done is not None and done.finished:  # another comparison was quicker
            return 0
        return work(path.parent)


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time works on a trial; another waits."""
    with (folder / "lock").open("a") as file:
        try:
            import fcntl
        except ImportError:  # not a POSIX system: no lock there
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def work(folder: Path) -> int:
    import json

    from trainwright.core.errors import Interrupted
    from trainwright.train.run_dir import write_json

    started = time.perf_counter()
    spec = json.loads((folder / "spec.json").read_text("utf-8"))
    try:
        result = run(spec, folder)
    except (Interrupted, KeyboardInterrupt):
        return 130
    except Exception as error:
        import traceback

        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
        kind = "" if getattr(error, "exit_code", None) else f"{type(error).__name__}: "
        result = TrialResult(status="failed", error=kind + lines[0])
    result.jobs = int(spec.get("jobs", 1))
    result.wall_seconds = time.perf_counter() - started
    write_json(folder / "result.json", plain(result.to_dict()))
    if not spec.get("keep"):
        shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    return 0


def plain(value: Any) -> Any:
    """Strict JSON: what is not finite becomes null."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(spec: dict[str, Any], folder: Path) -> TrialResult:
    """Train, or go on training, the trial in ``folder``."""
    from trainwright.core.errors import StoppedByMonitor
    from trainwright.core.hardware import memory_bytes
    from trainwright.lab.injection import inject
    from trainwright.lab.probes import measure
    from trainwright.train.metrics import effective, read_metrics

    trainer = open_trainer(spec["recipe"], folder)
    digests = same_start(trainer, folder)
    inject(trainer, spec.get("inject"))
    stopped = ""
    try:
        trainer.fit(pace(trainer))
    except StoppedByMonitor as error:
        stopped = str(error).splitlines()[0]
    peak = memory_bytes(trainer.device)  # before the probes
    result = summarise(folder / "run" / "metrics.jsonl")
    result.peak_memory_bytes, result.params = peak, trainer.model.num_params()
    result.weights_digest, result.data_digest = digests
    result.environment = describe(trainer)
    judge(result, stopped, dead_steps(effective(read_metrics(folder / "run" / "metrics.jsonl", strict=False))))
    if result.status == "ok":
        result.probes = measure(trainer, spec.get("probes") or [])
    return result


def open_trainer(recipe: dict[str, Any], folder: Path) -> Any:
    from trainwright.config import RunConfig
    from trainwright.core.errors import CheckpointError
    from trainwright.train import Trainer
    from trainwright.train.checkpoint import Checkpointer

    place = {"dir": str(folder), "name": "run"}
    config = RunConfig.from_dict({**recipe, "run": {**recipe["run"], **place}})
    if (config.run_dir / "config.yaml").is_file() and config.checkpoint_dir.is_dir():
        try:
            if Checkpointer(config.checkpoint_dir, best_metric=None).latest() is not None:
                return Trainer(config, resume=True)
        except CheckpointError:
            pass  # nothing whole to go on from
    shutil.rmtree(config.run_dir, ignore_errors=True)
    return Trainer(config)


def same_start(trainer: Any, folder: Path) -> tuple[str, str]:
    """Digests of the initial weights and of the first batches; of the first start where a run goes on."""
    import json

    from trainwright.train.run_dir import write_json

    path = folder / "start.json"
    if trainer.progress.step > 0:
        try:
            kept = json.loads(path.read_text("utf-8"))
            return str(kept["weights"]), str(kept["data"])
        except (OSError, ValueError, KeyError):
            return "", ""
    found = {"weights": weights_digest(trainer.model), "data": data_digest(trainer)}
    write_json(path, found)
    return found["weights"], found["data"]


def weights_digest(model: Any) -> str:
    import torch
    import xxhash

    digest = xxhash.xxh3_128()
    for name, param in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(param.shape)} {param.dtype}".encode())
        flat = param.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()


def data_digest(trainer: Any) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    loader = trainer.data.train_loader(trainer.rows)  # rows are a function of data and seed, so a second loader is free
    try:
        for _ in range(BATCHES):
            batch = loader.next_batch()
            digest.update(batch.tokens.cpu().contiguous().numpy())
    except StopIteration:
        pass
    finally:
        loader.close()
    return digest.hexdigest()


def pace(trainer: Any) -> Any:
    """``on_step`` of a run by the clock: after some steps it is known how many make a tenth of the run."""
    config = trainer.config
    if config.train.tokens is not None or config.train.seconds is None:
        return None
    seen: list[float] = []

    def on_step(row: dict[str, Any]) -> None:
        seen.append(row["seconds"])
        if len(seen) == PACE_STEPS + 1:
            step = (seen[-1] - seen[0]) / PACE_STEPS
            config.evaluate.every = max(1, round(config.train.seconds / max(step, 1e-9) / EVALUATIONS))

    return on_step


def summarise(metrics: Path) -> TrialResult:
    """The figures in metrics.jsonl; status is left to :func:`judge`."""
    from trainwright.lab.statistics import median
    from trainwright.train.metrics import effective, read_metrics

    rows = effective(read_metrics(metrics, strict=False))
    steps = [r for r in rows if "loss" in r and "event" not in r]
    seconds: dict[int, float] = {0: 0.0} | {r["step"]: r["seconds"] for r in steps}
    curve: dict[int, list[float | None]] = {}
    for r in rows:
        if "val_loss" in r:
            curve[r["step"]] = [r["tokens"], seconds.get(r["step"], 0.0), r["val_loss"]]
    events: dict[str, int] = {}
    for r in rows:
        if "event" in r:
            events[r["event"]] = events.get(r["event"], 0) + 1
    result = TrialResult(status="", curve=[curve[s] for s in sorted(curve)], events=events)
    result.initial_val_loss = curve.get(0, [None, None, None])[2]
    if curve and steps and max(curve) == steps[-1]["step"]:
        result.val_loss = curve[max(curve)][2]
    if steps:
        last = steps[-1]
        result.steps, result.tokens, result.seconds = last["step"], last["tokens"], last["seconds"]
        tail = [r["loss"] for r in steps[-max(1, len(steps) // 10) :]]
        result.train_loss = math.fsum(tail) / len(tail)
        timed = steps[min(5, len(steps) // 2) :]  # the first steps warm caches
        result.tokens_per_s = median([r["tokens_per_s"] for r in timed])
        sizes = [r["optimizer_state_bytes"] for r in steps if "optimizer_state_bytes" in r]
        result.optimizer_state_bytes = sizes[-1] if sizes else None
    return result


def dead_steps(rows: list[dict[str, Any]]) -> int:
    """Steps up to the last one that moved nothing: skipped by a monitor, or with a gradient of exactly zero or none."""
    skipped = {r["step"] for r in rows if r.get("event") == "skip"}
    count = 0
    for r in reversed([r for r in rows if "loss" in r and "event" not in r]):
        norm = r.get("grad_norm")
        if r["step"] not in skipped and (norm is None or (math.isfinite(norm) and norm > 0)):
            break
        count += 1
    return count


def judge(result: TrialResult, stopped: str, dead: int = 0) -> None:
    """ok, diverged (stopped, not finite, stuck, or no better than before training), or failed (no validation loss).

    Stuck are weights that blew up so far that no gradient moves them any more, in the last ``dead`` steps. Their loss
    may well be finite and below the initial one: where all logits came to 0 it is that of even odds for all tokens.
    """
    loss, start = result.val_loss, result.initial_val_loss
    if stopped:
        result.status, result.error = "diverged", stopped
    elif loss is None:
        result.status, result.error = "failed", "no validation loss: the data has no validation documents"
    elif not math.isfinite(loss):
        result.status, result.error = "diverged", f"the final validation loss is {loss}"
    elif dead >= STUCK:
        result.status = "diverged"
        result.error = f"the last {dead} steps had no gradient or were skipped; the loss is stuck at {loss:.4g}"
    elif start is not None and not loss < start:
        result.status = "diverged"
        result.error = f"final validation loss {loss:.4g} is not below the initial {start:.4g}"
    else:
        result.status = "ok"


def describe(trainer: Any) -> dict[str, Any]:
    import platform

    import torch

    from trainwright import __version__
    from trainwright.core.hardware import cores, cpu_name

    device = trainer.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "trainwright": __version__,
        "code": code_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "device_name": name,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "compute_dtype": str(trainer.precision.compute_dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    sys.exit(main(sys.argv[1:]))
