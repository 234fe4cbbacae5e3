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
    context: str | None = None,
    guidance: float | None = None,
    exit_threshold: float | None = None,
    exit_method: str = "recompute",
) -> None:
    """Continue ``prompt`` (or what comes from a pipe), or chat."""
    if prompt is not None and chat and not prompt.strip():
        raise InputError("--prompt is empty; leave it out to type the messages")
    if system is not None and not chat:
        raise InputError("--system belongs to a chat; add --chat")
    if guidance is not None and context is None:
        raise InputError("--guidance is between a text with context and without; give --context")
    if context is not None and chat:
        raise InputError("--context belongs to a text to continue, not to --chat")
    if prompt is None and not chat:
        if sys.stdin.isatty():
            raise InputError("nothing to continue; give a text by --prompt or through a pipe, or --chat")
        prompt = sys.stdin.read()
    from trainwright.models.generate import stream
    from trainwright.train.runs import open_model

    model, tokenizer = open_model(path, checkpoint, device, live)
    if exit_threshold is not None:
        from trainwright.models.exit_decoding import ExitDecoding, check_exit_decoding

        exits = ExitDecoding(exit_threshold, exit_method)  # type: ignore[arg-type]
        check_exit_decoding(exits, model, 1, guided=context is not None and guidance != 1)
        settings = settings | {"early_exit": exits}
    if context is not None:
        settings = settings | {"context": _context(path, context, guidance)}
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


def _context(path: Path, text: str, guidance: float | None) -> Any:
    """The context as the run was trained with it; as by default where that is not known (a Hugging Face folder)."""
    from trainwright.data.metadata import MetadataConfig
    from trainwright.models.guidance import GUIDANCE, Context
    from trainwright.train.run_dir import CONFIG
    from trainwright.train.runs import open_config

    config = open_config(path).data.metadata if (path / CONFIG).is_file() else None
    return Context(text, GUIDANCE if guidance is None else guidance, config or MetadataConfig())


def write(piece: str) -> None:
    print(piece, end="", flush=True)
