"""What every logger offers: it is fed the rows of metrics.jsonl, on rank 0."""

from __future__ import annotations

import importlib.util
import logging
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from trainwright.core.errors import ConfigError
from trainwright.core.registry import MethodConfig

log = logging.getLogger("trainwright")


class Logger(Protocol):
    def log(self, row: dict[str, Any]) -> None:
        """Take one row: ``step`` and figures. Must return at once."""

    def close(self) -> None:
        """Write out what is left. May be called twice."""


class LoggerConfig(MethodConfig):
    """Base of logger configs."""

    @abstractmethod
    def build(self, config: Any, folder: Path) -> Logger:
        """A logger for the run of ``config`` (a RunConfig) whose folder is ``folder``.

        Raises ConfigError when its package is not installed or the service refuses.
        """


def numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of a row: what is a number and not its place (``step``)."""
    for key, value in row.items():
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def group(key: str) -> str:
    """The heading that a figure is shown under."""
    if key.startswith("val_"):
        return f"validation/{key}"
    if key.startswith("time_") or key in ("tokens_per_s", "flops_utilization", "seconds"):
        return f"speed/{key}"
    if key.endswith("_bytes"):
        return f"memory/{key}"
    return f"train/{key}"


def need(package: str, extra: str) -> None:
    """Raises ConfigError naming the extra that brings ``package``."""
    if importlib.util.find_spec(package) is None:
        hint = f"pip install 'trainwright[{extra}]'" if extra else f"pip install {package}"
        raise ConfigError(
            f"needs the package {package}, which is not installed; `{hint}`", key="log.loggers", value=extra or package
        )
