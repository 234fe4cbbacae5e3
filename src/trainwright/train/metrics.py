"""metrics.jsonl: one JSON object a line, appended as the run goes.

Figures keep full precision. JSON has no NaN, so a float that is not finite is written as the string ``"NaN"``,
``"Infinity"`` or ``"-Infinity"``; :func:`read_metrics` gives it back as a float. Lines hold ``step`` and figures, or
``event`` and what happened. Each line goes to the system as it is written, so SIGKILL loses none but the one being
written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainwright.core.errors import DataError

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsWriter:
    """Appends rows to ``path``. A line that an earlier process was killed in is cut off when the file is opened.

    Raises DataError when the file cannot be opened or written (a full disk, for one).
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            self._file = self.path.open("a+b", buffering=0)
            _cut_torn_line(self._file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from None

    def write(self, row: dict[str, Any]) -> None:
        line = (encode(row) + "\n").encode()
        try:
            written = self._file.write(line)  # one write call: a line is whole or, if killed inside, the last
            while written < len(line):
                line = line[written:]
                written = self._file.write(line)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from None

    def truncate(self, step: int) -> None:
        """Drop what came after ``step`` was done: everything behind the last line of a step <= ``step``.

        By place and not by number, because after a rollback a step's number comes twice. ``step=0`` empties the file.
        One system call, so a crash leaves the old file or the new one.
        """
        keep = 0
        if step > 0:
            for end, row in _lines(self.path):
                number = row.get("step") if isinstance(row, dict) else None
                if isinstance(number, int | float) and number <= step:
                    keep = end
        os.ftruncate(self._file.fileno(), keep)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def encode(row: dict[str, Any]) -> str:
    """``row`` as one line of strict JSON. Tensors and NumPy scalars become numbers."""
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False, default=_plain)
    except ValueError:  # a float that is not finite: rare, so only then the slow way
        return json.dumps(_strict(row), allow_nan=False, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    if hasattr(value, "tolist"):
        return _strict(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _cut_torn_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """``(offset behind the line, value)``; the value is None for a line that is no JSON object."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            yield end, value if isinstance(value, dict) else None


def read_metrics(path: Path | str, *, strict: bool = True) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl, also of a running or killed run: a torn last line is passed over.

    A broken line in the middle raises DataError that names it; with ``strict=False`` it is passed over too.
    """
    path = Path(path)
    try:
        values = [value for _, value in _lines(path)]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    rows = []
    for i, value in enumerate(values):
        if value is not None:
            rows.append({k: _NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in value.items()})
        elif strict and i < len(values) - 1:
            raise DataError(f"{path}, line {i + 1}: not a JSON object; the file was changed or damaged")
    return rows


def effective(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the run as it stands: figures of steps that a later rollback undid are left out, events stay."""
    out: list[dict[str, Any]] = []
    for row in rows:
        if row.get("event") == "rollback" and "from_step" in row:
            out = [r for r in out if "event" in r or r.get("step", 0) <= row["step"]]
        out.append(row)
    return out
