"""Noise in traces: static, on what is written down, and dynamic, while it is computed.

    static    after the trace is made each unit (value, digit or line) of it is, with probability p and independent of
              the others, replaced, deleted or swapped. The answer stays right.
    dynamic   each operation's result is, with probability p, another one, and the program goes on with that: later
              steps are right given the error, and the answer is what came out.

A result with dynamic noise always differs from the right one (``add`` draws from -delta..delta without 0), so p is the
rate of wrong steps. A comparison has one other result. Of k results that are all needed, then, the answer is wrong with
probability 1 - (1 - p)^k, up to errors that cancel.

Paper: arXiv:2402.04004. Which values its static noise draws is not said; replacements here have as many digits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.data.synthetic.tint import COMPARISONS
from trainwright.data.synthetic.tint_text import Line, Piece

Unit = Literal["value", "digit", "line"]
Mode = Literal["replace", "delete", "swap"]
Kind = Literal["add", "same_length"]


def check_probability(value: float, name: str) -> None:
    """Raises ValueError outside of [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is a probability: it should be between 0 and 1")


def same_length(value: int, rng: random.Random) -> int:
    """Another integer with as many digits and the same sign."""
    digits = len(str(abs(value)))
    low, high = (0, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
    drawn = rng.randint(low, high - 1)
    drawn += drawn >= abs(value)  # every other one alike
    return -drawn if value < 0 and drawn else drawn


class DynamicNoise:
    """A tracer's noise: each result is wrong with probability ``p``.

    kind    add: an integer of 1..delta, up or down; same_length: another one with as many digits
    After a run ``steps`` holds the numbers of the wrong ones.
    """

    def __init__(self, p: float, rng: random.Random, kind: Kind = "add", delta: int = 10):
        check_probability(p, "p")
        if kind not in ("add", "same_length"):
            raise ValueError(f"kind should be add or same_length, got {kind!r}")
        if delta < 1:
            raise ValueError(f"delta should be at least 1, got {delta}")
        self.p, self.rng, self.kind, self.delta = p, rng, kind, delta
        self.steps: list[int] = []

    def __call__(self, step: int, op: str, exact: int) -> int:
        if self.rng.random() >= self.p:
            return exact
        self.steps.append(step)
        if op in COMPARISONS:
            return 1 - exact
        if self.kind == "same_length":
            return same_length(exact, self.rng)
        change = self.rng.randint(1, self.delta)
        return exact + (change if self.rng.random() < 0.5 else -change)


@dataclass(frozen=True)
class StaticNoise:
    """``noise(lines, rng) -> (lines, units chosen)``; see the module."""

    p: float
    unit: Unit = "value"
    mode: Mode = "replace"

    def __post_init__(self) -> None:
        check_probability(self.p, "p")
        if self.unit not in ("value", "digit", "line"):
            raise ValueError(f"unit should be value, digit or line, got {self.unit!r}")
        if self.mode not in ("replace", "delete", "swap"):
            raise ValueError(f"mode should be replace, delete or swap, got {self.mode!r}")

    def __call__(self, lines: Sequence[Line], rng: random.Random) -> tuple[list[Line], int]:
        out = [list(line) for line in lines]
        if self.unit == "line":
            return self._lines(out, rng)
        places = [(i, j) for i, line in enumerate(out) for j, piece in enumerate(line) if piece.value]
        if self.unit == "value":
            return out, self._values(out, places, rng)
        chosen = 0
        for i, j in places:
            text, n = self._digits(out[i][j].text, rng)
            out[i][j] = Piece(text, True)
            chosen += n
        return out, chosen

    def _values(self, lines: list[Line], places: list[tuple[int, int]], rng: random.Random) -> int:
        chosen = 0
        for n, (i, j) in enumerate(places):
            if rng.random() >= self.p:
                continue
            chosen += 1
            text = lines[i][j].text
            if self.mode == "replace":
                lines[i][j] = Piece(_other_value(text, rng), True)
            elif self.mode == "delete":
                lines[i][j] = Piece("", True)
            elif len(places) > 1:
                k = rng.randrange(len(places) - 1)
                a, b = places[k + (k >= n)]
                lines[i][j], lines[a][b] = lines[a][b], lines[i][j]
        return chosen

    def _digits(self, text: str, rng: random.Random) -> tuple[str, int]:
        marks = list(text)
        digits = [k for k, c in enumerate(marks) if c.isdigit()]
        chosen = 0
        for n, k in enumerate(digits):
            if rng.random() >= self.p:
                continue
            chosen += 1
            if self.mode == "replace":
                drawn = rng.randrange(9)
                marks[k] = str(drawn + (drawn >= int(text[k])))
            elif self.mode == "delete":
                marks[k] = ""
            elif len(digits) > 1:
                other = digits[n + 1] if n + 1 < len(digits) else digits[n - 1]
                marks[k], marks[other] = marks[other], marks[k]
        return "".join(marks), chosen

    def _lines(self, lines: list[Line], rng: random.Random) -> tuple[list[Line], int]:
        picked = [k for k in range(len(lines)) if rng.random() < self.p]
        if self.mode == "delete":
            gone = set(picked)
            return [line for k, line in enumerate(lines) if k not in gone], len(picked)
        before = [list(line) for line in lines]
        for k in picked:
            if len(lines) < 2:
                break
            if self.mode == "replace":
                other = rng.randrange(len(lines) - 1)
                lines[k] = list(before[other + (other >= k)])
            else:
                other = k + 1 if k + 1 < len(lines) else k - 1
                lines[k], lines[other] = lines[other], lines[k]
        return lines, len(picked)


def _other_value(text: str, rng: random.Random) -> str:
    """Each integer in ``text`` (a list has several) replaced by another of its length."""
    import re

    change: Callable[[re.Match[str]], str] = lambda found: str(same_length(int(found[0]), rng))  # noqa: E731
    return re.sub(r"-?\d+", change, text)
