"""Arms: what is compared. An arm is a name and the settings in which it differs from the recipe."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.config.run_config import RunConfig, apply_override, parse_yaml, read_recipe
from trainwright.core.errors import ConfigError, nearest

Grid = Mapping[str, Sequence[Any]]  # dotted key -> values; several keys: every combination


@dataclass
class Arm:
    """One thing to compare.

    set   dotted keys of the recipe and their values. A value ``{"of": ARM, "times": 1.25}`` is 1.25 times what ARM
          has there after its tuning (``"key"`` names another key of ARM; without ``times`` the value itself).
    tune  grids of its own; None: those of the comparison, {}: none. All tuned arms need the same number of points.
    role  method, base or control; for claims.
    share of the budget that it trains for, with a schedule of that length; the tuning's shares are of this one.
    """

    name: str
    set: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, Sequence[Any]] | None = None
    role: str = ""
    share: float = 1.0

    @property
    def fixed(self) -> dict[str, Any]:
        """The settings that do not hang on another arm."""
        return {k: v for k, v in self.set.items() if not is_reference(v)}

    def references(self) -> dict[str, Reference]:
        return {k: Reference.parse(k, v, self.name) for k, v in self.set.items() if is_reference(v)}


@dataclass(frozen=True)
class Reference:
    """The value of another arm, after its tuning."""

    of: str
    key: str
    times: float = 1.0

    @classmethod
    def parse(cls, key: str, value: dict[str, Any], arm: str) -> Reference:
        times = value.get("times", 1.0)
        if set(value) - {"of", "times", "key"} or not isinstance(times, int | float) or times <= 0:
            raise ConfigError(f"arm {arm!r}: should be {{of: ARM, times: 1.25}}", key=key, value=value)
        return cls(str(value["of"]), str(value.get("key", key)), float(times))


def is_reference(value: Any) -> bool:
    return isinstance(value, dict) and "of" in value and "name" not in value


def split_list(text: str) -> list[str]:
    """Split at commas, but not inside brackets or quotes: ``adamw,{name: mgup, inner: adamw}`` has two parts."""
    parts, depth, quote, start = [], 0, "", 0
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p.strip() for p in [*parts, text[start:]]]


def parse_vary(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """``optimizer=adamw,muon`` -> key and ``(as written, value)`` pairs. Raises ConfigError."""
    key, sep, values = text.partition("=")
    parts = split_list(values)
    if not sep or not key.strip() or not all(parts):
        raise ConfigError("should look like optimizer=adamw,muon", key="--vary", value=text)
    return key.strip(), [(p, parse_yaml(p, f"--vary {key}")) for p in parts]


def parse_arm(text: str) -> Arm:
    """``NAME:KEY=VALUE,KEY=VALUE`` -> Arm. Raises ConfigError."""
    name, sep, rest = text.partition(":")
    pairs = [p.partition("=") for p in split_list(rest)] if rest.strip() else []
    if not sep or not name.strip() or "=" in name or any(not s or not k.strip() for k, s, _ in pairs):
        raise ConfigError("should look like NAME:optimizer=muon,optimizer.lr=0.02", key="--arm", value=text)
    return Arm(name.strip(), {k.strip(): parse_yaml(v, f"--arm {name}, {k}") for k, _, v in pairs})


def vary(choices: Mapping[str, Sequence[Any]]) -> list[Arm]:
    """The cartesian product of ``{"optimizer": ["adamw", "muon"], ...}`` as arms named ``optimizer=adamw``.

    A value may be a pair ``(text for the name, value)``.
    """
    options = []
    for key, values in choices.items():
        if not values:
            raise ConfigError("has no values", key=f"vary {key}")
        options.append([(key, *(v if isinstance(v, tuple) else (_written(v), v))) for v in values])
    arms = []
    for combination in itertools.product(*options):
        name = " ".join(f"{key}={text}" for key, text, _ in combination)
        arms.append(Arm(name, {key: value for key, _, value in combination}))
    return arms if choices else []


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def override(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key as the command line does; JSON is YAML."""
    apply_override(data, f"{key}={json.dumps(value)}")


def resolve(base: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``settings``, in order; ``base`` is left as it is."""
    data = read_recipe(base)
    for key, value in settings.items():
        override(data, key, value)
    return data


def validated(arm: str, data: dict[str, Any]) -> RunConfig:
    """The recipe of an arm. Raises ConfigError that names the arm."""
    try:
        return RunConfig.from_dict(read_recipe(data))
    except ConfigError as error:
        raise ConfigError(f"arm {arm!r}: {error}") from None


def value_at(data: Any, key: str, arm: str) -> Any:
    """What a resolved recipe has at a dotted key. Raises ConfigError when it has no such key."""
    for part in key.split("."):
        if isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            raise ConfigError(f"arm {arm!r} has no such setting to refer to", key=key)
    return data


def check_arms(arms: Sequence[Arm]) -> None:
    """Names are unique, references go to other arms and not in a circle. Raises ConfigError."""
    names = [a.name for a in arms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two arms are named {name!r}; give each a name of its own")
    for arm in arms:
        if not 0 < arm.share <= 1:
            raise ConfigError(f"arm {arm.name!r}: should be above 0 and at most 1", key="share", value=arm.share)
    targets = {a.name: {r.of for r in a.references().values()} for a in arms}
    for name, of in targets.items():
        for other in of:
            if other not in targets:
                raise ConfigError(f"arm {name!r} refers to {other!r}, which is no arm; {nearest(other, names)}")
    done: set[str] = set()
    while len(done) < len(arms):
        ready = {n for n, of in targets.items() if n not in done and of <= done}
        if not ready:
            raise ConfigError(f"the arms {', '.join(sorted(set(names) - done))} refer to each other in a circle")
        done |= ready
