"""Looking for noise in written traces: each step is computed anew, and followed to where its result is used.

A step whose written result is not that of its written operands is wrong. What tells the two kinds of noise apart is
what comes after it:

    dynamic   the wrong result is what later steps (or the answer) go on with: all but the root is consistent
    static    later steps go on with the right one; or an operand is not what it was copied from; or lines are missing

For that the program is run again on the question's inputs. At each written result that is not its own it is run once
more with that result in place of its own, and whichever of the two runs agrees better with what is written behind is
gone on with. This also follows programs that a wrong comparison leads another way.

The paper (arXiv:2402.04004) leaves finding noise open; this is ours. Its advice is to take out the dynamic kind first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainwright.data.synthetic.tint import Trace, Tracer, plain, trace
from trainwright.data.synthetic.tint_tasks import Sample, Task, task_named
from trainwright.data.synthetic.tint_text import Template, Visibility, value_text

Verdict = Literal["clean", "static", "dynamic", "mixed"]
_ANSWER = re.compile(r"^answer: ?(.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """What is wrong in a written trace. Steps are line numbers from 0."""

    verdict: Verdict
    roots: tuple[int, ...] = ()  # wrong results that later steps or the answer go on with
    local: tuple[int, ...] = ()  # steps with a wrong result or operand that nothing goes on with
    structure: str = ""  # what is wrong with the lines as such, if anything
    answer_right: bool = True  # the written answer is that of the question


def split_completion(text: str) -> tuple[list[str], str | None]:
    """Trace lines and answer of what a model (or a sample) wrote; None where there is no ``answer:`` line."""
    found = _ANSWER.search(text)
    body = text if found is None else text[: found.start()]
    return [line for line in body.split("\n") if line], None if found is None else found[1]


def check(
    task: Task | str,
    inputs: Sequence[int],
    completion: str,
    template: Template | None = None,
    show: Visibility | None = None,
) -> Finding:
    """Check what is written behind the question of ``task`` about ``inputs``.

    Operands and results have to be visible (ValueError): without them there is nothing to compute anew.
    """
    task = task_named(task) if isinstance(task, str) else task
    template, show = template or Template(), show or Visibility()
    if not (show.operands and show.result):
        raise ValueError("a trace can be checked only where operands and results are visible")
    lines, answer = split_completion(completion)
    clean = trace(task.function, inputs, Tracer(lines=False))
    right = answer == value_text(clean.answer)
    written: list[Step] = []
    for i, line in enumerate(lines):
        fields = template.read(line, show)
        step = None if fields is None else _numbers(fields)
        if step is None:
            return Finding("static", structure=f"line {i} cannot be read: {line!r}", answer_right=right)
        written.append(step)
    return _follow(task, inputs, written, answer, right)


Step = tuple[str, tuple[int, ...], int]


def _numbers(fields: dict[str, str]) -> Step | None:
    try:
        operands = tuple(int(fields[k]) for k in "abc" if k in fields)
        return fields.get("op", "pow"), operands, int(fields["result"])
    except ValueError:
        return None


def _follow(task: Task, inputs: Sequence[int], written: Sequence[Step], answer: str | None, right: bool) -> Finding:
    forced: dict[int, int] = {}
    local: set[int] = set()
    run = _run(task, inputs, forced, len(written))
    for k, (op, operands, result) in enumerate(written):
        if run is None or k >= len(run.events) or run.events[k].op != op:
            break
        event = run.events[k]
        if tuple(o.value for o in event.operands) != operands:
            local.add(k)  # a step that goes wrong while it runs has the right operands
        elif result != event.result:
            other = _run(task, inputs, {**forced, k: result}, len(written))
            if other is not None and _agrees(other, run, written, answer, k):
                forced[k], run = result, other
            else:
                local.add(k)
    structure = ""
    if run is None or [e.op for e in run.events] != [op for op, _, _ in written]:
        structure = f"the {len(written)} lines are not the steps of the program"
    odd = bool(local or structure) or (answer is not None and run is not None and answer != value_text(run.answer))
    if forced and odd and not local and not structure and right:
        odd = False  # the right answer was kept behind a wrong trace
    verdict: Verdict = ("mixed" if odd else "dynamic") if forced else ("static" if odd or answer is None else "clean")
    return Finding(verdict, tuple(forced), tuple(sorted(local)), structure, right)


def _run(task: Task, inputs: Sequence[int], forced: dict[int, int], steps: int) -> Trace | None:
    """The program with some results forced; None where that leads nowhere."""

    def noise(step: int, op: str, exact: int) -> int:
        return forced.get(step, exact)

    try:
        return trace(task.function, inputs, Tracer(noise, lines=False, max_events=max(steps, 1) + 100))
    except (RuntimeError, ArithmeticError, ValueError, TypeError, IndexError):
        return None


def _agrees(other: Trace, run: Trace, written: Sequence[Step], answer: str | None, behind: int) -> bool:
    """Whether what is written behind a step goes on with ``other`` and not with ``run``.

    The first place where the two differ and one of them is what is written decides: further on, errors may cancel.
    """
    for k in range(behind + 1, len(written)):
        op, operands, result = written[k]
        a, b = (r.events[k] if k < len(r.events) else None for r in (other, run))
        fits = a is not None and a.op == op, b is not None and b.op == op
        if a is None or b is None or not all(fits):
            return fits[0] and not fits[1]
        places = [*zip(a.operands, b.operands, operands, strict=True)]
        for x, y, value in [*((x.value, y.value, v) for x, y, v in places), (a.result, b.result, result)]:
            if x != y and value in (x, y):
                return value == x
    return answer == value_text(other.answer) != value_text(run.answer)


# -- figures ----------------------------------------------------------------------------------------------------------


def exact_match(completions: Iterable[str], samples: Iterable[Sample]) -> float:
    """Share of completions whose answer is the true one."""
    hits = [
        split_completion(text)[1] == value_text(plain(sample.true_answer))
        for text, sample in zip(completions, samples, strict=True)
    ]
    return sum(hits) / len(hits) if hits else 0.0


def trace_validity(
    completions: Iterable[str], samples: Iterable[Sample], template: Template | None = None,
    show: Visibility | None = None,
) -> float:  # fmt: skip
    """Share of completions with a clean trace and the right answer."""
    found = [
        check(sample.task, sample.inputs, text, template, show).verdict == "clean"
        for text, sample in zip(completions, samples, strict=True)
    ]
    return sum(found) / len(found) if found else 0.0


def answers_changed(samples: Iterable[Sample]) -> float:
    """Share of samples whose trace ends with another value than the true answer."""
    changed = [plain(s.run.answer) != plain(s.true_answer) for s in samples]
    return sum(changed) / len(changed) if changed else 0.0


def without_dynamic(
    samples: Iterable[Sample], template: Template | None = None, show: Visibility | None = None,
    keep: Callable[[Any], bool] = lambda finding: finding.verdict in ("clean", "static"),
) -> list[Sample]:  # fmt: skip
    """The samples that the validator lets through: by default all without errors that spread."""
    return [s for s in samples if keep(check(s.task, s.inputs, s.completion, template, show))]
