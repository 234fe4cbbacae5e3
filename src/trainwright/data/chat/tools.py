"""Whether a chat template writes the messages, the tools and the tool calls that it is given.

One that knows no tools, or not the role of a message, leaves them out without a word: an answer that calls a tool would
be trained on as an empty one, an answer to a tool's result without that result. That the text holds a tool's name
proves nothing, for a message may say it. So what messages say, names, and the values among the arguments, are changed
for marks that stand nowhere else, and each mark has to be in the text of the changed chat. A mark that is not (a
template may treat some names in a way of its own) is tried alone: then the text has to change.

What is left out of an assistant's message is no error, for templates do so by design: the thoughts of earlier turns, or
what is said beside a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from trainwright.core.errors import DataError, ModelError
from trainwright.data.chat.conversation import Conversation
from trainwright.data.chat.template import ChatTemplate

SHOWN = 3  # names that an error lists
NUMBER = 7_310_000_000  # stands for the first number among the arguments
Path = tuple[str | int, ...]


MESSAGES, TOOLS, CALLS, ARGUMENTS = "messages", "the tools", "tool calls", "arguments of tool calls"
ASIDE = "what an assistant's message holds"  # may be left out
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class Probe(NamedTuple):
    kind: str
    name: str  # for a person
    path: Path  # within {"messages", "tools"}
    value: Any


def check_written(talk: Conversation, template: ChatTemplate, text: str) -> bool:
    """Whether ``text``, as ``template`` wrote ``talk``, has all of every assistant's message.

    Raises DataError where it leaves out a message of another role, a tool, a call or an argument.
    """
    probes = list(_probes(talk))
    if not probes:
        return True
    stem = "probe"
    while stem in text.lower():
        stem += "q"
    marks = [
        NUMBER + k if isinstance(p.value, int | float) and not isinstance(p.value, bool) else f"{stem}{k}z"
        for k, p in enumerate(probes)
    ]

    def changed(which: Mapping[Path, Any]) -> str | None:
        chat = _copied({"messages": talk.messages, "tools": talk.tools})
        for path, value in which.items():
            _put(chat, path, value)
        try:
            return template.render(chat["messages"], chat["tools"])
        except ModelError:
            return None  # it reads what was changed, else it would not refuse it

    every = (changed({p.path: m for p, m in zip(probes, marks, strict=True)}) or "").lower()
    lost: list[Probe] = []
    aside = True
    for probe, mark in zip(probes, marks, strict=True):
        if str(mark) in every and str(mark) not in text:
            continue
        if probe.kind == ASIDE and not aside:
            continue
        if changed({probe.path: not probe.value if isinstance(probe.value, bool) else mark}) == text:
            if probe.kind == ASIDE:
                aside = False
                continue
            lost.append(probe)
            if len(lost) == SHOWN:
                break
    if lost:
        names = ", ".join(dict.fromkeys(p.name for p in lost if p.kind == lost[0].kind))
        known = "their roles" if lost[0].kind == MESSAGES else "tools"
        raise DataError(
            f"the chat template leaves out {lost[0].kind} ({names}); set tokenizer.chat_template to one that knows "
            f"{known}"
        )
    return aside


def _probes(talk: Conversation) -> Iterator[Probe]:
    for i, message in enumerate(talk.messages):
        said: Path = ("messages", i, "content")
        if message["role"] != "assistant":
            if message["content"].strip():
                yield Probe(MESSAGES, f"{message['role']} at {i}", said, message["content"])
            continue
        for key in ("content", *THOUGHTS):
            if isinstance(message.get(key), str) and message[key].strip():
                yield Probe(ASIDE, key, ("messages", i, key), message[key])
    for i, tool in enumerate(talk.tools or []):
        within: Path = ("function",) if isinstance(tool.get("function"), Mapping) else ()
        name = (tool["function"] if within else tool).get("name")
        if isinstance(name, str):
            yield Probe(TOOLS, name, ("tools", i, *within, "name"), name)
    calls = [
        (("messages", i, "tool_calls", j, "function"), call["function"])
        for i, message in enumerate(talk.messages)
        for j, call in enumerate(message.get("tool_calls", []))
    ]
    for path, function in calls:
        yield Probe(CALLS, function["name"], (*path, "name"), function["name"])
    for path, function in calls:
        for at, value in _leaves(function.get("arguments")):
            name = ".".join(str(part) for part in (function["name"], *at))
            yield Probe(ARGUMENTS, name, (*path, "arguments", *at), value)


def _leaves(value: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(inner, (*at, key))
    elif isinstance(value, str | int | float):
        yield at, value


def _copied(value: Any) -> Any:
    """Two calls that are one object become two, unlike with copy.deepcopy."""
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list | tuple) else value


def _put(chat: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        chat = chat[part]
    chat[path[-1]] = value
