"""Traces as text: a line an event, by templates with a switch for each part.

A line is made of pieces that are text or values, so that noise can find the values. The same templates give the regular
expressions by which a written trace is read again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Any, NamedTuple

from trainwright.data.synthetic.tint import BINARY, Event

FIELDS = ("step", "line", "op", "a", "b", "c", "a_name", "b_name", "result", "result_name", "state")
VALUES = ("a", "b", "c", "result")  # what noise may change; the state's values too
_SIGNS = "|".join(re.escape(s) for s in sorted(BINARY, key=len, reverse=True))
_GROUPS = {
    "step": r"\d+", "line": r".*?", "op": _SIGNS + "|neg|abs|pow", "a": r"-?\d*", "b": r"-?\d*", "c": r"-?\d*",
    "a_name": r"\w*", "b_name": r"\w*", "result": r"-?\d*", "result_name": r"\w*", "state": r".*?",
}  # fmt: skip


class Piece(NamedTuple):
    text: str
    value: bool  # a value, which noise may change


Line = list[Piece]


@dataclass(frozen=True)
class Visibility:
    """Which parts of an event are written."""

    line: bool = False
    operands: bool = True
    result: bool = True
    state: bool = False

    def __post_init__(self) -> None:
        if not (self.line or self.operands or self.result or self.state):
            raise ValueError("nothing of an event would be visible; switch on one of line, operands, result, state")


@dataclass(frozen=True)
class Template:
    """How an event is written. Fields: step, line, op, a, b, c, a_name, b_name, result, result_name, state.

    The parts that are visible are joined by ``between``. Raises ValueError for a field that there is not.
    """

    line: str = "{line} :"
    binary: str = "{a} {op} {b}"
    unary: str = "{op} {a}"
    modular: str = "pow {a} {b} {c}"
    result: str = "= {result}"
    state: str = "[{state}]"
    between: str = " "

    def __post_init__(self) -> None:
        for part in (self.line, self.binary, self.unary, self.modular, self.result, self.state):
            try:
                fields = [str(name) for _, name, _, _ in Formatter().parse(part) if name is not None]
            except ValueError as error:
                raise ValueError(f"the template {part!r} is not a format string: {error}") from None
            unknown = [f for f in fields if f not in FIELDS]
            if unknown:
                raise ValueError(f"the template {part!r} has no field {unknown[0]!r}; there are {', '.join(FIELDS)}")

    def parts(self, operands: int, show: Visibility) -> str:
        """The format string of an event with so many operands."""
        chosen = []
        if show.line:
            chosen.append(self.line)
        if show.operands:
            chosen.append((self.unary, self.binary, self.modular)[operands - 1])
        if show.result:
            chosen.append(self.result)
        if show.state:
            chosen.append(self.state)
        return self.between.join(chosen)

    def render(self, event: Event, show: Visibility) -> Line:
        """One event as pieces."""
        values: dict[str, Any] = {
            "step": event.step, "line": event.line, "op": event.op, "result": event.result,
            "result_name": f"t{event.step}", "state": event.state,
        }  # fmt: skip
        for letter, operand in zip("abc", event.operands, strict=False):
            values[letter], values[f"{letter}_name"] = operand.value, operand.name
        out: Line = []
        for text, name, _, _ in Formatter().parse(self.parts(len(event.operands), show)):
            if text:
                out.append(Piece(text, False))
            if name == "state":
                out += _state(event.state)
            elif name is not None:
                out.append(Piece(str(values.get(name, "")), name in VALUES))
        return out

    @cached_property
    def _patterns(self) -> dict[tuple[int, Visibility], re.Pattern[str]]:
        return {}

    def pattern(self, operands: int, show: Visibility) -> re.Pattern[str]:
        """A regular expression for the line of an event with so many operands, a group for each field."""
        key = operands, show
        if key not in self._patterns:
            out, seen = [], set()
            for text, name, _, _ in Formatter().parse(self.parts(operands, show)):
                out.append(re.escape(text))
                if name is not None:
                    out.append(f"(?P={name})" if name in seen else f"(?P<{name}>{_GROUPS[name]})")
                    seen.add(name)
            self._patterns[key] = re.compile("".join(out))
        return self._patterns[key]

    def read(self, line: str, show: Visibility) -> dict[str, str] | None:
        """The fields of a written event; None for a line that is none."""
        for operands in (2, 3, 1):
            found = self.pattern(operands, show).fullmatch(line)
            if found:
                return found.groupdict()
        return None


def _state(state: Mapping[str, Any]) -> Line:
    out: Line = []
    for i, (name, value) in enumerate(state.items()):
        out.append(Piece(f"{', ' if i else ''}{name}=", False))
        out.append(Piece(value_text(value), True))
    return out


def value_text(value: Any) -> str:
    """An integer, or a list of them with spaces between."""
    return " ".join(str(v) for v in value) if isinstance(value, list | tuple) else str(value)


def render_lines(events: Sequence[Event], template: Template, show: Visibility) -> list[Line]:
    return [template.render(event, show) for event in events]


def text_of(lines: Sequence[Line]) -> str:
    """The lines, each ended by a newline."""
    return "".join("".join(piece.text for piece in line) + "\n" for line in lines)
