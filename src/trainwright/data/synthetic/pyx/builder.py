"""PyX rows from functions: run, trace, mutate the inputs, tell, and keep what execution agrees with.

    functions -> literal calls, mutated -> runs twice, ends, is deterministic, gives a literal -> trace that replays
      -> forward, backward, debugging rows told from it; code from a description where a generator is given
      -> every answer executed: forward equal to the real output, backward satisfies the assertion, refined code passes

What a language model does in the paper is a callable here (prompt to text): it may write the description of a function
(``describe``) and monologues of its own (``tell``). Its answers go through the same filter as everything else.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import get_args

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.sandbox import Limits, Program, Sandbox
from trainwright.data.synthetic.mutants import mutants
from trainwright.data.synthetic.pyx import rows as kinds
from trainwright.data.synthetic.pyx.inputs import guesses, mutations
from trainwright.data.synthetic.pyx.monologues import Style
from trainwright.data.synthetic.pyx.rows import Kind, Reasoning, Row
from trainwright.data.synthetic.pyx.seeds import Function
from trainwright.data.synthetic.pyx.tracer import Rejected, Trace, is_literal, parse_call, trace_many

Generate = Callable[[str], str]
LIMITS = Limits(wall_seconds=20.0, cpu_seconds=2.0, memory_bytes=256 << 20)
# Modules without files, processes, network, clock or chance.
MODULES = {
    "math", "cmath", "re", "string", "collections", "itertools", "functools", "operator", "heapq", "bisect", "copy",
    "typing", "fractions", "decimal", "statistics", "textwrap", "json", "dataclasses", "enum", "abc", "numbers",
    "__future__",
}  # fmt: skip
_OUTSIDE = {"open", "exec", "eval", "compile", "input", "__import__", "breakpoint", "globals", "__builtins__"}
TOGETHER = 8  # functions whose calls go through the workers at once


def reaches_outside(code: str) -> str | None:
    """The first import or name by which the code could reach beyond itself; None where there is none.

    The sandbox refuses what such code does. This refuses the sample as well where the code goes on after the refusal.
    Raises DataError for code that does not parse.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the code does not parse: {error}") from None
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        elif isinstance(node, ast.Name) and node.id in _OUTSIDE:
            return node.id
        elif isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            return node.attr
        for name in names:
            if name.split(".")[0] not in MODULES:
                return name
    return None


class Builder:
    """Rows of the kinds asked for, from functions.

    inputs_each: calls of a function that become rows, spread over the kinds in turn. guess: try usual inputs for
    functions that come without calls. reasoning, style: see rows and monologues. describe: a prompt with code to a
    description, needed for kind nl. tell: a question to a response, instead of the rules, for forward and backward.
    ``report`` counts what became of everything.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        wanted: Sequence[Kind] = ("forward", "backward"),
        *,
        inputs_each: int = 4,
        guess: bool = True,
        reasoning: Reasoning = "monologue",
        style: Style = "words",
        describe: Generate | None = None,
        tell: Generate | None = None,
        seed: int = 0,
        max_steps: int = 60,
    ):
        unknown = [k for k in wanted if k not in get_args(Kind)]
        if unknown or not wanted or len(set(wanted)) != len(wanted):
            raise ConfigError(
                f"should name some of {', '.join(get_args(Kind))}, each once", key="kinds", value=list(wanted)
            )
        if "nl" in wanted and describe is None:
            raise ConfigError("rows of kind nl need describe, a callable that describes code in words", key="describe")
        if inputs_each < 1:
            raise ConfigError("should be at least 1", key="inputs_each", value=inputs_each)
        if sandbox.isolation == "none":
            raise ConfigError("PyX executes code from anywhere; give a sandbox with isolation", key="isolation")
        self.sandbox, self.wanted, self.inputs_each, self.guess = sandbox, tuple(wanted), inputs_each, guess
        self.reasoning, self.style, self.describe, self.tell = reasoning, style, describe, tell
        self.seed, self.max_steps = seed, max_steps
        self.report: Counter[str] = Counter()

    def rows(self, functions: Iterable[Function]) -> Iterator[Row]:
        """Rows that passed the filter, in the order of the functions."""
        stream = iter(functions)
        while batch := list(islice(stream, TOGETHER)):
            usable = [f for f in batch if self._usable(f)]
            traces = self._traces(usable)
            made = [(row, t) for f in usable for row, t in self._of(f, traces[f])]
            for (row, _), good in zip(made, agree([r for r, _ in made], self.sandbox), strict=True):
                self.report[f"{row.kind} rows {'kept' if good else 'whose answer execution refutes'}"] += 1
                if good:
                    yield row

    def _usable(self, function: Function) -> bool:
        self.report["functions"] += 1
        found = reaches_outside(function.code)
        if found is not None:
            self.report["functions that reach outside"] += 1
        return found is None

    def _traces(self, functions: Sequence[Function]) -> dict[Function, list[Trace]]:
        """Traces of calls, known ones and their mutations first."""
        calls: dict[Function, list[str]] = {}
        for f in functions:
            first = list(f.calls)
            for call in first:
                parse_call(call)
            if not first and self.guess:
                first = list(guesses(f.name, f.parameters, seed=self.seed))
            calls[f] = first
        found = self._trace({f: c for f, c in calls.items() if c})
        more: dict[Function, list[str]] = {}
        for f in functions:
            if found.get(f):
                bases = [t.call for t in found[f]][:3]
                new = [m for c in bases for m in mutations(c, self.inputs_each, self.seed)]
                more[f] = [m for m in dict.fromkeys(new) if m not in calls[f]]
        for f, traces in self._trace({f: c for f, c in more.items() if c}).items():
            found[f] += traces
        return {f: self._spread(f, found.get(f, [])) for f in functions}

    def _trace(self, calls: dict[Function, list[str]]) -> dict[Function, list[Trace]]:
        pairs = [(f, call) for f, cs in calls.items() for call in cs]
        out: dict[Function, list[Trace]] = {f: [] for f in calls}
        samples = [(f.code, call) for f, call in pairs]
        for (f, _), found in zip(pairs, trace_many(samples, self.sandbox, max_steps=self.max_steps), strict=True):
            if isinstance(found, Rejected):
                self.report[f"calls: {found.reason}"] += 1
            else:
                self.report["calls traced"] += 1
                out[f].append(found)
        return out

    def _spread(self, function: Function, traces: list[Trace]) -> list[Trace]:
        """inputs_each of the traces, of different outputs first."""
        rng = random.Random(f"{self.seed}/{function.code}")
        by_result: dict[str, list[Trace]] = {}
        for t in traces:
            by_result.setdefault(t.result, []).append(t)
        groups = list(by_result.values())
        rng.shuffle(groups)
        order = [g[i] for i in range(max(map(len, groups), default=0)) for g in groups if i < len(g)]
        return order[: self.inputs_each]

    def _of(self, function: Function, traces: list[Trace]) -> Iterator[tuple[Row, Trace]]:
        if not traces:
            self.report["functions without a usable call"] += 1
            return
        ordinary = [k for k in self.wanted if k in ("forward", "backward")]
        if "nl" in self.wanted and self.describe is not None:
            question = f"Describe what this function does, for somebody who is to write it:\n{function.code}"
            yield kinds.nl_row(f"{self.describe(question)}\nIts name is {function.name}.", function.code), traces[0]
        if "debug" in self.wanted:
            yield from self._debugging(function, traces)
        for i, t in enumerate(traces if ordinary else []):
            make = kinds.forward_row if ordinary[i % len(ordinary)] == "forward" else kinds.backward_row
            row = make(t, self.reasoning, self.style)
            if self.tell is not None:
                row = Row(row.kind, row.question, self.tell(row.to_pair()["prompt"]))
            yield row, t

    def _debugging(self, function: Function, traces: list[Trace]) -> Iterator[tuple[Row, Trace]]:
        """One row: the first mutant that ends with another output on one of the calls."""
        faulty = mutants(function.code, 6, self.seed)
        samples = [(m, traces[0].call) for m in faulty]
        for found in trace_many(samples, self.sandbox, max_steps=self.max_steps):
            if isinstance(found, Trace) and found.result != traces[0].result:
                fixed = ast.unparse(ast.parse(function.code))
                yield kinds.debug_row(fixed, found, traces[0].result, style=self.style), traces[0]
                return
        self.report["functions without a fault that shows"] += 1


def agree(rows: Sequence[Row], sandbox: Sandbox) -> list[bool]:
    """Whether execution agrees with each row's answer. What is expected is compared here, outside the program.

    forward: the answer equals the output. backward: the call in the answer gives the output (any valid input counts).
    debug: the refined code gives what the test wants and the buggy one does not. nl: the code runs.
    """
    jobs = [_checks(row) for row in rows]
    results = sandbox.map((Program(code, calls=(c,) if c else ()) for job in jobs for code, c, _, _ in job), twice=True)
    out = []
    for job in jobs:
        good = bool(job)
        for _, call, expected, equal in job:
            first, second = next(results)
            ran = first.ok and second.ok and first.observed == second.observed
            same = ran and (not call or _same(first.values[0], expected))
            good = good and (same if equal else first.ok and not same)
        out.append(good)
    return out


def _checks(row: Row) -> list[tuple[str, str, str, bool]]:
    """(code, call, expected, whether it is to be equal) that all have to hold; none: the row cannot be right."""
    try:
        if row.kind == "nl":
            from trainwright.data.synthetic.suites import code_of

            return [(code_of(row.response), "", "", True)]
        code = kinds.code_of_question(row.question)
        left, right = kinds.assertion_of(row.question if row.kind != "debug" else row.question.split("It fails: ")[-1])
        kinds.check_tags(row.response)
        if row.kind == "debug":
            refined = kinds.refined_of(row.response)
            return [(refined, left, right, True), (code, left, right, False)] if refined else []
        answer = kinds.answer_of(row.response)
        if answer is None:
            return []
        if row.kind == "forward":
            return [(code, left, answer, True)] if is_value(answer) else []
        function, _ = parse_call(answer)
        asked, _, _ = left.partition("(")
        return [(code, answer, right, True)] if function == asked else []
    except (DataError, SyntaxError):
        return []


def is_value(text: str) -> bool:
    """Whether the text is a literal, however it is spelt."""
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _same(value: str, expected: str) -> bool:
    """Equal as literals, and of the same type: 1 is not True, nor 1.0."""
    if value == expected:
        return is_literal(value)
    try:
        one, other = ast.literal_eval(value), ast.literal_eval(expected)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return type(one) is type(other) and bool(one == other) and repr(one) == repr(other)
