"""Trackio (extra ``trackio``): a local dashboard, or one on a Hugging Face Space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from trainwright.core.registry import register
from trainwright.train.loggers.base import Logger, LoggerConfig, group, need, numbers


class TrackioLogger:
    """Feeds a started ``trackio`` run."""

    def __init__(self, run: Any):
        self._run = run

    def log(self, row: dict[str, Any]) -> None:
        self._run.log({group(key): value for key, value in numbers(row)}, step=row.get("step"))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


@register("logger", "trackio")
class TrackioConfig(LoggerConfig):
    """Trackio, a local dashboard (`trackio show`); needs the extra `trackio`."""

    project: str = Field("trainwright", description="Project that the run belongs to.", min_length=1)
    space_id: str | None = Field(
        None, description="Hugging Face Space (user/name) that shows the run; null: local only."
    )

    def build(self, config: Any, folder: Path) -> Logger:
        need("trackio", "trackio")
        import trackio

        run = trackio.init(
            project=self.project,
            name=config.run.name,
            space_id=self.space_id,
            config=config.to_dict(),
            resume="allow",
            embed=False,
        )
        return TrackioLogger(run)
