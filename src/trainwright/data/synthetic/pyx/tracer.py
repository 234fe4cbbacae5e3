"""What a call does, line by line: the local variables that each line changes, recorded inside the sandbox.

A step is a line that ran, with the variables that had another repr after it. A second run, which is not traced, in a
process with other hashes and addresses, says what the call's result and its locals at the end really are. The replay of
the steps (all changes in their order) has to end at these locals, and the two results are the same, or it is no sample.

Paper: SemCoder, arXiv:2406.01006; its traces come from PySnooper. This is sys.settrace itself, so states are exact
reprs and not cut texts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.errors import DataError
from trainwright.core.sandbox import Program, Result, Sandbox

MAX_STEPS = 400
WINDOW = 64  # processes between two results
MAX_REPR = 200  # characters of a value; a longer one ends the sample

# Runs in the program's process; nothing of it is trusted outside. Only code of the program itself is traced.
_INSIDE = """
import json as _json, sys as _sys

class _TooMuch(Exception): pass

def _repr(value, most):
    text = repr(value)
    if len(text) > most: raise _TooMuch("a value is too long")
    return text

def _locals(frame, most):
    return {k: _repr(v, most) for k, v in frame.f_locals.items() if not k.startswith((".", "__"))}

def _trace(code, call, steps, most, traced):
    space = {"__name__": "program"}
    try:
        exec(compile(code, "<traced>", "exec"), space)
        value = compile(call, "<call>", "eval")
    except BaseException as error:
        return {"error": type(error).__name__ + ": " + str(error)[:200]}
    out, frames, final, depth = [], {}, [None], [0]

    def note(frame):
        entry = frames[id(frame)]
        now = _locals(frame, most)
        changes = {k: v for k, v in now.items() if entry["seen"].get(k) != v}
        gone = [k for k in entry["seen"] if k not in now]
        if entry["step"] is not None:
            entry["step"]["changes"], entry["step"]["gone"] = changes, gone
        entry["seen"] = now
        return now

    def add(frame, kind):
        if len(out) >= steps: raise _TooMuch("too many steps")
        entry = frames[id(frame)]
        step = {"kind": kind, "line": frame.f_lineno, "depth": entry["depth"], "function": frame.f_code.co_name,
                "changes": {}, "gone": []}
        out.append(step)
        entry["step"] = step
        return step

    def local(frame, event, argument):
        if event == "line":
            note(frame)
            add(frame, "line")
        elif event == "return":
            now = note(frame)
            step = add(frame, "return")
            step["value"] = _repr(argument, most)
            frames[id(frame)]["step"] = None
            if frames[id(frame)]["depth"] == 0: final[0] = now
            depth[0] -= 1
        elif event == "exception":
            note(frame)
        return local

    def start(frame, event, argument):
        if event != "call" or frame.f_code.co_filename != "<traced>": return None
        frames[id(frame)] = {"seen": {}, "step": None, "depth": depth[0], "frame": frame}
        depth[0] += 1
        step = add(frame, "call")
        step["changes"] = frames[id(frame)]["seen"] = _locals(frame, most)
        frames[id(frame)]["step"] = None
        return local

    def watch(frame, event, argument):
        if frame.f_code.co_filename != "<traced>": return
        if event == "call": depth[0] += 1
        elif event == "return":
            depth[0] -= 1
            if depth[0] == 0: final[0] = _locals(frame, most)

    try:
        if traced: _sys.settrace(start)
        else: _sys.setprofile(watch)
        try:
            result = eval(value, space)
        finally:
            _sys.settrace(None)
            _sys.setprofile(None)
        return {"steps": out if traced else [], "final": final[0], "result": _repr(result, most)}
    except BaseException as error:
        return {"error": type(error).__name__ + ": " + str(error)[:200]}
"""


@dataclass(frozen=True)
class Step:
    """kind: call, line or return. changes: name to repr, after the line; gone: names deleted. line: from 1."""

    kind: str
    line: int
    depth: int
    function: str
    changes: dict[str, str]
    gone: tuple[str, ...] = ()
    value: str | None = None  # what a return gives


@dataclass(frozen=True)
class Trace:
    code: str
    call: str
    steps: tuple[Step, ...]
    final: dict[str, str]  # locals of the called function at its end, of the run that was not traced
    result: str

    def replay(self) -> dict[str, str]:
        """The called function's locals after all changes of its steps."""
        return replay(self.steps)


@dataclass(frozen=True)
class Rejected:
    reason: str  # a few words, the same for all of a kind
    detail: str = field(default="", compare=False)


def replay(steps: Iterable[Step], depth: int = 0) -> dict[str, str]:
    """Locals that the steps at ``depth`` lead to."""
    state: dict[str, str] = {}
    for step in steps:
        if step.depth == depth:
            if step.kind == "call":
                state = {}
            state.update(step.changes)
            for name in step.gone:
                state.pop(name, None)
    return state


def is_literal(text: str) -> bool:
    """Whether the text is a value written out, which reads back as itself."""
    try:
        value = ast.literal_eval(text)
        return repr(value) == text and value == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def parse_call(call: str) -> tuple[str, list[Any]]:
    """Function and arguments of ``f(1, [2])``. Raises DataError unless all arguments are literals by position."""
    try:
        node = ast.parse(call.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{call!r} is no call: {error}") from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise DataError(f"{call!r} is no call of a function by its name")
    if node.keywords:
        raise DataError(f"{call!r} has keyword arguments; give them by position")
    try:
        return node.func.id, [ast.literal_eval(a) for a in node.args]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise DataError(f"{call!r} has an argument that is no literal; inputs are values written out") from None


def trace_many(
    samples: Sequence[tuple[str, str]],
    sandbox: Sandbox,
    *,
    max_steps: int = MAX_STEPS,
    max_repr: int = MAX_REPR,
    together: int = 1,
) -> Iterator[Trace | Rejected]:
    """Traces of (code, call) pairs, or why there is none, in their order.

    together: samples that share a process. 1 for code that nobody has read: each alone, under the limits alone.
    Raises DataError for inputs that are no literals.
    """
    if together < 1:
        raise ValueError(f"together should be at least 1, not {together}")
    for _, call in samples:
        parse_call(call)
    for start in range(0, len(samples), WINDOW * together):
        window = samples[start : start + WINDOW * together]
        limits = (sandbox, max_steps, max_repr, together)
        traced = _answers(window, True, sandbox.hash_seed, *limits)
        ran = [i for i, said in enumerate(traced) if "error" not in said]
        plain = dict(zip(ran, _answers([window[i] for i in ran], False, sandbox.hash_seed + 1, *limits), strict=True))
        for i, (code, call) in enumerate(window):
            yield _judge(code, call, traced[i], plain.get(i, traced[i]))


def trace(code: str, call: str, sandbox: Sandbox, **options: Any) -> Trace | Rejected:
    return next(trace_many([(code, call)], sandbox, **options))


def _answers(
    samples: Sequence[tuple[str, str]], traced: bool, seed: int, sandbox: Sandbox, steps: int, most: int, together: int
) -> list[dict[str, Any]]:
    """What running each sample said; the same error for all of a process that did not come to say."""
    groups = [samples[i : i + together] for i in range(0, len(samples), together)]
    programs = []
    for group in groups:
        inputs = [[code, call, steps, most, traced] for code, call in group]
        code = f"{_INSIDE}\n_inputs = _json.loads({json.dumps(inputs)!r})\n"
        programs.append(Program(code, calls=("_json.dumps([_trace(*i) for i in _inputs])",)))
    out: list[dict[str, Any]] = []
    for group, result in zip(groups, sandbox.map(programs, hash_seed=seed), strict=True):
        out += _said(result, len(group))
    return out


def _said(result: Result, count: int) -> list[dict[str, Any]]:
    if not result.ok:
        return [{"error": result.status, "stopped": True}] * count
    try:
        said = json.loads(ast.literal_eval(result.values[0]))
        if len(said) == count and all(isinstance(s, dict) for s in said):
            return list(said)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        pass
    return [{"error": "nonsense", "stopped": True}] * count


def _judge(code: str, call: str, first: dict[str, Any], second: dict[str, Any]) -> Trace | Rejected:
    for said in (first, second):
        if "error" in said:
            kind = str(said["error"])
            if said.get("stopped"):
                return Rejected(f"stopped: {kind}")
            return Rejected("too long", kind) if kind.startswith("_TooMuch") else Rejected("raises", kind)
    try:
        steps = tuple(
            Step(s["kind"], s["line"], s["depth"], s["function"], s["changes"], tuple(s["gone"]), s.get("value"))
            for s in first["steps"]
        )
        found = Trace(code, call, steps, second["final"], first["result"])
    except (KeyError, TypeError):
        return Rejected("stopped: nonsense")
    if first["result"] != second["result"]:
        return Rejected("not deterministic", f"{first['result'][:80]} and {second['result'][:80]}")
    if not steps or found.final is None:
        return Rejected("not traced", "the call ran no line of the program")
    if found.replay() != found.final:
        return Rejected("does not replay")
    if not is_literal(found.result):
        return Rejected("no literal result", found.result[:80])
    return found
