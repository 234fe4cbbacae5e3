"""The sections of a recipe that are not method slots: run, train, checkpoint, evaluate, log, recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from trainwright.core.registry import MethodConfig, Slot


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class RunSection(Section):
    """Which run this is and where it lives."""

    name: str = Field(
        "quickstart",
        description="Name of the run; its folder is dir/name. Left out: the recipe file's own name, less its suffix.",
        min_length=1,
    )
    dir: Path = Field(Path("runs"), description="Folder that holds the runs.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of weights, data order and every other draw.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    overwrite: bool = Field(False, description="Replace an existing run of this name instead of refusing.")
    deterministic: bool = Field(
        True, description="Ask torch for deterministic kernels where that costs nothing on CPU."
    )

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if "/" in name or "\\" in name or name in (".", ".."):
            raise ValueError("must be a plain folder name; put the place into run.dir")
        return name

    @field_validator("device")
    @classmethod
    def _device(cls, device: str) -> str:
        if device not in ("auto", "cpu", "cuda", "mps") and not (
            device.startswith("cuda:") and device.removeprefix("cuda:").isdigit()
        ):
            raise ValueError("should be auto, cpu, cuda, cuda:N or mps")
        return device


class TrainSection(Section):
    """How long and in what portions to train. Exactly one of steps, tokens, epochs."""

    steps: PositiveInt | None = Field(None, description="Optimizer steps.")
    tokens: PositiveInt | None = Field(None, description="Tokens to see; rounded up to whole steps. Takes 2M, 1.5B.")
    epochs: PositiveFloat | None = Field(None, description="Passes over the training data.")
    seconds: PositiveFloat | None = Field(
        None, description="Stop after this much training time even if steps are left; the schedule follows the clock."
    )
    seq_len: PositiveInt = Field(512, description="Tokens per row.")
    global_batch_tokens: PositiveInt = Field(8192, description="Tokens per optimizer step over all ranks.")
    micro_batch_size: PositiveInt | None = Field(
        None, description="Rows per forward pass on one rank; null: as many as make about 8k tokens."
    )
    compile: bool = Field(False, description="torch.compile each block.")

    @field_validator("steps", "tokens", "global_batch_tokens", mode="before")
    @classmethod
    def _suffix(cls, value: Any) -> Any:
        return parse_count(value)

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, data: Any) -> Any:
        if isinstance(data, dict):
            given = [k for k in ("steps", "tokens", "epochs") if data.get(k) is not None]
            if len(given) > 1:
                raise ValueError(
                    f"{' and '.join(given)} are given; the length of a run is one of steps, tokens, epochs"
                )
            if not given and data.get("seconds") is None:
                data = {**data, "steps": 500}
        return data

    @model_validator(mode="after")
    def _whole_rows(self) -> TrainSection:
        if self.global_batch_tokens % self.seq_len:
            low = max(self.global_batch_tokens // self.seq_len, 1) * self.seq_len
            raise ValueError(
                f"global_batch_tokens={self.global_batch_tokens} is not a multiple of seq_len={self.seq_len}; "
                f"use {low} or {low + self.seq_len}"
            )
        return self

    @property
    def known_steps(self) -> int | None:
        """The number of optimizer steps; None where the data or the clock decides on it."""
        return self.steps if self.tokens is None else -(-self.tokens // self.global_batch_tokens)

    @property
    def global_batch_rows(self) -> int:
        return self.global_batch_tokens // self.seq_len


class CheckpointSection(Section):
    """When to save and what to keep."""

    model_config = ConfigDict(extra="forbid", validate_default=True, populate_by_name=True)
    every: PositiveInt | None = Field(None, description="Steps between checkpoints; null: only at the end.")
    minutes: PositiveFloat | None = Field(None, description="Also save when this much time has passed since the last.")
    keep: PositiveInt = Field(3, description="Newest checkpoints to keep, besides the best by validation loss.")
    asynchronous: bool = Field(True, alias="async", description="Write in the background while training goes on.")
    dir: Path | None = Field(None, description="Folder for the checkpoints; null: checkpoints/ in the run's folder.")
    keep_best: bool = Field(True, description="Keep the checkpoint with the lowest validation loss too.")


class EvaluateSection(Section):
    """When and how much to validate."""

    every: PositiveInt | None = Field(None, description="Steps between validations; null: only at the end.")
    tokens: PositiveInt | None = Field(262_144, description="Validation tokens to use; null: the whole split.")
    at_start: bool = Field(False, description="Validate before the first step too.")

    @field_validator("tokens", mode="before")
    @classmethod
    def _suffix(cls, value: Any) -> Any:
        return parse_count(value)


class LogSection(Section):
    """Where figures go besides metrics.jsonl, which is always written."""

    every: PositiveInt = Field(1, description="Steps between lines in metrics.jsonl.")
    loggers: Annotated[list[MethodConfig], Slot("logger", many=True)] = Field(
        default_factory=lambda: cast(list[MethodConfig], [{"name": "tensorboard"}]),
        description="Loggers fed with the same figures.",
    )
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="Progress display; auto: bar on a terminal."
    )
    report: bool = Field(True, description="Write report.html when the run ends.")
    sample: str | None = Field(None, description="Prompt to continue when the run ends; written to sample.txt.")
    comm_trace: PositiveInt | None = Field(
        None,
        description="Steps, from the second on, whose collectives each rank records (comm/rank-N.json, for Perfetto; "
        "comm_bytes and comm_wait in the metrics); null: none.",
    )


class RecoverySection(Section):
    """What the policy does with the monitors' verdicts."""

    max_rollbacks: int = Field(3, ge=0, description="Rollbacks before the run is stopped.")
    lr_factor: float = Field(0.5, gt=0, le=1, description="The learning rate is multiplied by this at each rollback.")
    skip_steps: int = Field(
        1, ge=0, description="Steps of data to pass over beyond the one that failed, after a rollback."
    )


_SUFFIX = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def parse_count(value: Any) -> Any:
    """``"2M"`` -> 2000000; other values are passed on for pydantic to judge."""
    if isinstance(value, str) and value and value[-1].lower() in _SUFFIX:
        try:
            number = float(value[:-1]) * _SUFFIX[value[-1].lower()]
        except ValueError:
            return value
        if number == int(number):
            return int(number)
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number == int(number) else value
    elif isinstance(value, float) and value == int(value):
        return int(value)
    return value
