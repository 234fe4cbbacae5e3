"""What every mixer offers: proportions of the sources, changed while the run goes on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from trainwright.core.errors import ConfigError, nearest
from trainwright.core.registry import MethodConfig
from trainwright.data.mixture import Segment


@dataclass(frozen=True)
class MixStats:
    """What a mixer may look at. Sources of which no row was drawn are missing."""

    step: int  # optimizer steps done
    losses: Mapping[str, float] = field(default_factory=dict)  # nats a token, mean since the last update
    # Mean over a source's tokens of max(loss - loss of the reference model, 0), where there is such a model.
    excess: Mapping[str, float] = field(default_factory=dict)


class Mixer(Protocol):
    """Usable alone: call :meth:`mix` with the losses by source, and draw by what it returns."""

    plan: Sequence[Segment] | None  # rows known ahead, which the loader follows exactly; None: ask mix()

    @property
    def names(self) -> Sequence[str]: ...

    def mix(self, stats: MixStats) -> dict[str, float]:
        """Proportion of each source from now on: >= 0, summing to 1."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class MixContext:
    """The run that a mixer is built for."""

    proportions: dict[str, float]  # by the sources' weights
    total_rows: int = 0  # of the run; 0: not known, a run by the clock
    step_rows: int = 1
    epoch_rows: Mapping[str, int] = field(default_factory=dict)  # rows of one pass over each source
    # What decides how much of each step is remembered, for mixers that ask for it:
    lr: np.ndarray | None = None  # [steps]
    optimizer: str = ""
    weight_decay: float = 0.0
    tokens_per_parameter: float = 0.0
    batch_tokens: int = 0  # of a step, over all ranks


class MixerConfig(MethodConfig):
    """Base of mixer configs."""

    changes: ClassVar[bool] = True  # proportions are not those of the sources' weights throughout
    by_size: ClassVar[bool] = False  # sources without weights count by their rows; else each as much as any other

    @abstractmethod
    def build(self, context: MixContext) -> Mixer:
        """Raises ConfigError for a run that it cannot mix."""


class UpdatingMixerConfig(MixerConfig):
    """Base of mixers that look at the losses of the run."""

    warmup_step: NonNegativeInt = Field(0, description="Steps before the first that counts towards an update.")
    update_step: PositiveInt = Field(1, description="Steps between updates, the first so many after warmup_step.")


def check_names(names: Sequence[str]) -> list[str]:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"names should be one or more different ones, got {list(names)}")
    return list(names)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each source's name as people write it: of ``text:/corpus/web`` only ``web``, where no other ends so."""
    last = {name: name.rsplit("/", 1)[-1] or name for name in names}
    ends = list(last.values())
    return {name: end if ends.count(end) == 1 else name for name, end in last.items()}


def find_name(given: str, names: Sequence[str], key: str) -> str:
    """The source that ``given`` means: its name, the last part of it, or that without a file's ending. Raises
    ConfigError where there is none."""
    short = short_names(names)
    for test in (lambda n: n == given, lambda n: short[n] == given, lambda n: short[n].split(".", 1)[0] == given):
        found = [n for n in names if test(n)]
        if len(found) == 1:
            return found[0]
    raise ConfigError(f"no such source; {nearest(given, short.values())}", key=key, value=given)


def by_name(names: Sequence[str], given: Mapping[str, float], key: str, missing: float | None = None) -> np.ndarray:
    """``given`` in the order of ``names``; sources that it does not name get ``missing``.

    Raises ConfigError for a name that is not there and, without ``missing``, for a source that is not named.
    """
    found = {find_name(name, names, key): float(value) for name, value in given.items()}
    if missing is None and len(found) < len(names):
        left = next(short for name, short in short_names(names).items() if name not in found)
        raise ConfigError(f"names no value for the source {left}; give one for each", key=key)
    return np.array([found.get(n, missing) for n in names], float)


def normalised(proportions: Mapping[str, float]) -> dict[str, float]:
    total = sum(proportions.values())
    if not proportions or not np.isfinite(total) or total <= 0 or min(proportions.values()) < 0:
        raise ValueError(f"proportions should be finite, at least 0, and not all 0, got {dict(proportions)}")
    return {name: value / total for name, value in proportions.items()}
