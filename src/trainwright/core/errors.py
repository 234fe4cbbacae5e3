"""The errors a user can act on. Each carries the exit code that the command line gives back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrainwrightError(Exception):
    """Base of our errors: one clear message, shown without a traceback."""

    exit_code = 1


class InputError(TrainwrightError):
    """What the user gave is wrong. The message names the thing, its value and the way out."""

    exit_code = 2


class ConfigError(InputError):
    """A recipe or an override is wrong.

    ``ConfigError("is larger than the smallest matrix side (256); set rank <= 256", key="optimizer.rank", value=512)``
    prints as ``optimizer.rank=512: is larger than ...``.
    """

    def __init__(self, message: str, *, key: str = "", value: object = None):
        self.message, self.key, self.value = message, key, value
        super().__init__(self._render())

    def _render(self) -> str:
        if not self.key:
            return self.message
        return f"{self.key}: {self.message}" if self.value is None else f"{self.key}={self.value!r}: {self.message}"

    def under(self, prefix: str) -> ConfigError:
        """The same error, seen from one level further out: ``lr`` becomes ``optimizer.lr``."""
        return type(self)(self.message, key=f"{prefix}.{self.key}" if self.key else prefix, value=self.value)


class DataError(InputError):
    """A data source is missing, empty, malformed or changed while it was read."""


class ModelError(InputError):
    """A model folder or a set of weights cannot be used as asked."""


class CheckpointError(InputError):
    """A checkpoint is damaged, incompatible or cannot be written."""


class StoppedByMonitor(TrainwrightError):
    """A monitor's verdict ended the run."""

    exit_code = 3


class Interrupted(TrainwrightError):
    """SIGINT or SIGTERM; the run saved a checkpoint and ended."""

    exit_code = 130


def nearest(name: str, valid: Iterable[str]) -> str:
    """A ``did you mean`` clause for ``name`` among ``valid``; falls back to listing what is valid."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=5, cutoff=0.5)
    if close:
        # Of equally close ones that which begins alike: adamv is adamw, not adapm.
        def likeness(other: str) -> tuple[float, int]:
            ratio = difflib.SequenceMatcher(None, other, name).ratio()
            return ratio, next((i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), len(name))

        return f"did you mean {max(close, key=likeness)!r}?"
    return "valid names: " + ", ".join(valid)
