"""From a goal to a pipeline: a planner proposes, the proposal is checked and tried on a few rows, errors go back.

A planner is any callable ``planner(request) -> Pipeline`` (or the mapping that ``Pipeline.from_json`` reads): a large
model behind :func:`llm_planner`, or :func:`rule_planner`, which chains operators backwards from the wanted columns.
What comes out is plain data, and no code of the planner's is ever run: it can only name operators of the catalogue.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trainwright import __version__
from trainwright.core.errors import ConfigError, TrainwrightError
from trainwright.data.build.documents import Document
from trainwright.data.build.operator_runs import apply
from trainwright.data.build.operators import COSTS, Catalogue, Operator, Pipeline, Row, Step, order, problems, type_of
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.stages import STAGES
from trainwright.data.build.statistics import Drop

DRY_ROWS = 32
MAX_TRIES = 5


@dataclass(frozen=True)
class Request:
    """What a planner is asked."""

    goal: str
    columns: Mapping[str, str]  # of the table: name -> type
    wanted: Mapping[str, str]  # columns that have to be there in the end
    catalogue: Catalogue
    errors: Sequence[str] = ()  # of the last proposal
    previous: Pipeline | None = None
    failed: frozenset[str] = field(default_factory=frozenset)  # operators that failed on rows in any proposal so far


Planner = Callable[[Request], Pipeline | Mapping[str, Any]]


@dataclass(frozen=True)
class Plan:
    pipeline: Pipeline
    columns: Mapping[str, str]
    tries: int
    history: list[list[str]]  # errors of the proposals that were refused


def plan(
    goal: str,
    rows: Iterable[Mapping[str, Any]],
    planner: Planner,
    catalogue: Catalogue,
    wanted: Mapping[str, str] | None = None,
    n: int = DRY_ROWS,
    max_tries: int = MAX_TRIES,
) -> Plan:
    """A pipeline that is checked and ran on the first ``n`` rows.

    Raises ConfigError with the last errors when ``max_tries`` proposals were refused.
    """
    if n < 1 or max_tries < 1:
        raise ConfigError(f"a plan needs at least one row and one try, not n={n} and max_tries={max_tries}")
    sample = [dict(row) for row in itertools.islice(rows, n)]
    if not sample:
        raise ConfigError("the table has no row to try a pipeline on", key="rows")
    columns = _types(sample)
    request = Request(goal, columns, dict(wanted or {}), catalogue)
    history: list[list[str]] = []
    for number in range(1, max_tries + 1):
        failed: set[str] = set()
        pipeline: Pipeline | None = None
        try:
            answer = planner(request)
            pipeline = answer if isinstance(answer, Pipeline) else Pipeline.from_json(answer)
            errors = problems(pipeline, columns, catalogue) + _missing(pipeline, request)
            if not errors:
                errors, failed = dry_run(pipeline, sample, catalogue)
        except ConfigError as error:
            errors = [str(error)]
        if pipeline is not None and not errors:
            return Plan(pipeline, columns, number, history)
        history.append(errors)
        request = Request(goal, columns, request.wanted, catalogue, errors, pipeline, request.failed | failed)
    raise ConfigError(
        f"no pipeline for {goal!r} in {max_tries} tries; the last one: {'; '.join(history[-1])}", key="goal"
    )


def _types(sample: Sequence[Row]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for column in sample[0]:
        kinds = {type_of(row.get(column)) for row in sample}
        columns[column] = kinds.pop() if len(kinds) == 1 else "float" if kinds == {"int", "float"} else "json"
    return columns


def _missing(pipeline: Pipeline, request: Request) -> list[str]:
    there = set(request.columns)
    for step in pipeline.steps:
        if step.operator in request.catalogue:
            there |= {column for column, _ in step.writes(request.catalogue[step.operator]).values()}
    return [f"no step writes the wanted column {c!r}" for c in request.wanted if c not in there]


def dry_run(pipeline: Pipeline, sample: Sequence[Row], catalogue: Catalogue) -> tuple[list[str], set[str]]:
    """``(errors, operators that failed)`` of a checked pipeline on a few rows, in memory. A step whose inputs failed is
    left out."""
    table = [dict(row) for row in sample]
    errors: list[str] = []
    failed: set[str] = set()
    for i in order(pipeline, catalogue):
        step = pipeline.steps[i]
        operator = catalogue[step.operator]
        needed = [c for c, _ in step.reads(operator).values()] + ([step.where] if step.where else [])
        if not all(c in table[0] for c in needed):
            continue
        try:
            results = list(apply(step, operator, iter(table)))
        except TrainwrightError as error:
            errors.append(f"step {i}: {error}")
            failed.add(step.operator)
            continue
        for row, result in zip(table, results, strict=True):
            row.update(result)
    return errors, failed


# Planners


def rule_planner(request: Request) -> Pipeline:
    """The cheapest operator for each wanted column, and for each column that those read, and so on. Operators that
    failed before are not used again. Raises ConfigError where nothing writes a column."""
    steps: list[Step] = []
    there = set(request.columns)

    def provide(column: str, path: tuple[str, ...]) -> None:
        if column in there:
            return
        if column in path:
            raise ConfigError(f"{column} could only be made from itself: {' <- '.join((*path, column))}", key="wanted")
        makers = [o for o in request.catalogue.values() if column in o.writes and o.name not in request.failed]
        reasons = []
        for operator in sorted(makers, key=lambda o: (COSTS.index(o.cost), o.name)):
            kept, seen = len(steps), set(there)
            try:
                for needed in operator.reads:
                    provide(needed, (*path, column))
            except ConfigError as error:
                reasons.append(str(error))
                del steps[kept:]
                there.clear()
                there.update(seen)
                continue
            steps.append(Step(operator.name))
            there.update(operator.writes)
            return
        raise ConfigError(reasons[0] if reasons else f"no operator writes {column!r}", key="wanted")

    for column in request.wanted:
        provide(column, ())
    keep = [c for c, kind in request.wanted.items() if kind == "bool"]
    return Pipeline(steps, keep)


def llm_planner(complete: Callable[[str], str]) -> Planner:
    """A planner that asks a model: ``complete(prompt) -> answer``, whose first JSON object is taken."""

    def ask(request: Request) -> Mapping[str, Any]:
        answer = complete(prompt(request))
        for match in re.finditer(r"\{", answer):
            try:
                value, _ = json.JSONDecoder().raw_decode(answer[match.start() :])
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
        raise ConfigError("the answer holds no JSON object")

    return ask


def prompt(request: Request) -> str:
    """The question in words."""
    operators = [
        {"name": o.name, "summary": o.summary, "reads": dict(o.reads), "writes": dict(o.writes),
         "settings": o.settings(), "cost": o.cost}
        for o in request.catalogue.values()
    ]  # fmt: skip
    parts = [
        "Plan a data pipeline over one table. Answer with a single JSON object: "
        '{"steps": [{"operator": name, "settings": {}, "inputs": {operator_column: table_column}, '
        '"outputs": {operator_column: new_column}, "where": bool_column_or_null}], "keep": [bool columns]}. '
        "A column is written once and never overwritten. Rows come out where all columns in keep are true.",
        f"Goal: {request.goal}",
        f"Columns of the table: {json.dumps(dict(request.columns))}",
        f"Columns wanted in the end: {json.dumps(dict(request.wanted))}",
        f"Operators: {json.dumps(operators)}",
    ]
    if request.errors:
        previous = request.previous.to_json() if request.previous is not None else None
        parts.append(f"Your last answer was {json.dumps(previous)}. It failed: {'; '.join(request.errors)}. Mend it.")
    return "\n".join(parts)


# Stages as operators

_MORE_COLUMNS = {"licences": ("licence",)}  # what a stage looks at besides the text
_NOT_HERE = ("unique_ids", "where", "verify_code")  # they judge other things than a column of texts


def stage_operators() -> dict[str, Operator]:
    """The stages of ``trainwright data build`` as operators on a column ``text``. They write ``keep``, and where the
    stage judges each document alone also the changed ``text`` (to be renamed by ``outputs``) and ``reason``."""
    found = {}
    for name, make in STAGES.items():
        if name in _NOT_HERE:
            continue
        columns = {"text": "str", **dict.fromkeys(_MORE_COLUMNS.get(name, ()), "str")}
        alone = isinstance(make, type) and issubclass(make, DocumentStage)
        writes = {"clean_text": "str", "keep": "bool", "reason": "str"} if alone else {"keep": "bool"}
        function = _wrap(partial(_judge if alone else _judge_all, make), make)
        summary = (make.__doc__ or "").strip().split("\n")[0]
        found[name] = Operator(name, __version__, columns, writes, function, "cpu", whole=not alone, summary=summary)
    return found


def _wrap(function: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the settings of the stage in its signature, which is where a pipeline's check looks."""
    import inspect

    first = inspect.Parameter("_table", inspect.Parameter.POSITIONAL_ONLY)
    settings = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(make).parameters.values() if p.name != "work_dir"
    ]  # fmt: skip
    function.__signature__ = inspect.Signature([first, *settings])  # type: ignore[attr-defined]
    return function


def _document(row: Row, number: int) -> Document:
    return Document(row["text"], str(number), licence=row.get("licence"))


def _judge(make: Callable[..., Any], row: Row, /, **settings: Any) -> Row:
    answer = _stage(make, json.dumps(settings, sort_keys=True, default=str), settings).apply(_document(row, 0))
    if isinstance(answer, Drop):
        return {"clean_text": row["text"], "keep": False, "reason": answer.reason}
    return {"clean_text": answer.text, "keep": True, "reason": ""}


_made: dict[tuple[Any, str], DocumentStage] = {}


def _stage(make: Callable[..., DocumentStage], key: str, settings: Mapping[str, Any]) -> DocumentStage:
    """One stage for all rows: some read a model or a table when they are made."""
    if (make, key) not in _made:
        _made[make, key] = make(**settings)
    return _made[make, key]


def _judge_all(make: Callable[..., Any], rows: Iterable[Row], /, **settings: Any) -> Iterable[Row]:
    """The stage may have to see all rows before it gives one, so what it kept is gathered first: 8 bytes a row."""
    count = 0

    def documents() -> Iterable[Document]:
        nonlocal count
        for row in rows:
            yield _document(row, count)
            count += 1

    kept = {int(d.id) for d in make(**settings).run(documents())}
    for number in range(count):
        yield {"keep": number in kept}
