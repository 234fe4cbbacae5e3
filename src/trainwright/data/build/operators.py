"""Operator pipelines over one shared table: typed, and checked before anything runs.

A table has a fixed set of rows; an operator reads some columns and writes new ones, so a column is written once and
never changed. A filter writes a column of true and false. Which operator waits for which follows from the columns: a
pipeline is a graph without cycles whose edges have types, and is checked as such before anything runs.

What runs them, once each, is operator_runs.py; planner.py makes pipelines from goals.
After the preparation half of DataFlow (OpenDCAI/DataFlow); here columns are not overwritten.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.core.errors import ConfigError, nearest

Row = dict[str, Any]
Cost = Literal["free", "cpu", "model", "llm"]
COSTS: tuple[Cost, ...] = ("free", "cpu", "model", "llm")  # cheapest first
TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "float": (float, int), "bool": bool, "list": list, "dict": dict, "json": object,
}  # fmt: skip


@dataclass(frozen=True)
class Operator:
    """What an operator is, apart from a pipeline.

    function  ``function(row, **settings) -> {column: value}`` for the columns that it reads and writes; with ``whole``
              ``function(rows, **settings)``, a generator that gives one such mapping for each row, in order
    version   to be raised by its author whenever its results change
    cost      what a row costs: nothing, a processor's time, a forward pass, a large model's answer
    whole     it remembers rows, so that after an interruption it begins at the first
    """

    name: str
    version: str
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    function: Callable[..., Any]
    cost: Cost = "cpu"
    whole: bool = False
    summary: str = ""

    def __post_init__(self) -> None:
        for column, kind in {**self.reads, **self.writes}.items():
            if kind not in TYPES:
                raise ConfigError(f"{column} is of no known type; {nearest(kind, TYPES)}", key=self.name, value=kind)
        if not self.writes or self.cost not in COSTS or not self.version:
            raise ConfigError(f"needs a version, a column to write and a cost of {', '.join(COSTS)}", key=self.name)

    def settings(self) -> list[str]:
        return list(inspect.signature(self.function).parameters)[1:]


Catalogue = Mapping[str, Operator]


@dataclass(frozen=True)
class Step:
    """One operator in a pipeline. ``inputs`` and ``outputs`` map its columns to those of the table, where they differ;
    ``where`` names a column of true and false: rows with false are passed over and get no value."""

    operator: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None

    def reads(self, operator: Operator) -> dict[str, tuple[str, str]]:
        """The operator's column -> (the table's column, its type)."""
        return {column: (self.inputs.get(column, column), kind) for column, kind in operator.reads.items()}

    def writes(self, operator: Operator) -> dict[str, tuple[str, str]]:
        return {column: (self.outputs.get(column, column), kind) for column, kind in operator.writes.items()}


@dataclass(frozen=True)
class Pipeline:
    """Steps in any order, and the columns of true and false that a row must all have true to come out (``keep``)."""

    steps: Sequence[Step]
    keep: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        steps = [
            {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(step).items() if v} for step in self.steps
        ]
        return {"steps": steps, "keep": list(self.keep)}

    @classmethod
    def from_json(cls, value: Any) -> Pipeline:
        """Raises ConfigError for anything that is not such a mapping."""
        if not isinstance(value, Mapping) or not isinstance(value.get("steps"), list):
            raise ConfigError("a pipeline is a mapping with a list of steps", key="steps")
        steps = []
        for i, step in enumerate(value["steps"]):
            step = {"operator": step} if isinstance(step, str) else step
            if not isinstance(step, Mapping) or not isinstance(step.get("operator"), str):
                raise ConfigError("should be an operator's name, or a mapping with one", key=f"steps.{i}", value=step)
            known = ("operator", "settings", "inputs", "outputs", "where")
            for key, item in step.items():
                if key not in known:
                    raise ConfigError(f"unknown key; {nearest(str(key), known)}", key=f"steps.{i}.{key}")
                if key in known[1:4] and not isinstance(item, Mapping):
                    raise ConfigError("should be a mapping", key=f"steps.{i}.{key}", value=item)
            steps.append(Step(**step))
        keep = value.get("keep", [])
        return cls(steps, [keep] if isinstance(keep, str) else list(keep))


# Checking


def problems(pipeline: Pipeline, columns: Mapping[str, str], catalogue: Catalogue) -> list[str]:
    """Everything that is wrong with a pipeline over a table of ``columns`` (name -> type), each in one sentence."""
    found: list[str] = []
    kinds: dict[str, str] = dict(columns)
    written: dict[str, int] = {}
    for i, step in enumerate(pipeline.steps):
        operator = catalogue.get(step.operator)
        if operator is None:
            found.append(f"step {i}: there is no operator {step.operator!r}; {nearest(step.operator, catalogue)}")
            continue
        where = f"step {i} ({step.operator})"
        for key in step.settings:
            if key not in operator.settings():
                found.append(f"{where}: unknown setting {key!r}; {nearest(key, operator.settings())}")
        for given, there in ((step.inputs, operator.reads), (step.outputs, operator.writes)):
            found += [f"{where}: it has no column {c!r}; {nearest(c, there)}" for c in given if c not in there]
        for column, kind in step.writes(operator).values():
            if column in columns:
                found.append(f"{where}: {column} is the table's; give the result another name by outputs")
            elif column in written:
                found.append(f"{where}: {column} is written by step {written[column]} already; rename one by outputs")
            else:
                written[column], kinds[column] = i, kind
    for i, step in enumerate(pipeline.steps):
        operator = catalogue.get(step.operator)
        if operator is None:
            continue
        wanted = [*step.reads(operator).values(), *([(step.where, "bool")] if step.where else [])]
        for column, kind in wanted:
            if column not in kinds:
                found.append(f"step {i} ({step.operator}): column {column!r} is missing; {nearest(column, kinds)}")
            elif not _fits(kinds[column], kind):
                found.append(f"step {i} ({step.operator}): {column} is {kinds[column]}, and {kind} is needed")
    for column in pipeline.keep:
        if kinds.get(column) != "bool":
            found.append(f"keep: {column} is {kinds.get(column, 'no column')}, and one of true and false is needed")
    if not found:
        try:
            order(pipeline, catalogue)
        except ConfigError as error:
            found.append(str(error))
    return found


def _fits(given: str, wanted: str) -> bool:
    return given == wanted or wanted == "json" or (given, wanted) == ("int", "float")


def check(pipeline: Pipeline, columns: Mapping[str, str], catalogue: Catalogue) -> None:
    """ConfigError with all that is wrong."""
    found = problems(pipeline, columns, catalogue)
    if found:
        raise ConfigError("; ".join(found), key="pipeline")


def order(pipeline: Pipeline, catalogue: Catalogue) -> list[int]:
    """Steps so that each comes behind those whose columns it reads; else as they stand. ConfigError for a cycle."""
    operators = [catalogue[s.operator] for s in pipeline.steps]
    writer = {c: i for i, s in enumerate(pipeline.steps) for c, _ in s.writes(operators[i]).values()}
    waits = []
    for i, step in enumerate(pipeline.steps):
        read = [c for c, _ in step.reads(operators[i]).values()] + ([step.where] if step.where else [])
        waits.append({writer[c] for c in read if c in writer})
    done: list[int] = []
    while len(done) < len(waits):
        ready = next((i for i in range(len(waits)) if i not in done and waits[i] <= set(done)), None)
        if ready is None:
            left = [f"{i} ({pipeline.steps[i].operator})" for i in range(len(waits)) if i not in done]
            raise ConfigError(f"steps {', '.join(left)} wait for each other's columns; break the cycle", key="pipeline")
        done.append(ready)
    return done


def type_of(value: Any) -> str:
    """The narrowest type's name; ``json`` for what fits no other."""
    if isinstance(value, bool):
        return "bool"
    return next((k for k in ("str", "int", "float", "list", "dict") if isinstance(value, TYPES[k])), "json")


def fits_type(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and not (isinstance(value, bool) and kind in ("int", "float"))


# Hashes


def step_hash(step: Step, operator: Operator, inputs: Mapping[str, str] | None = None) -> str:
    """Hash of what a step does; with ``inputs`` (column -> hash) of its results too."""
    read = [c for c, _ in step.reads(operator).values()] + ([step.where] if step.where else [])
    what = {
        "operator": operator.name, "version": operator.version, "reads": step.reads(operator),
        "writes": step.writes(operator), "settings": dict(step.settings), "where": step.where,
        "inputs": None if inputs is None else {c: inputs[c] for c in read},
    }  # fmt: skip
    return hashlib.blake2b(json.dumps(what, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()
