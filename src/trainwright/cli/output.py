"""Printing: messages to stderr, results to stdout."""

from __future__ import annotations

import json
import logging
import os
import warnings
from typing import Any

from rich.console import Console


def complain(code: int, message: str) -> None:
    """What ended a command, on one logical line: the terminal breaks it, a pipe gets it whole."""
    from rich.text import Text

    head = (
        Text("", end="")
        if code == 130
        else Text("stopped: ", style="bold yellow")
        if code == 3
        else Text("error: ", style="bold red")
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(head, message))


def out() -> Console:
    """Stdout; tables keep their full width when it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def figures(row: dict[str, Any]) -> None:
    """Names and values, one a line."""
    width = max(map(len, row), default=0)
    for key, value in row.items():
        print(f"{key:<{width}}  {value:.6g}" if isinstance(value, float) else f"{key:<{width}}  {value}")


def log_to_terminal() -> None:
    """Our log messages, above a living progress bar. Ranks other than 0 only warn."""
    from rich.logging import RichHandler

    from trainwright.train.progress import terminal

    logger = logging.getLogger("trainwright")
    logger.handlers = [RichHandler(console=terminal(), show_time=False, show_path=False, markup=False)]
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    logger.propagate = False
    _show_warnings_in(logger)


def _show_warnings_in(logger: logging.Logger) -> None:
    """Warnings of ours as messages; others stay as Python writes them, with file and line."""
    as_before = warnings.showwarning
    if getattr(as_before, "ours", False):
        return

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if file is None and issubclass(category, UserWarning) and f"{os.sep}trainwright{os.sep}" in filename:
            logger.warning("%s", message)
        else:
            as_before(message, category, filename, lineno, file, line)

    show.ours = True  # type: ignore[attr-defined]
    warnings.showwarning = show
