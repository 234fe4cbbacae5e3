"""A trial: one training under a budget, kept in a folder named by a hash of what it is."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from trainwright.config.run_config import RunConfig, read_recipe
from trainwright.lab.budget import Budget
from trainwright.lab.identity import Inputs, inputs_of

EVALUATIONS = 10  # points of the validation curve, besides the start
LEAST_EVALUATION = 16_384  # tokens; fewer make the loss of a small model too noisy
BATCHES = 2  # the first ones, whose digest shows that two trials get the same data in the same order
CLOCK_EVALUATION = 65_536  # under a budget of seconds, whose tokens are not known beforehand


@dataclass(frozen=True)
class Trial:
    """One training: a resolved recipe (with seed and length), what is injected, what is probed at its end.

    ``inputs``: digests of what the recipe reads and of the code that runs it, see :mod:`trainwright.lab.identity`.
    """

    recipe: dict[str, Any]
    inject: dict[str, Any] | None = None
    probes: tuple[Any, ...] = ()
    inputs: Inputs = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Names everything that decides the outcome: the recipe, and behind it what it reads and what runs it."""
        return f"{self.recipe_key}-{_hash(self.inputs, 5)}"

    @cached_property
    def recipe_key(self) -> str:
        """Of the recipe alone; not of where it runs and what it logs."""
        recipe = {k: v for k, v in self.recipe.items() if k not in ("log", "checkpoint")}
        recipe["run"] = {k: v for k, v in recipe["run"].items() if k not in ("name", "dir", "overwrite")}
        recipe["data"] = {k: v for k, v in recipe["data"].items() if k not in ("cache_dir", "prefetch", "num_proc")}
        return _hash({"recipe": recipe, "inject": self.inject, "probes": list(self.probes)}, 10)

    @property
    def seed(self) -> int:
        return int(self.recipe["run"]["seed"])

    def spec(self, keep: bool, jobs: int = 1) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "inject": self.inject,
            "probes": list(self.probes),
            "keep": keep,
            "jobs": jobs,
            "inputs": self.inputs,
        }


def _hash(value: Any, size: int) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def make_trial(
    recipe: dict[str, Any],
    budget: Budget,
    seed: int,
    *,
    device: str,
    flops_per_token: float | None = None,
    inject: dict[str, Any] | None = None,
    probes: Sequence[Any] = (),
    inputs: Callable[[RunConfig], Inputs] = inputs_of,
) -> Trial:
    """The trial of ``recipe`` (a mapping that RunConfig takes) under ``budget``.

    Validates at about ten even points besides start and end. How many tokens each takes is the recipe's
    ``evaluate.tokens`` where it names them; else so many that all of them together cost about a third of the training.
    """
    data = read_recipe(recipe)
    explicit = (data.get("evaluate") or {}).get("tokens")
    config = RunConfig.from_dict(data)
    length = budget.length(flops_per_token)
    train = {k: v for k, v in config.to_dict()["train"].items() if k not in ("steps", "tokens", "epochs", "seconds")}
    steps = math.ceil(length["tokens"] / config.train.global_batch_tokens) if "tokens" in length else None
    most = config.evaluate.tokens
    if explicit is None and most is not None:
        wanted = CLOCK_EVALUATION if steps is None else max(LEAST_EVALUATION, length["tokens"] // 11)
        most = min(most, wanted)
    resolved = config.to_dict()
    resolved |= {
        "train": {**train, **length},
        "run": {
            **resolved["run"], "name": "run", "dir": ".", "overwrite": True, "seed": seed,
            "device": device if config.run.device == "auto" else config.run.device,
        },
        # By the clock the worker sets `every` once it knows the pace.
        "evaluate": {"every": max(1, round(steps / EVALUATIONS)) if steps else 10**9, "tokens": most, "at_start": True},
        "checkpoint": {"every": math.ceil(steps / 3) if steps else None, "minutes": 1.0, "keep": 1, "keep_best": False},
        "log": {"every": 1, "loggers": [], "progress": "none", "report": False},
    }  # fmt: skip
    whole = RunConfig.from_dict(resolved)
    return Trial(whole.to_dict(), inject, tuple(probes), inputs(whole))


@dataclass
class TrialResult:
    """What a trial found. Figures that it did not come to are None."""

    status: str  # ok, diverged, failed
    error: str = ""
    val_loss: float | None = None
    initial_val_loss: float | None = None
    train_loss: float | None = None  # mean of the last tenth of the steps
    curve: list[list[float | None]] = field(default_factory=list)  # [tokens, seconds, validation loss]
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, without evaluation
    wall_seconds: float = 0.0  # of the process
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    optimizer_state_bytes: int | None = None
    params: int | None = None
    weights_digest: str = ""
    data_digest: str = ""
    events: dict[str, int] = field(default_factory=dict)  # verdicts of the monitors: skip, rollback, stop
    probes: dict[str, float | None] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    jobs: int = 1  # trials that could run at the same time

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrialResult:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})

    @property
    def finished(self) -> bool:
        """Never to be run again. A failure may be mended, so the next comparison tries it anew."""
        return self.status in ("ok", "diverged")

    def quantity(self, name: str) -> float | None:
        """A figure or probe by its name; None where there is none."""
        value = self.probes[name] if name in self.probes else getattr(self, name, None)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class TrialStore:
    """Folder of trials; comparisons that share it share their trials."""

    def __init__(self, root: Path | str):
        self.root = Path(root)

    def folder(self, trial: Trial) -> Path:
        return self.root / trial.key

    def result(self, trial: Trial) -> TrialResult | None:
        """What is stored of ``trial``, whole and finished or failed; None where there is nothing."""
        return read_result(self.folder(trial))

    def finished(self, trial: Trial) -> TrialResult | None:
        """A result that need not be made again: none that the source changed under, from trial to worker."""
        found = self.result(trial)
        if found is None or not found.finished:
            return None
        code = trial.inputs.get("code")
        return found if found.environment.get("code", code) == code else None

    def others(self, trial: Trial) -> list[str]:
        """What differs, ``data``, ``code`` or ``torch``, in the likest finished trial of the same recipe; []: none."""
        found: list[list[str]] = []
        for folder in self.root.glob(f"{trial.recipe_key}-*"):
            if folder.name == trial.key or (result := read_result(folder)) is None or not result.finished:
                continue
            try:
                theirs = json.loads((folder / "spec.json").read_text("utf-8"))["inputs"]
                found.append(sorted(what for what, digest in trial.inputs.items() if theirs.get(what) != digest))
            except (OSError, ValueError, KeyError, AttributeError):
                continue
        return min(found, key=len, default=[])


def read_result(folder: Path) -> TrialResult | None:
    try:
        return TrialResult.from_dict(json.loads((folder / "result.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
