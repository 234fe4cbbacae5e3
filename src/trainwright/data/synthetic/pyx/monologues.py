"""What a trace says, in words: forward (what each line does), backward (what has to hold before it), scratchpad.

    forward    [L3] the loop goes on with x = 5.   [L4] x > k holds.   [L5] total = 5.   ...   [L7] returns 12.
    backward   [L7] returns 12, so total = 12 here.   [L5] leaves total = 12; before it total = 5 and x = 7. ...
    scratchpad the code again, each line with the states it left: [STATE] {"total": "0"} [/STATE]

All of it is written by rules from recorded states, so none of it can be wrong about them. The paper has a model write
forward and backward monologues and keeps those whose answer is right; ``builder`` takes such a generator as well, and
puts its answers through the same filter. The scratchpad is the paper's baseline: of a line's states the first two and
the last are kept.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from typing import Literal

from trainwright.data.synthetic.pyx.tracer import Step, Trace

Style = Literal["words", "brief"]


def label_lines(code: str) -> str:
    """The code with ``# [Lx]`` behind each line that is not blank. A line inside a text of several lines gets none."""
    inside = {
        line
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or node.lineno) > node.lineno
        for line in range(node.lineno, node.end_lineno or node.lineno)
    }
    lines = code.rstrip("\n").split("\n")
    return "\n".join(
        f"{line}  # [L{i}]" if line.strip() and i not in inside and not line.rstrip().endswith("\\") else line
        for i, line in enumerate(lines, 1)
    )


def forward(trace: Trace, style: Style = "words") -> str:
    """The execution told line by line, without the answer behind it."""
    told = _Narrator(trace, style)
    return "\n".join(said for i in range(len(trace.steps)) if (said := told.say(i)))


def backward(trace: Trace, style: Style = "words", most: int = 60) -> str:
    """From the output to an input: what each line left, and what the one before had to leave, of the called function.

    Of very long executions the first and the last ``most`` steps are told.
    """
    steps = [s for s in trace.steps if s.depth == 0 and s.kind != "call"]
    state = dict(next(s.changes for s in trace.steps if s.kind == "call"))
    start = dict(state)
    before: list[dict[str, str]] = []
    for step in steps:
        before.append(dict(state))
        state.update(step.changes)
        for name in step.gone:
            state.pop(name, None)
    source = _Source(trace.code)
    out = []
    for i in range(len(steps) - 1, -1, -1):
        step = steps[i]
        if step.kind == "return":
            used = {k: v for k, v in before[i].items() if k in source.reads(step.line)}
            end = f", so {_values(used)} here" if used else ""
            brief = f"[L{step.line}] {step.value} <- {_values(used)}" if used else f"[L{step.line}] {step.value}"
            out.append(brief if style == "brief" else f"[L{step.line}] The call has to return {step.value}{end}.")
            continue
        if not step.changes and not step.gone:
            continue
        names = [*step.changes, *step.gone, *sorted(source.reads(step.line))]
        needed = {k: before[i][k] for k in dict.fromkeys(names) if k in before[i]}
        left = _values(step.changes) or f"{', '.join(step.gone)} deleted"
        if style == "brief":
            out.append(f"[L{step.line}] {left} <- {_values(needed)}".rstrip(" <-"))
        else:
            had = f" Before it, {_values(needed)}." if needed else ""
            out.append(f"[L{step.line}] {source.text(step.line)} leaves {left}.{had}")
    if len(out) > 2 * most:
        out = [*out[:most], "...", *out[-most:]]
    out.append(
        _values(start) if style == "brief" else f"So the call can begin with {_values(start) or 'no arguments'}."
    )
    return "\n".join(out)


def scratchpad(trace: Trace) -> str:
    """The code with the states of each line behind it; of more than three the first two and the last."""
    states: dict[int, list[str]] = {}
    for step in trace.steps:
        if step.kind == "call" and step.depth == 0:
            states.setdefault(step.line, []).append(f"[INPUT] {json.dumps(step.changes)} [/INPUT]")
        elif step.kind == "line" and step.changes:
            states.setdefault(step.line, []).append(f"[STATE] {json.dumps(step.changes)} [/STATE]")
    last = next(s for s in reversed(trace.steps) if s.kind == "return" and s.depth == 0)
    lines = trace.code.rstrip("\n").split("\n")
    for number, found in states.items():
        kept = found if len(found) <= 3 else [*found[:2], "...", found[-1]]
        lines[number - 1] += "  # " + " ".join(kept)
    mark = "" if "  # [" in lines[last.line - 1] else "  #"
    lines[last.line - 1] += f"{mark} [OUTPUT] {trace.result} [/OUTPUT]"
    return "\n".join(lines)


def _values(changes: dict[str, str]) -> str:
    return " and ".join(f"{k} = {v}" for k, v in changes.items())


class _Source:
    """The statement that begins or lies on a line."""

    def __init__(self, code: str):
        self.lines = code.split("\n")
        self.statements: dict[int, ast.stmt] = {}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.stmt):
                # A compound statement owns its head alone; a simple one all of its lines.
                body = getattr(node, "body", None)
                end = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
                for line in range(node.lineno, max(end, node.lineno) + 1):
                    if not isinstance(body, list) or line == node.lineno or line not in self.statements:
                        self.statements[line] = node

    def at(self, line: int) -> ast.stmt | None:
        return self.statements.get(line)

    def text(self, line: int) -> str:
        return self.lines[line - 1].strip()

    def reads(self, line: int) -> set[str]:
        """Names that the statement's head reads."""
        node = self.at(line)
        if node is None:
            return set()
        parts: Iterable[ast.AST] = [node]
        if isinstance(node, ast.If | ast.While):
            parts = [node.test]
        elif isinstance(node, ast.For):
            parts = [node.iter]
        elif isinstance(getattr(node, "body", None), list):
            parts = []
        found = {n.id for p in parts for n in ast.walk(p) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        return found


class _Narrator:
    def __init__(self, trace: Trace, style: Style):
        self.trace, self.style, self.source = trace, style, _Source(trace.code)

    def _entered(self, i: int, body: Sequence[ast.stmt]) -> bool | None:
        """Whether the next step of the same call lies in the body; None where there is none."""
        step = self.trace.steps[i]
        for later in self.trace.steps[i + 1 :]:
            if later.depth < step.depth:
                return None
            if later.depth == step.depth and later.kind == "line":
                return body[0].lineno <= later.line <= (body[-1].end_lineno or body[-1].lineno)
            if later.depth == step.depth and later.kind == "return":
                # The head may be left by falling off the end of the function.
                return None if body[0].lineno == step.line else False
        return None

    def say(self, i: int) -> str:
        step = self.trace.steps[i]
        words = self.style == "words"
        label = f"[L{step.line}] "
        if step.kind == "call":
            what = _values(step.changes)
            if words:
                return f"{label}{step.function} is called" + (f" with {what}." if what else ".")
            return f"{label}{what or step.function}"
        if step.kind == "return":
            return f"{label}{step.function} returns {step.value}." if words else f"{label}return {step.value}"
        node = self.source.at(step.line)
        said = self._head(i, step, node)
        if said is not None:
            return label + said
        what = _values(step.changes)
        if step.gone:
            what = " and ".join(x for x in (what, f"{', '.join(step.gone)} deleted") if x)
        if isinstance(node, ast.Return):
            return ""  # its return step says it
        if not words:
            return f"{label}{what}" if what else ""
        text = self.source.text(step.line)
        return f"{label}{text} gives {what}." if what else f"{label}{text} changes nothing here."

    def _head(self, i: int, step: Step, node: ast.stmt | None) -> str | None:
        """What the head of a loop or a condition decides; None for other lines."""
        words = self.style == "words"
        what = _values(step.changes)
        if isinstance(node, ast.If | ast.While) and step.line == node.lineno:
            entered = self._entered(i, node.body)
            if entered is None:
                return None
            test = ast.unparse(node.test)
            if words:
                return f"{test} {'holds' if entered else 'does not hold'}." + (f" {what}." if what else "")
            return f"{test}: {entered}" + (f", {what}" if what else "")
        if isinstance(node, ast.For) and step.line == node.lineno:
            if self._entered(i, node.body):
                what = what or f"{ast.unparse(node.target)} as it was"
                return f"The loop goes on with {what}." if words else what
            return "The loop ends." if words else "end"
        return None
