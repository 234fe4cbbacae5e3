"""Messages to token ids by a tokenizer's chat template, and a conversation on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainwright.data.chat.template import ChatTemplate, special_tokens
from trainwright.data.tokenizers.base import Tokenizer

__all__ = ["converse", "encode", "end_of_turn", "render", "special_tokens"]

Message = dict[str, str]


def render(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """The text of ``messages`` by the tokenizer's Jinja template.

    Raises ModelError where it has none or refuses them.
    """
    return ChatTemplate(tokenizer).render(messages, add_generation_prompt=add_generation_prompt)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a rendered chat: special tokens are those of the vocabulary, what lies between is plain text."""
    return ChatTemplate(tokenizer).encode(text)[0]


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that the template puts behind an answer (``<|im_end|>``, ...), where it is not EOS."""
    end = ChatTemplate(tokenizer).end_token
    return None if end == tokenizer.eos_id else end


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
    template = ChatTemplate(tokenizer)
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
        for piece in answer(template.encode(template.render(messages, add_generation_prompt=True))[0]):
            write(piece)
            pieces.append(piece)
        write("\n")
        messages.append({"role": "assistant", "content": "".join(pieces).strip()})
