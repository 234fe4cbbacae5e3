"""Rows of PyX: code from a description, forward and backward monologues, and debugging; one kind a row.

A row is ``{"nl" | "fwd_mnl" | "bwd_mnl" | "fault": question, "response": answer}`` with exactly one question that is
not empty (the keys of the paper's release, debugging beside them). ``to_pair`` makes ``{"prompt", "completion"}`` of
it, which the sources ``pyx`` and ``chat`` train on: loss on the response alone, and on its end.

Answers stand between [ANSWER] and [/ANSWER], refined code between [Refined] and [/Refined]. In the public code one
prompt opens with a broken ``PYTHON]``; here every tag that opens is closed, which ``check_tags`` sees to.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.synthetic.pyx.monologues import Style, backward, forward, label_lines, scratchpad
from trainwright.data.synthetic.pyx.tracer import Trace, parse_call

Kind = Literal["nl", "forward", "backward", "debug"]
Reasoning = Literal["monologue", "scratchpad", "answer"]
KEYS: dict[str, Kind] = {"nl": "nl", "fwd_mnl": "forward", "bwd_mnl": "backward", "fault": "debug"}
_KEY_OF = {kind: key for key, kind in KEYS.items()}
_TAG = re.compile(r"\[(/?)(PYTHON|ANSWER|MONOLOGUE|Refined|INPUT|STATE|OUTPUT)\]")

PROMPTS: dict[str, str] = {
    "nl": "Write Python code that does what the description asks for.\n\n{question}\n\n",
    "forward": "Simulate the execution: give the output that completes the assertion.\n{question}\n",
    "backward": "Deduce an input: give a call whose output completes the assertion.\n{question}\n",
    "debug": "Debug the code: simulate the failing test, find the cause, then write the refined code.\n{question}\n",
}


@dataclass(frozen=True)
class Row:
    kind: Kind
    question: str
    response: str

    def to_json(self) -> dict[str, str]:
        row = dict.fromkeys(KEYS, "")
        row[_KEY_OF[self.kind]] = self.question
        return {**row, "response": self.response}

    def to_pair(self) -> dict[str, str]:
        return {"prompt": PROMPTS[self.kind].format_map({"question": self.question}), "completion": self.response}


def parse_row(row: Any) -> Row:
    """A row from its JSON. Raises DataError unless exactly one kind is there, with a response."""
    if not isinstance(row, Mapping):
        raise DataError(f"expected an object, got {type(row).__name__}")
    unknown = set(row) - set(KEYS) - {"response", "id"}
    filled = [k for k in KEYS if row.get(k)]
    if any(not isinstance(row[k], str) for k in filled):
        raise DataError(f"{', '.join(filled)} should be text")
    if len(filled) != 1:
        what = f"{len(filled)} kinds ({', '.join(filled)})" if filled else "no kind"
        raise DataError(
            f"has {what}; exactly one of {', '.join(KEYS)} holds the question and the others are empty"
            + (f" (unknown keys: {', '.join(sorted(map(str, unknown)))})" if unknown else "")
        )
    response = row.get("response")
    if not isinstance(response, str) or not response.strip():
        raise DataError("has no response")
    return Row(KEYS[filled[0]], row[filled[0]], response)


def check_tags(text: str) -> None:
    """Raises DataError for a tag that is not closed, or closes nothing."""
    open_tags: list[str] = []
    for match in _TAG.finditer(text):
        if not match[1]:
            open_tags.append(match[2])
        elif not open_tags or open_tags.pop() != match[2]:
            raise DataError(f"[/{match[2]}] closes nothing")
    if open_tags:
        raise DataError(f"[{open_tags[-1]}] is not closed")


def _response(trace: Trace, reasoning: Reasoning, told: str, answer: str) -> str:
    if reasoning not in ("monologue", "scratchpad", "answer"):
        raise ConfigError("should be monologue, scratchpad or answer", key="reasoning", value=reasoning)
    if reasoning == "scratchpad":
        told = scratchpad(trace)
    before = f"[MONOLOGUE]\n{told}\n[/MONOLOGUE]\n" if reasoning != "answer" else ""
    return f"{before}[ANSWER]{answer}[/ANSWER]\n"


def forward_row(trace: Trace, reasoning: Reasoning = "monologue", style: Style = "words") -> Row:
    """Code and ``assert f(x) == ??``; the execution told, then the output."""
    question = f"[PYTHON]\n{label_lines(trace.code)}\nassert {trace.call} == ??\n[/PYTHON]"
    told = "" if reasoning != "monologue" else forward(trace, style)
    return Row("forward", question, _response(trace, reasoning, told, trace.result))


def backward_row(trace: Trace, reasoning: Reasoning = "monologue", style: Style = "words") -> Row:
    """Code and ``assert f(??) == output``; what must hold told from the end, then a call."""
    function, _ = parse_call(trace.call)
    question = f"[PYTHON]\n{label_lines(trace.code)}\nassert {function}(??) == {trace.result}\n[/PYTHON]"
    told = "" if reasoning != "monologue" else backward(trace, style)
    return Row("backward", question, _response(trace, reasoning, told, trace.call))


def nl_row(description: str, code: str) -> Row:
    return Row("nl", description.strip(), f"```python\n{code.strip()}\n```\n")


def debug_row(fixed: str, trace: Trace, expected: str, description: str = "", style: Style = "words") -> Row:
    """Buggy code (that of ``trace``) with a test that it fails; what it does told, the cause, and the refined code."""
    about = f"{description.strip()}\n" if description.strip() else ""
    test = f"assert {trace.call} == {expected}"
    question = f"{about}[PYTHON]\n{label_lines(trace.code)}\n[/PYTHON]\nIt fails: {test}"
    told = (
        f"[MONOLOGUE]\n{forward(trace, style)}\nThe test wants {expected}, but the code gives {trace.result}.\n"
        f"{_cause(trace.code, fixed)}[/MONOLOGUE]\n"
    )
    return Row("debug", question, f"{told}[Refined]\n{fixed.strip()}\n[/Refined]\n")


def _cause(buggy: str, fixed: str) -> str:
    """The first line that differs, named."""
    old, new = buggy.strip().split("\n"), fixed.strip().split("\n")
    for number, (a, b) in enumerate(zip(old, new, strict=False), 1):
        if a != b:
            return f"The cause is [L{number}]: {a.strip()} should be {b.strip()}.\n"
    return ""


def answer_of(response: str) -> str | None:
    """What stands between the last [ANSWER] and [/ANSWER]; None where that is cut or missing."""
    found = re.findall(r"\[ANSWER\](.*?)\[/ANSWER\]", response, re.S)
    return found[-1].strip() if found else None


def refined_of(response: str) -> str | None:
    found = re.findall(r"\[Refined\]\n?(.*?)\[/Refined\]", response, re.S)
    return found[-1].rstrip() + "\n" if found else None


def code_of_question(question: str) -> str:
    """The program of a question without its labels and its assertion. Raises DataError where there is none."""
    found = re.search(r"\[PYTHON\]\n(.*?)\n?\[/PYTHON\]", question, re.S)
    if found is None:
        raise DataError("the question holds no [PYTHON] ... [/PYTHON]")
    lines = [re.sub(r"  # \[L\d+\]$", "", line) for line in found[1].split("\n")]
    return "\n".join(line for line in lines if not (line.startswith("assert ") and "??" in line)) + "\n"


def assertion_of(question: str) -> tuple[str, str]:
    """Left and right side of the question's ``assert ... == ...``, one of which holds ``??``."""
    found = re.search(r"^assert (.*)$", question, re.M)
    if found is None:
        raise DataError("the question holds no assertion")
    text = found[1].replace("??", "__unknown__")
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise DataError(f"the assertion does not parse: {error}") from None
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        raise DataError("the assertion should be one ==")
    left, right = (ast.unparse(n).replace("__unknown__", "??") for n in (node.left, node.comparators[0]))
    return left, right
