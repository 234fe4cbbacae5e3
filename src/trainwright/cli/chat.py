"""Messages to token ids by a tokenizer's chat template, and a conversation on the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from trainwright.core.errors import ModelError
from trainwright.data.tokenizers.base import Tokenizer

Message = dict[str, str]


def render(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """The text of ``messages`` by the tokenizer's Jinja template.

    Raises ModelError where it has none or refuses them.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if not tokenizer.chat_template:
        raise ModelError(
            "its tokenizer has no chat template; give a text by --prompt, or train with tokenizer.chat_template set"
        )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    special = {i: t for t, i in special_tokens(tokenizer).items()}
    try:
        return environment.from_string(tokenizer.chat_template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=special.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else "",
            eos_token=special.get(tokenizer.eos_id, ""),
        )
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template refuses these messages: {error}") from None


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Text of every special token -> its id."""
    ids = (tokenizer.token_byte_lengths() == 0).nonzero()[0]
    texts = {tokenizer.decode([int(i)], skip_special=False): int(i) for i in ids}
    return {text: i for text, i in texts.items() if text}


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a rendered chat: special tokens are those of the vocabulary, what lies between is plain text."""
    special = special_tokens(tokenizer)
    if not special:
        return list(tokenizer.encode(text))
    pattern = "|".join(re.escape(t) for t in sorted(special, key=len, reverse=True))
    ids: list[int] = []
    for part in re.split(f"({pattern})", text):
        if part in special:
            ids.append(special[part])
        elif part:
            ids += tokenizer.encode(part)
    return ids


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that the template puts behind an answer (``<|im_end|>``, ...), where it is not EOS."""
    mark = "\x02answer\x03"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
    behind = render(tokenizer, messages, add_generation_prompt=False).partition(mark)[2]
    for token in encode(tokenizer, behind)[:1]:
        if token in special_tokens(tokenizer).values() and token != tokenizer.eos_id:
            return token
    return None


def converse(
    tokenizer: Tokenizer,
    answer: Callable[[list[int]], Iterable[str]],
    read: Callable[[], str],
    write: Callable[[str], Any],
    system: str | None = None,
) -> list[Message]:
    """Read a message, write the pieces of the answer as they come, until an empty message or the end of the input.

    ``answer`` goes from the ids of the whole chat to pieces of text. Returns the conversation.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            said = read()
        except EOFError:
            return messages
        if not said.strip():
            return messages
        messages.append({"role": "user", "content": said})
        pieces = []
        for piece in answer(encode(tokenizer, render(tokenizer, messages))):
            write(piece)
            pieces.append(piece)
        write("\n")
        messages.append({"role": "assistant", "content": "".join(pieces).strip()})
