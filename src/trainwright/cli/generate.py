"""``trainwright generate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainwright.core.errors import InputError


def run(
    path: Path,
    checkpoint: str,
    device: str | None,
    settings: dict[str, Any],
    *,
    prompt: str | None,
    chat: bool,
    system: str | None,
) -> None:
    """Continue ``prompt`` (or what comes from a pipe), or chat."""
    if prompt is not None and chat and not prompt.strip():
        raise InputError("--prompt is empty; leave it out to type the messages")
    if system is not None and not chat:
        raise InputError("--system belongs to a chat; add --chat")
    if prompt is None and not chat:
        if sys.stdin.isatty():
            raise InputError("nothing to continue; give a text by --prompt or through a pipe, or --chat")
        prompt = sys.stdin.read()
    from trainwright.models.generate import generate
    from trainwright.train.runs import open_model

    model, tokenizer = open_model(path, checkpoint, device)
    if not chat:
        (text,) = generate(model, tokenizer, [prompt], **settings)
        print((prompt or "") + text)
        return
    from trainwright.cli.chat import ChatTokenizer, converse

    chat_tokenizer = ChatTokenizer(tokenizer)

    def answer(rendered: str) -> str:
        return generate(model, chat_tokenizer, [rendered], **settings)[0]

    messages = iter([prompt]) if prompt is not None else None

    def read() -> str:
        if messages is not None:
            return next(messages, "")
        return input("> " if sys.stdin.isatty() else "")

    converse(tokenizer, answer, read, print, system)
