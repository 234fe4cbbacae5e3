"""Running operator pipelines: each step once, from where it stopped, and none of an unchanged pipeline.

Each step's output lies in a folder named by the hash of all that decides it: the operator's name and version, its
settings, and the hashes of the columns that it reads, down to the content of the table. So a second run of an unchanged
pipeline runs no operator, a changed step runs itself and what depends on it, and an interrupted one goes on behind its
last whole chunk. One chunk of rows is in memory at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainwright.core.errors import ConfigError, DataError, TrainwrightError
from trainwright.data.build.operators import (
    Catalogue,
    Operator,
    Pipeline,
    Row,
    Step,
    check,
    fits_type,
    order,
    step_hash,
    type_of,
)

CHUNK = 1024


@dataclass
class Result:
    """What a run did. ``columns`` are those of the table and of all steps."""

    executed: list[str]  # operators that ran, in their order
    reused: list[str]  # those whose results were there
    rows: int
    columns: list[str]
    _parts: Callable[[Sequence[str]], Iterator[Row]]
    _keep: Sequence[str]

    def read(self, columns: Sequence[str] | None = None, everything: bool = False) -> Iterator[Row]:
        """The rows that are kept (or all), chunk by chunk."""
        wanted = list(self.columns if columns is None else columns)
        for row in self._parts([*wanted, *(c for c in self._keep if c not in wanted)]):
            if everything or all(row[c] is True for c in self._keep):
                yield {c: row[c] for c in wanted}


class Workspace:
    """The folder in which tables and results of steps are kept.

    catalogue  operators by name
    chunk      rows that are worked on and saved at a time
    """

    def __init__(self, folder: Path | str, catalogue: Catalogue, chunk: int = CHUNK):
        if chunk < 1:
            raise ConfigError("should be at least 1", key="chunk", value=chunk)
        self.folder, self.catalogue, self.chunk = Path(folder), catalogue, chunk

    def run(self, pipeline: Pipeline, rows: Iterable[Mapping[str, Any]]) -> Result:
        """Run what has not run before. ``rows`` are read once, to the end, also when nothing changed.

        Raises ConfigError for a pipeline that :func:`check` refuses, DataError for an operator that fails or gives
        something else than it declares; what was done until then is kept.
        """
        table, columns, count = self._save_table(rows)
        check(pipeline, columns, self.catalogue)
        source: dict[str, Path] = dict.fromkeys(columns, table)
        hashes = {c: f"{table.name}/{c}" for c in columns}
        executed, reused = [], []
        for i in order(pipeline, self.catalogue):
            step = pipeline.steps[i]
            operator = self.catalogue[step.operator]
            name = step_hash(step, operator, hashes)
            folder = self.folder / "steps" / name
            if (folder / "done.json").is_file():
                reused.append(step.operator)
            else:
                self._execute(step, operator, folder, source, count)
                executed.append(step.operator)
            for column, _ in step.writes(operator).values():
                source[column], hashes[column] = folder, f"{name}/{column}"
        return Result(executed, reused, count, list(source), lambda c: self._rows(source, c, count), pipeline.keep)

    def _save_table(self, rows: Iterable[Mapping[str, Any]]) -> tuple[Path, dict[str, str], int]:
        base = self.folder / "tables"
        fresh = base / f".new.{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        digest = hashlib.blake2b(digest_size=12)
        columns: dict[str, str] = {}
        count = 0
        try:
            for number, chunk in enumerate(_chunks(rows, self.chunk)):
                for row in chunk:
                    _merge_types(columns, row, count)
                    count += 1
                text = "".join(_line(dict(row)) for row in chunk)
                digest.update(text.encode())
                _part(fresh, number).write_text(text, "utf-8")
            if not count:
                raise DataError("the table has no row")
            digest.update(f"{self.chunk}".encode())
            (fresh / "done.json").write_text(json.dumps({"rows": count, "columns": columns}))
            final = base / digest.hexdigest()
            if not final.exists():
                fresh.rename(final)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return final, columns, count

    def _rows(self, source: Mapping[str, Path], columns: Sequence[str], count: int, first: int = 0) -> Iterator[Row]:
        """Rows of ``columns``, from chunk ``first`` on."""
        folders = dict.fromkeys(source[c] for c in columns)
        for number in range(first, -(-count // self.chunk)):
            parts = {f: _part(f, number).read_text("utf-8").splitlines() for f in folders}
            for at in range(min(self.chunk, count - number * self.chunk)):
                lines = {f: json.loads(part[at]) for f, part in parts.items()}
                yield {c: lines[source[c]].get(c) for c in columns}

    def _execute(self, step: Step, operator: Operator, folder: Path, source: Mapping[str, Path], count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        chunks = -(-count // self.chunk)
        first = 0
        if not operator.whole:
            while first < chunks and _part(folder, first).is_file():
                first += 1
        reads = [c for c, _ in step.reads(operator).values()] + ([step.where] if step.where else [])
        rows = (
            self._rows(source, reads, count, first) if reads else iter([{} for _ in range(first * self.chunk, count)])
        )
        results = apply(step, operator, rows, first * self.chunk)
        for number in range(first, chunks):
            size = min(self.chunk, count - number * self.chunk)
            text = "".join(_line(row) for row in itertools.islice(results, size))
            _write(_part(folder, number), text)
        for _ in results:  # the generator's own end is where a result too many shows
            pass
        _write(
            folder / "done.json", json.dumps({"rows": count, "operator": operator.name, "version": operator.version})
        )


def apply(step: Step, operator: Operator, rows: Iterable[Row], first: int = 0) -> Iterator[Row]:
    """One row of the step's output columns for each of ``rows``; None where the step passes over a row.

    Raises DataError naming step and row (counted from ``first``) for an operator that fails or breaks its word.
    """
    reads, writes = step.reads(operator), step.writes(operator)
    nothing: Row = {column: None for column, _ in writes.values()}

    def wanted(row: Row) -> bool:
        return (step.where is None or row[step.where] is True) and all(row[c] is not None for c, _ in reads.values())

    def own(row: Row) -> Row:
        return {column: row[there] for column, (there, _) in reads.items()}

    def checked(result: Any, number: int) -> Row:
        if not isinstance(result, Mapping) or set(result) != set(writes):
            got = sorted(result) if isinstance(result, Mapping) else type(result).__name__
            raise DataError(f"{step.operator}, row {number}: it gave {got} and declares {sorted(writes)}")
        for column, (_, kind) in writes.items():
            if not fits_type(result[column], kind):
                raise DataError(
                    f"{step.operator}, row {number}: {column} is {type(result[column]).__name__}, not {kind}"
                )
        return {there: result[column] for column, (there, _) in writes.items()}

    if not operator.whole:
        for number, row in enumerate(rows, first):
            if not wanted(row):
                yield nothing
                continue
            with _named(step, number):
                result = operator.function(own(row), **step.settings)
            yield checked(result, number)
        return
    rows = iter(rows)
    flags: deque[bool] = deque()  # of the rows that the generator has read and not answered yet

    def feed() -> Iterator[Row]:
        for row in rows:
            flags.append(wanted(row))
            if flags[-1]:
                yield own(row)

    number = first
    results = iter(operator.function(feed(), **step.settings))
    while True:
        with _named(step, number):
            result = next(results, None)
        while flags and not flags[0]:
            flags.popleft()
            yield nothing
            number += 1
        if result is None:
            break
        if not flags:
            raise DataError(f"{step.operator}: it gave more results than there are rows")
        flags.popleft()
        yield checked(result, number)
        number += 1
    if any(flags) or next(iter(rows), None) is not None:
        raise DataError(f"{step.operator}: it ended at row {number}, before the table did")


class _named:
    """Errors of an operator's own, with its name and the row."""

    def __init__(self, step: Step, number: int):
        self.step, self.number = step, number

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, TrainwrightError):
            message = f"{self.step.operator}, row {self.number}: {type(error).__name__}: {error}"
            raise DataError(message) from error


def _chunks(rows: Iterable[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    stream = iter(rows)
    while chunk := list(itertools.islice(stream, size)):
        yield chunk


def _merge_types(columns: dict[str, str], row: Mapping[str, Any], number: int) -> None:
    if not number:
        columns.update({c: type_of(v) for c, v in row.items()})
    if set(row) != set(columns):
        different = sorted(set(row) ^ set(columns))
        raise DataError(f"row {number} of the table has not the columns of the others: {', '.join(different)} differ")
    for column, value in row.items():
        kind = type_of(value)
        if kind != columns[column]:
            columns[column] = "float" if {kind, columns[column]} == {"int", "float"} else "json"


def _line(row: Row) -> str:
    # No line separators of Unicode inside a line, since parts are split into lines again.
    return json.dumps(row, ensure_ascii=True, sort_keys=True) + "\n"


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.jsonl"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


# Recipe files


def freeze(pipeline: Pipeline, columns: Mapping[str, str], catalogue: Catalogue, path: Path | str) -> Path:
    """Write a checked pipeline as a YAML recipe with the version and hash of each step."""
    check(pipeline, columns, catalogue)
    recipe = pipeline.to_json()
    for step, line in zip(pipeline.steps, recipe["steps"], strict=True):
        operator = catalogue[step.operator]
        line["version"], line["hash"] = operator.version, step_hash(step, operator)
    recipe["columns"] = dict(columns)
    path = Path(path)
    _write(path, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
    return path


def thaw(path: Path | str, catalogue: Catalogue) -> Pipeline:
    """The pipeline of a recipe file. ConfigError where a step was edited or an operator has another version now."""
    try:
        recipe = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a pipeline: {error}") from None
    frozen = [(s.pop("version", None), s.pop("hash", None)) for s in recipe.get("steps", []) if isinstance(s, dict)]
    pipeline = Pipeline.from_json({k: v for k, v in recipe.items() if k != "columns"})
    check(pipeline, recipe.get("columns", {}), catalogue)
    for i, (step, (version, expected)) in enumerate(zip(pipeline.steps, frozen, strict=True)):
        operator = catalogue[step.operator]
        if version != operator.version:
            raise ConfigError(
                f"was frozen with version {version} of {step.operator}, which is {operator.version} now; freeze anew, "
                "or install the old one",
                key=f"steps.{i}",
            )
        if step_hash(step, operator) != expected:
            raise ConfigError(
                f"{step.operator} was edited after freezing: its hash differs; freeze anew", key=f"steps.{i}"
            )
    return pipeline
