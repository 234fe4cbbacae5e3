"""Where a run's figures go: metrics.jsonl, the loggers of the recipe and the display. On rank 0 only."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainwright.core.distributed import is_main
from trainwright.train import run_dir as run_folder

if TYPE_CHECKING:
    from trainwright.train.trainer import Trainer

log = logging.getLogger("trainwright")


class Outlet:
    """Writes the run's folder and takes its rows. Every method does nothing on the other ranks, or of a run that had
    ended before."""

    def __init__(self, run: Trainer):
        from trainwright.train.environment import environment
        from trainwright.train.metrics import MetricsWriter
        from trainwright.train.progress import make_progress

        self.metrics: Any = None
        self.loggers: list[Any] = []
        self.display: Any = None
        if not is_main() or run.finished:
            return
        config = run.config
        folder = config.run_dir
        run_folder.write_json(folder / "environment.json", environment())
        trained = {n: {"documents": d.num_docs, "tokens": d.num_tokens} for n, d in run.data.train.items()}
        run_folder.write_json(folder / "data_card.json", {**run.data_card, "trained_on": trained})
        run.tokenizer.save(folder / "tokenizer")
        self.metrics = MetricsWriter(folder / "metrics.jsonl")
        self.loggers = [spec.build(config, folder) for spec in config.log.loggers]  # type: ignore[attr-defined]
        steps = None if run.by_clock else run.total_steps
        self.display = make_progress(config.log.progress, steps, config.train.seconds)

    def __bool__(self) -> bool:
        return self.metrics is not None

    def start(self, run: Trainer) -> None:
        if self.display is not None:
            from trainwright.train.banner import banner

            self.display.say(banner(run))
            self.display.start(run.progress.step)

    def truncate(self, step: int) -> None:
        """Forget rows behind ``step``: a resumed run makes them again."""
        if self.metrics is not None:
            self.metrics.truncate(step)

    def log(self, row: dict[str, Any]) -> None:
        """A row for the file and the loggers."""
        if self.metrics is not None:
            self.metrics.write(row)
            for logger in self.loggers:
                logger.log(row)

    def step(self, row: dict[str, Any]) -> None:
        """A step was made: the display alone, which comes to every step."""
        if self.display is not None:
            self.display.update(row)

    def validation(self, row: dict[str, Any]) -> None:
        self.log(row)
        if self.display is not None:
            self.display.validation(row)

    def event(self, event: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(event)
            log.warning(", ".join(f"{k}={v}" for k, v in event.items()))

    def close(self) -> None:
        for part in (self.display, self.metrics, *self.loggers):
            if part is not None:
                part.close()
