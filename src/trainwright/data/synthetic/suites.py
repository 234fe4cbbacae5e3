"""Tests as they come (lists of asserts, ``check`` functions), and tests to be written by a model at three levels."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Literal

from trainwright.core.errors import ConfigError, DataError

Level = Literal["minimal", "structured", "progressive"]
Generate = Callable[[str], str]  # a prompt to a model's answer
_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.S | re.I)


def code_of(text: str) -> str:
    """The program in a model's answer: its fenced blocks, or all of it where there are none."""
    blocks = _FENCE.findall(text)
    return "\n\n".join(b.rstrip() for b in blocks) + "\n" if blocks else text


def split_tests(suite: str | Sequence[str], entry: str | None = None) -> list[str]:
    """A suite as tests that each judge one thing and stand alone.

    Of a text each top-level statement with an assert is a test, together with the statements before it that assert
    nothing. The body of a function ``check(candidate)`` (HumanEval) is taken apart likewise, and ``entry`` is what is
    to be checked. A list is taken as it is. Raises DataError for a text that does not parse, or asserts nothing.
    """
    if not isinstance(suite, str):
        return [t for t in suite if t.strip()]
    try:
        body = ast.parse(suite).body
    except (SyntaxError, ValueError) as error:
        raise DataError(f"the tests do not parse: {error}") from None
    setup: list[ast.stmt] = []
    tests: list[str] = []
    called: str | None = None
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and len(statement.args.args) == 1:
            if entry is None:
                raise DataError("the tests are a function check(candidate); name what it checks (entry_point)")
            called = statement.name
            given = ast.parse(f"{statement.args.args[0].arg} = {entry}").body
            tests += _separate(statement.body, [*setup, *given])
        elif called and isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(f"{called}("):
            continue
        elif _asserts(statement):
            tests += _separate([statement], setup)
        else:
            setup.append(statement)
    tests += _test_functions(setup)
    if not tests:
        raise DataError("the tests assert nothing")
    return tests


def _asserts(statement: ast.stmt) -> bool:
    """Whether running the statement may assert something: one inside a function's definition does not."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return any(isinstance(n, ast.Assert) for n in ast.walk(statement))


def _separate(body: Sequence[ast.stmt], setup: Sequence[ast.stmt]) -> list[str]:
    before = list(setup)
    out = []
    for statement in body:
        if _asserts(statement):
            out.append("\n".join(ast.unparse(s) for s in [*before, statement]))
        else:
            before.append(statement)
    return out


def _test_functions(setup: Sequence[ast.stmt]) -> list[str]:
    """``def test_...():`` as pytest finds them."""
    functions = [
        s for s in setup if isinstance(s, ast.FunctionDef) and s.name.startswith("test") and not s.args.args
    ]  # fmt: skip
    rest = [s for s in setup if s not in functions]
    return ["\n".join(ast.unparse(s) for s in [*rest, f]) + f"\n{f.name}()" for f in functions]


def design_prompt(level: Level, problem: str, solution: str = "", tests: Sequence[str] = ()) -> str:
    """What a model is asked for tests. minimal: the problem alone; structured and progressive show what there is."""
    ask = [
        "Write tests for the following programming problem, one Python assert statement a line, in one code block.",
        f"Problem:\n{problem.strip()}",
    ]
    if level != "minimal":
        ask.append(f"A candidate solution, which may be wrong:\n```python\n{solution.strip()}\n```")
        if tests:
            ask.append("Tests so far:\n```python\n" + "\n".join(tests) + "\n```")
        ask.append("Cover edge cases: empty and extreme inputs, ties, negative numbers, types at their limits.")
    if level == "progressive":
        ask.append("Make each new test harder than those so far: it should fail for a solution that passes them.")
    return "\n\n".join(ask)


def design_tests(
    problem: str,
    generate: Generate,
    level: Level = "structured",
    *,
    solution: str = "",
    tests: Sequence[str] = (),
    rounds: int = 3,
    difficulty: Callable[[str, str], float] | None = None,
) -> list[str]:
    """Tests written by ``generate``, without repetitions; what does not parse is left out.

    progressive asks ``rounds`` times, each time showing what there is, and stops early where nothing new comes; with
    ``difficulty(problem, test)`` it keeps of each later round only tests harder than the round before on average.
    Raises DataError where no test comes at all.
    """
    if level not in ("minimal", "structured", "progressive"):
        raise ConfigError("should be minimal, structured or progressive", key="level", value=level)
    found = list(dict.fromkeys(tests)) if level != "minimal" else []
    bar = -float("inf")
    for _ in range(rounds if level == "progressive" else 1):
        answer = code_of(generate(design_prompt(level, problem, solution, found)))
        new = [t for t in dict.fromkeys(_asserts_of(answer)) if t not in found]
        if difficulty is not None and level == "progressive" and new:
            scores = [difficulty(problem, t) for t in new]
            new = [t for t, s in zip(new, scores, strict=True) if s > bar]
            bar = max(bar, sum(scores) / len(scores))
        if not new:
            break
        found += new
    if not found:
        raise DataError("the generator wrote no test that parses")
    return found


def _asserts_of(text: str) -> list[str]:
    try:
        return split_tests(text)
    except DataError:
        pass
    tests = []
    for line in text.splitlines():
        try:
            tests += [ast.unparse(s) for s in ast.parse(line.strip()).body if isinstance(s, ast.Assert)]
        except SyntaxError:
            continue
    return tests
