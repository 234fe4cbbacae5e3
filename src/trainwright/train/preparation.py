"""A run's data before its first step, with word of how far that is: it can take many minutes."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rich.live import Live
from rich.text import Text

from trainwright.config.inputs import tokenizer_spec
from trainwright.core.distributed import is_main
from trainwright.core.seeds import derive
from trainwright.train.progress import clock, quantity, terminal

if TYPE_CHECKING:
    from trainwright.data.module import DataModule
    from trainwright.data.tokenizers.base import Tokenizer
    from trainwright.train.trainer import Trainer


def prepare_data(run: Trainer) -> tuple[dict[str, Any], Tokenizer, DataModule, bool]:
    """The data card, tokenizer and data of ``run``, and whether all of its tokens came from the cache."""
    from trainwright.data.module import build_card, build_data, build_tokenizer

    config = run.config
    with Preparing(config.log.progress if is_main() else "none") as watch:
        watch.begin("looking at the data")
        card = build_card(config.data)
        tokenizer = build_tokenizer(config.data, tokenizer_spec(config), watch)
        data = build_data(
            config.data,
            tokenizer,
            seq_len=config.train.seq_len,
            seed=derive(config.run.seed, "data"),
            rank=run.mesh.dp_rank,
            world_size=run.mesh.dp_size,
            global_batch_rows=run.rows,
            watch=watch,
        )
        _ = data.rows_per_epoch  # laid out here, and kept
    return card, tokenizer, data, not any(what.startswith("tokenizing") for what in watch.worked)


class Preparing:
    """Shows the piece of work at hand: a living line on a terminal, elsewhere a line every ``interval`` seconds.

    A thread of its own draws, because much of the work is one long call, such as the training of a tokenizer. Nothing
    is written of work that takes less than ``interval`` where there is no terminal.
    """

    def __init__(
        self,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
        interval: float = 10.0,
        out: TextIO | None = None,
    ):
        self.mode, self.interval, self._out = mode, interval, out
        self.worked: list[str] = []  # pieces that were made and not found
        self._what, self._done = "", 0
        self._size: int | None = None
        self._began = time.monotonic()
        self._told = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None

    def begin(self, what: str, size: int | None = None) -> None:
        self._end()
        self._what, self._size, self._done, self._began, self._told = what, size, 0, time.monotonic(), False

    def advance(self, done: int) -> None:
        if self._done == 0:
            self.worked.append(self._what)
        self._done = done

    def line(self) -> str:
        seconds = time.monotonic() - self._began
        parts = [self._what]
        if self._done:
            of = f" (files: {quantity(self._size)}B)" if self._size else ""
            parts += [f"{quantity(self._done)}B of text{of}", f"{quantity(self._done / max(seconds, 1e-3))}B/s"]
        return "  ".join([*parts, clock(seconds)])

    def __enter__(self) -> Preparing:
        if self.mode == "none":
            return self
        if self.mode == "bar" or (self.mode == "auto" and terminal().is_terminal):
            self._live = Live(
                console=terminal(), get_renderable=lambda: Text(self.line()), refresh_per_second=4, transient=True
            )
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._write_lines, name="preparing", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()
            if exc[0] is None:
                self._end()

    def _write_lines(self) -> None:
        while not self._stop.wait(self.interval):
            self._told = True
            self._write(self.line())

    def _end(self) -> None:
        if self._told:
            self._write(f"{self._what}: done in {clock(time.monotonic() - self._began)}")

    def _write(self, line: str) -> None:
        print(line, file=self._out or sys.stdout, flush=True)
