"""Weights & Biases (extra ``wandb``). The run's id is kept in its folder, so a resumed run goes on in the same one."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.train.loggers.base import Logger, LoggerConfig, group, need, numbers

ID_FILE = "wandb-id.txt"


class WandbLogger:
    """Feeds a started ``wandb`` run. W&B wants steps that never fall, so figures are plotted over our own ``step``."""

    def __init__(self, run: Any):
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, row: dict[str, Any]) -> None:
        figures = {group(key): value for key, value in numbers(row)}
        if "step" in row:
            figures["step"] = row["step"]
        self._run.log(figures)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


@register("logger", "wandb")
class WandbConfig(LoggerConfig):
    """Weights & Biases; needs the extra `wandb`."""

    project: str = Field("trainwright", description="Project that the run belongs to.", min_length=1)
    entity: str | None = Field(None, description="Team or user; null: the default of the login.")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline keeps the figures in the run's folder for `wandb sync`."
    )
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")

    def build(self, config: Any, folder: Path) -> Logger:
        need("wandb", "wandb")
        import wandb

        folder = Path(folder)
        id_file = folder / ID_FILE
        run_id = id_file.read_text("utf-8").strip() if id_file.is_file() else secrets.token_hex(4)
        try:
            run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=config.run.name,
                id=run_id,
                resume="allow",
                mode=self.mode,
                dir=str(folder),
                config=config.to_dict(),
                tags=self.tags,
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"W&B refused the run: {error}. Log in by `wandb login`, or set mode: offline",
                key="log.loggers",
                value="wandb",
            ) from None
        id_file.write_text(run_id + "\n", "utf-8")
        return WandbLogger(run)
