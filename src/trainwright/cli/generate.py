"""``trainwright generate``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    live: bool = False,
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
    from trainwright.models.generate import stream
    from trainwright.train.runs import open_model

    model, tokenizer = open_model(path, checkpoint, device, live)
    if not chat:
        write(prompt or "")
        for piece in stream(model, tokenizer, prompt or "", **settings):
            write(piece)
        write("\n")
        return
    from trainwright.cli.chat import converse, end_of_turn

    end = end_of_turn(tokenizer)

    def answer(ids: list[int]) -> Iterator[str]:
        return stream(model, tokenizer, ids, eos_id=end, **settings)

    messages = iter([prompt]) if prompt is not None else None

    def read() -> str:
        if messages is not None:
            return next(messages, "")
        return input("> " if sys.stdin.isatty() else "")

    converse(tokenizer, answer, read, write, system)


def write(piece: str) -> None:
    print(piece, end="", flush=True)
