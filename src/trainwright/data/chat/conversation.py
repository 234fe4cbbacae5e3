"""Rows of fine-tuning data, in the forms that people have them, to messages.

| format             | keys of a row                                                                                   |
|--------------------|-------------------------------------------------------------------------------------------------|
| messages           | ``messages``: a list of ``{role, content, tool_calls?, weight?}``; ``tools?``                   |
| sharegpt           | ``conversations``: a list of ``{from, value}`` (or of messages); ``system?``, ``tools?``        |
| alpaca             | ``instruction``, ``output`` (or ``response``); ``input?`` (or ``context``), ``system?``,        |
|                    | ``history?``: a list of ``[question, answer]``                                                  |
| prompt_completion  | ``prompt`` and ``completion``: both texts, or both lists of messages; ``tools?``                |
| preference         | ``chosen`` and ``rejected``, texts or messages; ``prompt?``; ``tools?``                         |

Messages keep every key of theirs, for the template may want it (``reasoning_content``, ``tool_call_id``, ...). Only a
key whose value is null is left out, but null within the arguments of a call or the parameters of a tool is a value as
any other. Rows of columnar files, where null is how an absent key is spelt, come without it. Arguments of tool calls
that are JSON text become objects, as templates expect them. ``weight`` of an assistant's message multiplies the loss
on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.core.errors import DataError, nearest

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference"]
Message = dict[str, Any]

# Keys that tell a format, each group any one of its names.
KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations", "conversation"),),
    "alpaca": (("instruction",), ("output", "response")),
    "prompt_completion": (("prompt",), ("completion",)),
    "preference": (("chosen",), ("rejected",)),
}
ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}


@dataclass
class Conversation:
    """Messages for a chat template. ``weights[i]`` multiplies the loss on message i; only an assistant's is read."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    weights: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = self.weights or [1.0] * len(self.messages)

    @property
    def answers(self) -> list[int]:
        """Numbers of the assistant's messages."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]

    def is_empty(self, i: int) -> bool:
        """Whether message ``i`` says nothing, calls nothing and thinks nothing."""
        m = self.messages[i]
        return not (m["content"].strip() or m.get("tool_calls") or m.get("reasoning_content"))

    @property
    def text(self) -> str:
        """What a tokenizer may be trained on: all that was said, without any template."""
        parts = []
        for m in self.messages:
            parts.append(m["content"])
            if m.get("tool_calls"):
                parts.append(json.dumps(m["tool_calls"], ensure_ascii=False))
        return "\n".join(p for p in parts if p)


@dataclass
class TextPair:
    """A prompt and its completion as plain text, without a template."""

    prompt: str
    completion: str

    @property
    def text(self) -> str:
        return self.prompt + self.completion


@dataclass
class Preference:
    """Two answers to one prompt.

    ``notes`` says how its prompt was found where the row left that open: prompt_repeated (both answers began with it
    once more, which was taken away) or prompt_guessed (there is none, and no mark such as ``Assistant:``).
    """

    chosen: Conversation | TextPair
    rejected: Conversation | TextPair
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.chosen.text


Example = Conversation | TextPair | Preference


def detect(row: Mapping[str, Any]) -> str:
    """The format of a row, by its keys. Raises DataError where none fits, or more than one."""
    present = {k for k, v in row.items() if v is not None}
    found = [name for name, groups in KEYS.items() if all(present & set(group) for group in groups)]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"has the keys of {' and of '.join(found)}; say which by format, e.g. format: {found[0]}")
    known = "; ".join(f"{name}: {', '.join('|'.join(g) for g in groups)}" for name, groups in KEYS.items())
    hint = " (plain text is read by the source jsonl)" if "text" in present else ""
    raise DataError(f"its keys {', '.join(sorted(present)) or '(none)'} are those of no format{hint}; known: {known}")


def parse_row(row: Any, format: Format = "auto") -> tuple[str, Example]:
    """The row's format and what it holds. Raises DataError that says what is wrong with it."""
    if not isinstance(row, Mapping):
        raise DataError(f"expected an object, got {type(row).__name__}")
    name = detect(row) if format == "auto" else format
    for group in KEYS[name]:
        if not any(row.get(k) is not None for k in group):
            there = ", ".join(str(k) for k in row) or "(none)"
            raise DataError(f"format {name} needs the key {' or '.join(group)}; there are {there}")
    parsed = _PARSERS[name](row)
    for part in (parsed.chosen, parsed.rejected) if isinstance(parsed, Preference) else (parsed,):
        _check(part)
    return name, parsed


def _check(example: Example) -> None:
    if isinstance(example, TextPair):
        if not example.completion:
            raise DataError("has an empty completion")
        return
    if isinstance(example, Conversation):
        if not example.messages:
            raise DataError("has no message")
        if not example.answers:
            raise DataError("has no assistant turn, so there is nothing to learn from it")
        if all(example.is_empty(i) for i in example.answers):
            raise DataError("has only empty assistant turns")


def _first(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[n] for n in names if row.get(n) is not None), None)


def _text(row: Mapping[str, Any], *names: str, default: str | None = None) -> str:
    value = _first(row, *names)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise DataError(f"{names[0]} should be text, got {type(value).__name__}")
    return value


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"tools is not JSON: {error}") from None
    if not tools:
        return None
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, Sequence) or not all(isinstance(t, Mapping) for t in tools):
        raise DataError("tools should be a list of objects")
    return [without_null(t, _VALUES) for t in tools]


_VALUES = ("arguments", "parameters")  # what they hold is as it was said


def without_null(value: Any, but: tuple[str, ...] = ()) -> Any:
    """Objects without the keys whose value is null, save within those named ``but``.

    Columnar files give every object all keys that any has; the absent ones are null.
    """
    if isinstance(value, Mapping):
        return {k: v if k in but else without_null(v, but) for k, v in value.items() if v is not None}
    return [without_null(v, but) for v in value] if isinstance(value, list | tuple) else value


def _conversation(messages: Any, row: Mapping[str, Any], what: str = "messages") -> Conversation:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise DataError(f"{what} should be a list of messages, got {type(messages).__name__}")
    out, weights = [], []
    for i, entry in enumerate(messages):
        try:
            message, weight = _message(entry)
        except DataError as error:
            raise DataError(f"{what}.{i}: {error}") from None
        out.append(message)
        weights.append(weight)
    return Conversation(out, _tools(row), weights)


def _message(entry: Any) -> tuple[Message, float]:
    if not isinstance(entry, Mapping):
        raise DataError(f"expected an object with role and content, got {type(entry).__name__}")
    entry = {k: v for k, v in entry.items() if v is not None}
    said = _first(entry, "role", "from")
    role = ROLES.get(str(said).lower())
    if role is None:
        raise DataError(f"unknown role {said!r}; {nearest(str(said).lower(), ROLES)}" if said else "has no role")
    message = {k: v for k, v in entry.items() if k not in ("role", "from", "content", "value", "weight")}
    content = _content(_first(entry, "content", "value"))
    if role == "function_call":
        role, message["tool_calls"], content = "assistant", _json_calls(content), ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(c) for c in _as_list(message["tool_calls"])]
    else:
        message.pop("tool_calls", None)
    if "content" not in entry and "value" not in entry and not message.get("tool_calls"):
        raise DataError("has neither content nor tool_calls")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise DataError(f"weight should be a number of at least 0, got {weight!r}")
    return {"role": role, "content": content, **message}, float(weight)


def _content(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = []
        for part in value:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"content has a part of type {kind!r}; only text can be trained on")
            parts.append(part["text"])
        return "".join(parts)
    raise DataError(f"content should be text, got {type(value).__name__}")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _json_calls(text: str) -> list[Any]:
    try:
        return _as_list(json.loads(text))
    except ValueError as error:
        raise DataError(f"a function call should be JSON with name and arguments: {error}") from None


def _call(call: Any) -> dict[str, Any]:
    """As OpenAI and transformers write it: ``{"type": "function", "function": {"name", "arguments"}}``."""
    if not isinstance(call, Mapping):
        raise DataError(f"a tool call should be an object, got {type(call).__name__}")
    call = without_null(call, _VALUES)
    inner = call["function"] if isinstance(call.get("function"), Mapping) else call
    if not isinstance(inner.get("name"), str):
        raise DataError("a tool call has no name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"the arguments of tool call {inner['name']!r} are not JSON: {error}") from None
    function = {**inner, "arguments": arguments}
    return {**call, "type": "function", "function": function} if inner is not call else {
        "type": "function", "function": function
    }  # fmt: skip


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    system = _text(row, "system", default="")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _messages_row(row: Mapping[str, Any]) -> Conversation:
    return _conversation(row["messages"], row)


def _sharegpt_row(row: Mapping[str, Any]) -> Conversation:
    talk = _conversation(_first(row, "conversations", "conversation"), row, "conversations")
    if talk.messages and talk.messages[0]["role"] != "system":
        messages = _with_system(row, talk.messages)
        talk = Conversation(messages, talk.tools, [1.0] * (len(messages) - len(talk.messages)) + talk.weights)
    return talk


def _alpaca_row(row: Mapping[str, Any]) -> Conversation:
    asked, more = _text(row, "instruction"), _text(row, "input", "context", default="")
    messages: list[Message] = []
    for i, turn in enumerate(row.get("history") or []):
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(t, str) for t in turn):
            raise DataError(f"history.{i} should be a pair of texts, a question and its answer")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append({"role": "user", "content": f"{asked}\n\n{more}" if more else asked})
    messages.append({"role": "assistant", "content": _text(row, "output", "response")})
    return Conversation(_with_system(row, messages))


def _prompt_completion_row(row: Mapping[str, Any]) -> Conversation | TextPair:
    return _joined(row, row["prompt"], "completion")


def _joined(row: Mapping[str, Any], prompt: Any, key: str) -> Conversation | TextPair:
    answer = row[key]
    if isinstance(prompt, str) and isinstance(answer, str):
        return TextPair(prompt, answer)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    behind = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    first, last = _conversation(before, row, "prompt"), _conversation(behind, row, key)
    # What was said before is the prompt, also where it holds answers.
    return Conversation(first.messages + last.messages, first.tools, [0.0] * len(first.messages) + last.weights)


def _preference_row(row: Mapping[str, Any]) -> Preference:
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
        return _text_preference(prompt, chosen, rejected)
    if prompt is None:
        n = _shared(chosen, rejected)
        sides = [_joined({**row, key: row[key][n:]}, row[key][:n], key) for key in ("chosen", "rejected")]
    else:
        sides = [_behind_prompt(row, prompt, key) for key in ("chosen", "rejected")]
    one, other = sides
    if not isinstance(one, Conversation) or not isinstance(other, Conversation):
        raise DataError("chosen and rejected should both be texts or both be lists of messages")
    _check_one_prompt(one.messages, other.messages)
    return Preference(one, other)


def _behind_prompt(row: Mapping[str, Any], prompt: Any, key: str) -> Conversation | TextPair:
    if not isinstance(row[key], list) or not _begins_with(row[key], prompt):
        return _joined(row, prompt, key)
    # Many sets repeat the prompt in both answers.
    talk = _conversation(row[key], row, key)
    known = len(talk.messages) - _turns_behind(row[key], prompt)
    return Conversation(talk.messages, talk.tools, [0.0] * known + talk.weights[known:])


def _shared(chosen: Any, rejected: Any) -> int:
    """How many messages both begin with, the last one of either not counted: it is an answer."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise DataError("chosen and rejected should both be texts or both be lists of messages")
    return max(min(_alike(chosen, rejected), len(chosen) - 1, len(rejected) - 1), 0)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _check_one_prompt(chosen: list[Message], rejected: list[Message]) -> None:
    n = _alike(chosen, rejected)
    if n == len(chosen) == len(rejected):
        return  # the same answer twice, which is counted where pairs are made
    if n in (len(chosen), len(rejected)):
        short, long = ("chosen", "rejected") if n == len(chosen) else ("rejected", "chosen")
        raise DataError(f"{short} is how {long} begins, so they are no two answers to one prompt")
    if {chosen[n]["role"], rejected[n]["role"]} != {"assistant"}:
        raise DataError(
            f"chosen and rejected part at message {n}, which is not the assistant's: they answer different prompts"
        )


# Where an answer begins in a text, the surest kind first. A line's end behind a mark belongs to it, a space does not:
# most tokens begin with one.
_MARKS = tuple(
    re.compile(rf"(?:{mark})(?:[ \t]*\n+)?", re.MULTILINE)
    for mark in (
        r"(?:^|(?<=\s))(?:#+ ?)?(?:Assistant|ASSISTANT|AI|Bot|GPT) ?:|^(?:assistant|ai|bot|gpt|model) ?:|\[/INST\]",
        r"<\|assistant\|>|<\|im_start\|>assistant|<\|start_header_id\|>assistant<\|end_header_id\|>",
        r"^(?:#+ ?)?(?:Answer|ANSWER|Response|RESPONSE|Output|OUTPUT) ?:",
        r"(?:^|(?<=\s))Q ?:(?s:.*)\sA ?:",
    )
)
_ASKED = re.compile(r"^(?:#+ ?)?(?:Human|HUMAN|User|USER) ?:", re.MULTILINE)


def _text_preference(prompt: str | None, chosen: str, rejected: str) -> Preference:
    """Where a prompt is given it ends there; else behind the last mark of an answer that both texts begin with, or,
    without such a mark, before the first word that differs."""
    notes: tuple[str, ...] = ()
    if prompt is None:
        both = chosen[: _alike(chosen, rejected)]
        n = next((found[-1].end() for mark in _MARKS if (found := list(mark.finditer(both)))), None)
        if n is not None and _ASKED.search(both, n):
            raise DataError("chosen and rejected part within what the user says: they answer different prompts")
        if n is None:
            # At a word's end: else "yes" and "yet" would share the prompt "ye".
            n = max(both.rfind(" "), both.rfind("\n") + 1, 0)
            notes = ("prompt_guessed",) if n else ()
        prompt, chosen, rejected = both[:n], chosen[n:], rejected[n:]
    elif prompt and all(_repeats(side, prompt) for side in (chosen, rejected)):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        notes = ("prompt_repeated",)
    return Preference(TextPair(prompt, chosen), TextPair(prompt, rejected), notes)


def _repeats(answer: str, prompt: str) -> bool:
    """Whether ``answer`` begins with ``prompt`` and not only with letters that are also the beginning of a word."""
    joint = prompt[-1] + answer[len(prompt) : len(prompt) + 1]
    return answer.startswith(prompt) and not (joint.isascii() and joint.isalnum() and len(joint) == 2)


def _begins_with(messages: list[Any], prompt: Any) -> bool:
    if isinstance(prompt, str):
        return len(messages) > 1 and any(
            isinstance(m, Mapping) and _first(m, "content", "value") == prompt for m in messages[:-1]
        )
    return isinstance(prompt, list) and messages[: len(prompt)] == prompt


def _turns_behind(messages: list[Any], prompt: Any) -> int:
    if isinstance(prompt, str):
        at = max(i for i, m in enumerate(messages[:-1]) if _first(m, "content", "value") == prompt)
        return len(messages) - at - 1
    return len(messages) - len(prompt)


_PARSERS = {
    "messages": _messages_row,
    "sharegpt": _sharegpt_row,
    "alpaca": _alpaca_row,
    "prompt_completion": _prompt_completion_row,
    "preference": _preference_row,
}
