"""Tests that compare with a literal, judged outside of the process that the tested program runs in.

    assert f([2, 1]) == [1, 2]   ->   inside: the value of f([2, 1]) as a text;   outside: is it that of [1, 2]?

What is expected never enters the program's process, so that neither an object that equals everything nor an answer
that the program writes itself passes. Texts are equal exactly where Python's == holds between what ``canonical`` knows:
numbers of all kinds (1 == 1.0 == True), strings, bytes, None, lists, tuples, sets, mappings, and classes derived from
them. An object of another class equals no literal here, whatever its ``__eq__`` says.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.core.sandbox import Program, Result


def canonical(value):  # type: ignore[no-untyped-def]  # its source runs in the sandbox, under whatever Python
    """The value as a text; two values that are equal have the same."""
    import collections.abc
    import sys

    decimal = getattr(sys.modules.get("decimal"), "Decimal", int)  # not imported where nothing has
    rational = getattr(sys.modules.get("numbers"), "Rational", int)

    def number(x):  # type: ignore[no-untyped-def]
        if isinstance(x, int):
            return hex(int.__index__(x))
        if isinstance(x, complex):
            return f"complex({number(x.real)}, {number(x.imag)})" if x.imag else number(x.real)
        if x != x or x in (float("inf"), float("-inf")):
            return repr(float(x))
        if int(x) == x:
            return hex(int(x))
        return float.__repr__(float(x)) if float(x) == x else "?"

    def text(x):  # type: ignore[no-untyped-def]
        if x is None or x is ...:
            return repr(x)
        if hasattr(type(x), "dtype") and hasattr(type(x), "item") and getattr(x, "ndim", 1) == 0:
            x = x.item()  # a scalar of NumPy
        if isinstance(x, (int, float, complex, decimal, rational)):
            return number(x)
        if isinstance(x, str):
            return str.__repr__(x)
        if isinstance(x, bytes | bytearray):
            return repr(bytes(x))
        if isinstance(x, list):
            return "[" + ", ".join([text(v) for v in list.__iter__(x)]) + "]"
        if isinstance(x, tuple):
            return "(" + ", ".join([text(v) for v in tuple.__iter__(x)]) + ",)"
        if isinstance(x, collections.abc.Mapping):
            return "{" + ", ".join(sorted(f"{text(k)}: {text(v)}" for k, v in x.items())) + ":}"
        if isinstance(x, collections.abc.Set):
            return "{" + ", ".join(sorted(map(text, x))) + "}"
        return "?"

    return text(value)


_SOURCE = inspect.getsource(canonical)


@dataclass(frozen=True)
class Outside:
    """A test without what it expects, the variable that its values are then in, and what this should be."""

    test: str
    seen: str
    expected: str


@functools.lru_cache(1024)
def outside(test: str, number: int = 0) -> Outside | None:
    """``test`` without its literals; None where it is to be run as it is.

    Each assert has to be `EXPRESSION == LITERAL`, turned round, or several of these with `and`, and to stand at the top
    or in the body of a function that the last statement calls. number: of the test among those of one process.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    body = tree.body
    left = sum(isinstance(n, ast.Assert) for n in ast.walk(tree))
    if left and not any(isinstance(s, ast.Assert) for s in body):
        body = _called(body)
    seen, text = f"_seen_{number}", f"_canonical_{number}"
    expected: list[str] = []
    for i, statement in enumerate(body):
        if not isinstance(statement, ast.Assert):
            continue
        pairs = _pairs(statement.test)
        if pairs is None:
            return None
        parts = [f"{seen}.append({text}({ast.unparse(expression)}))" for expression, _ in pairs]
        body[i] = ast.If(ast.Constant(True), ast.parse("\n".join(parts)).body, [])
        expected += [value for _, value in pairs]
        left -= 1
    if left or not expected:
        return None
    # In a namespace of its own, for programs have functions of their own called list or sorted.
    before = (
        f"{seen}, {text} = [], {{}}\n__import__('builtins').exec({_SOURCE!r}, {text})\n{text} = {text}['canonical']\n"
    )
    return Outside(before + ast.unparse(ast.fix_missing_locations(tree)), seen, repr(expected))


def _called(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body of the function that the last statement calls without arguments; else nothing."""
    last = body[-1]
    if not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and isinstance(last.value.func, ast.Name)):
        return []
    name = last.value.func.id
    found = [s for s in body if isinstance(s, ast.FunctionDef) and s.name == name]
    plain = len(found) == 1 and not found[0].decorator_list and not last.value.args and not last.value.keywords
    return found[0].body if plain else []


def _pairs(test: ast.expr) -> list[tuple[ast.expr, str]] | None:
    """Expressions and the texts of the literals that they should equal."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        parts = [_pairs(v) for v in test.values]
        return None if any(p is None for p in parts) else [pair for p in parts if p is not None for pair in p]
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return None
    left, right = test.left, test.comparators[0]
    for expression, literal in ((left, right), (right, left)):
        text = _literal(literal)
        if text is not None and _literal(expression) is None:
            return [(expression, text)]
    return None


def _literal(node: ast.expr) -> str | None:
    try:
        value: Any = ast.literal_eval(node)
        return canonical(value) if value == value else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def program(code: str, tests: Sequence[str]) -> Program:
    """``code`` and its tests, without their literals where they can do without."""
    made = [outside(t, i) for i, t in enumerate(tests)]
    return Program(
        code,
        tests=tuple(t if o is None else o.test for t, o in zip(tests, made, strict=True)),
        calls=tuple(o.seen for o in made if o is not None),
    )


def passed(result: Result, tests: Sequence[str]) -> list[bool]:
    """Which of the tests of ``program`` passed; none where it did not come to its end."""
    if not result.ok or len(result.tests) != len(tests):
        return [False] * len(tests)
    values = iter(result.values)
    found = []
    for i, (test, error) in enumerate(zip(tests, result.tests, strict=True)):
        judged = outside(test, i)
        right = judged is None or next(values, None) == judged.expected
        found.append(right and error is None)
    return found
