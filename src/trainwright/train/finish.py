"""How a run ends, and whether one that is to go on has ended already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.core.distributed import broadcast_object, is_main
from trainwright.core.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.train.saving import Progress
    from trainwright.train.trainer import Trainer


def reached(run: Trainer, progress: Progress) -> str:
    """The setting of ``train`` that ends the run at ``progress``; empty while there is more to do."""
    train = run.config.train
    if train.seconds is not None and progress.seconds >= train.seconds:
        return "seconds"
    if run.by_clock or progress.step < run.total_steps:
        return ""
    return next(key for key in ("steps", "tokens", "epochs") if getattr(train, key) is not None)


def ended(run: Trainer) -> dict[str, Any]:
    """For the summary of a run that was trained now: why it ended before its last step, where it did."""
    if reached(run, run.progress) != "seconds" or run.by_clock or run.progress.step >= run.total_steps:
        return {}
    return {"ended": f"train.seconds={run.config.train.seconds:g} is up; {_of_steps(run)}"}


def steps_are_done(run: Trainer) -> bool:
    """Whether the newest checkpoint of the run to go on with is that of its last step. Rank 0 looks."""
    return bool(broadcast_object(is_main() and bool(_stored_end(run))))


def is_finished(run: Trainer) -> bool:
    """Whether besides all that comes behind the last step has been made. Rank 0 looks."""
    return bool(broadcast_object(is_main() and _nothing_is_missing(run)))


def finished_summary(run: Trainer) -> dict[str, Any]:
    """The last figures of a run that had ended before, and how to go on with it."""
    from trainwright.train.metrics import effective, read_metrics

    summary: dict[str, Any] = {}
    for row in effective(read_metrics(run.config.run_dir / "metrics.jsonl", strict=False)):
        summary |= row
    key = reached(run, run.progress)
    raised = f"raise train.{key}" if key else "raise its length"
    return {
        **summary,
        "step": run.progress.step,
        "run_dir": str(run.config.run_dir),
        "finished": f"had ended at {_of_steps(run)}; nothing was trained or written. To train on, {raised}",
    }


def _of_steps(run: Trainer) -> str:
    return f"step {run.progress.step:,}" + ("" if run.by_clock else f" of {run.total_steps:,}")


def _stored_end(run: Trainer) -> str:
    from trainwright.train.checkpoint import folders, inspect
    from trainwright.train.saving import Progress

    entries = [e for e in folders.scan(run.config.checkpoint_dir) if folders.sizes_match(e)]
    try:
        return reached(run, Progress(**inspect(entries[0].path).meta["progress"])) if entries else ""
    except CheckpointError:
        return ""  # what is wrong with it is said when it is opened


def _nothing_is_missing(run: Trainer) -> bool:
    from trainwright.train.metrics import read_metrics

    config, folder = run.config, run.config.run_dir
    wanted = ["report.html"] if config.log.report else []
    if config.log.sample is not None and run.parallel.pipeline is None:
        wanted.append("sample.txt")
    if not all((folder / name).is_file() for name in wanted) or not (folder / "metrics.jsonl").is_file():
        return False
    rows = list(read_metrics(folder / "metrics.jsonl", strict=False))
    last = max((row["step"] for row in rows if "loss" in row), default=0)
    return not run.data.validation_tokens or any("val_loss" in row and row["step"] >= last for row in rows)
