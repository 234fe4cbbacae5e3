"""Small programs on integers and lists, made from a seed: what a tiny model can learn to execute.

Each is a function ``f`` of one or two integers, or of a list and an integer, with two to ``lines`` statements: sums and
differences, comparisons, conditions and a loop over the list. All values stay small: products are taken modulo a
number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from trainwright.core.errors import ConfigError

Family = Literal["integers", "lists", "both"]


@dataclass(frozen=True)
class Made:
    code: str
    call: str


def make(index: int, seed: int = 0, family: Family = "both", lines: int = 4) -> Made:
    """Program ``index`` of a seed: depends on the arguments alone."""
    if lines < 1:
        raise ConfigError("should be at least 1", key="lines", value=lines)
    if family not in ("integers", "lists", "both"):
        raise ConfigError("should be integers, lists or both", key="family", value=family)
    rng = random.Random(f"pyx/{seed}/{family}/{lines}/{index}")
    lists = family == "lists" or (family == "both" and rng.random() < 0.5)
    return _lists(rng, lines) if lists else _integers(rng, lines)


def _term(rng: random.Random, names: list[str]) -> str:
    return rng.choice(names) if rng.random() < 0.7 else str(rng.randint(1, 9))


def _expression(rng: random.Random, names: list[str]) -> str:
    left, right = rng.choice(names), _term(rng, names)
    kind = rng.randrange(5)
    if kind == 4:
        return f"{left} * {rng.randint(2, 3)} % {rng.randint(5, 20)}"
    return f"{left} {'+' if kind % 2 else '-'} {right}"


def _statements(rng: random.Random, names: list[str], count: int, indent: str = "    ") -> list[str]:
    out: list[str] = []
    while len(out) < count:
        target = rng.choice(names) if rng.random() < 0.6 else rng.choice([n for n in "cde" if n not in names] or names)
        if rng.random() < 0.3:
            test = f"{rng.choice(names)} {rng.choice('<>')} {_term(rng, names)}"
            inside = rng.choice(names)
            out += [f"{indent}if {test}:", f"{indent}    {inside} = {_expression(rng, names)}"]
        else:
            out.append(f"{indent}{target} = {_expression(rng, names)}")
            if target not in names:
                names.append(target)
    return out


def _integers(rng: random.Random, lines: int) -> Made:
    names = ["a", "b"][: rng.randint(1, 2)]
    head = f"def f({', '.join(names)}):"
    arguments = [rng.randint(0, 20) for _ in names]
    body = _statements(rng, names, rng.randint(max(lines - 2, 1), lines))
    return Made("\n".join([head, *body, f"    return {rng.choice(names[-2:])}"]) + "\n", _call(arguments))


def _lists(rng: random.Random, lines: int) -> Made:
    arguments: list[object] = [[rng.randint(0, 9) for _ in range(rng.randint(1, 4))], rng.randint(0, 9)]
    start = rng.choice(["0", "k", "len(xs)", "xs[0]"])
    update = rng.choice(
        ["t = t + x", "t = t - x", "t = x - t", "t = t + x + k", "t = t + k", f"t = t * 2 % {rng.randint(5, 20)} + x"]
    )
    loop = [f"        {update}"]
    if rng.random() < 0.5:
        loop = [f"        if x {rng.choice('<>')} {rng.choice(['k', str(rng.randint(1, 8))])}:", f"    {loop[0]}"]
    behind = _statements(rng, ["t", "k"], max(lines - 3, 0)) if rng.random() < 0.5 else []
    body = [f"    t = {start}", "    for x in xs:", *loop, *behind, "    return t"]
    return Made("\n".join(["def f(xs, k):", *body]) + "\n", _call(arguments))


def _call(arguments: list[object] | list[int]) -> str:
    return f"f({', '.join(map(repr, arguments))})"
