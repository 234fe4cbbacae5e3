"""What is seen of a run: a bar on a terminal, plain lines elsewhere. Lives on rank 0 only."""

from __future__ import annotations

import math
import sys
import time
from functools import cache
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn
from rich.progress import Task as RichTask
from rich.table import Column
from rich.text import Text


class Display(Protocol):
    def say(self, lines: list[str]) -> None:
        """What the run is, before the loop starts."""

    def start(self, step: int) -> None:
        """The loop is about to make step ``step + 1``."""

    def update(self, row: dict[str, Any]) -> None:
        """A step was made; ``row`` holds its figures. Called at every step, so it does nothing most of the time."""

    def validation(self, row: dict[str, Any]) -> None:
        """A validation was made."""

    def close(self) -> None: ...


@cache
def terminal() -> Console:
    """The one console for messages and the bar (stderr), so that messages go above a living bar."""
    return Console(stderr=True, highlight=False)


def make_progress(
    mode: Literal["auto", "bar", "lines", "none"] = "auto", total_steps: int | None = None, seconds: float | None = None
) -> Display | None:
    """The display for ``mode``; None for ``none``. A run ends by ``total_steps`` or ``seconds``, whichever is first."""
    if mode == "none":
        return None
    if mode == "bar" or (mode == "auto" and terminal().is_terminal):
        return Bar(total_steps, seconds)
    return Lines(total_steps, seconds)


class Pace:
    """How far a run is and when it ends, from the steps and the clock."""

    def __init__(self, total_steps: int | None, seconds: float | None):
        self.total_steps, self.seconds = total_steps, seconds
        self.begin(0)

    def begin(self, step: int) -> None:
        self._first = (time.monotonic(), step)
        self.last: dict[str, Any] = {"step": step}

    def see(self, row: dict[str, Any]) -> None:
        """Remember the newest figures; those that a row lacks (it is not measured at each step) stay."""
        self.last.update(row)

    @property
    def done(self) -> float:
        """Share of the run that is done, 0 to 1."""
        shares = []
        if self.total_steps:
            shares.append(self.last["step"] / self.total_steps)
        if self.seconds:
            shares.append(self.last.get("seconds", 0.0) / self.seconds)
        return min(max(shares, default=0.0), 1.0)

    def remaining(self) -> float | None:
        """Seconds of wall clock to the end at the pace since the start; None while there is no telling."""
        at, step = self._first
        steps = self.last["step"] - step
        ends = []
        if self.total_steps and steps > 0:
            ends.append((self.total_steps - self.last["step"]) * (time.monotonic() - at) / steps)
        if self.seconds and "seconds" in self.last:
            ends.append(self.seconds - self.last["seconds"])
        return max(0.0, min(ends)) if ends else None


class Lines:
    """A line every ``interval`` seconds, and at the first and last step and each validation."""

    def __init__(
        self,
        total_steps: int | None = None,
        seconds: float | None = None,
        interval: float = 10.0,
        out: TextIO | None = None,
    ):
        self.pace, self.interval = Pace(total_steps, seconds), interval
        self._out = out
        self._next = 0.0
        self._unwritten = False

    def say(self, lines: list[str]) -> None:
        for line in lines:
            self._write(line)

    def start(self, step: int) -> None:
        self.pace.begin(step)
        self._next = 0.0

    def update(self, row: dict[str, Any]) -> None:
        self.pace.see(row)
        self._unwritten = True
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self.interval
            self._line()

    def validation(self, row: dict[str, Any]) -> None:
        if self._unwritten:
            self._line()
        parts = [f"step {row['step']}", f"validation loss {row['val_loss']:.4f}"]
        if "val_bits_per_byte" in row:
            parts.append(f"{row['val_bits_per_byte']:.4f} bits/byte")
        self._write("  ".join(parts))

    def close(self) -> None:
        if self._unwritten:
            self._line()

    def _line(self) -> None:
        self._unwritten = False
        total = f"/{self.pace.total_steps}" if self.pace.total_steps else ""
        parts = [f"step {self.pace.last['step']}{total}", *figures(self.pace.last)]
        left = self.pace.remaining()
        if left is not None:
            parts.append(f"{clock(left)} left")
        self._write("  ".join(parts))

    def _write(self, line: str) -> None:
        print(line, file=self._out or sys.stdout, flush=True)


class _Figures(ProgressColumn):
    """The newest figures behind the bar; a column, so that they are formatted only when drawn."""

    max_refresh = 0.1

    def __init__(self, pace: Pace):
        super().__init__(table_column=Column(no_wrap=True, overflow="ellipsis"))
        self.pace = pace

    def render(self, task: RichTask) -> Text:
        left = self.pace.remaining()
        parts = [f"{clock(left)} left"] if left is not None else []
        return Text("  ".join([*parts, *figures(self.pace.last)]))


class Bar:
    """A rich progress bar, drawn from the loop at most every ``interval`` seconds: no thread that takes the GIL."""

    def __init__(
        self,
        total_steps: int | None = None,
        seconds: float | None = None,
        interval: float = 0.5,
        console: Console | None = None,
    ):
        self.pace, self.interval = Pace(total_steps, seconds), interval
        self.console = console or terminal()
        self._bar = Progress(
            TextColumn("step {task.description}"),
            BarColumn(bar_width=12),
            TaskProgressColumn(),
            _Figures(self.pace),
            console=self.console,
            auto_refresh=False,
            transient=False,
        )
        self._task = self._bar.add_task("0", total=1.0)
        self._next = 0.0

    def say(self, lines: list[str]) -> None:
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def start(self, step: int) -> None:
        self.pace.begin(step)
        self._bar.start()

    def update(self, row: dict[str, Any]) -> None:
        self.pace.see(row)
        if time.monotonic() >= self._next:
            self._draw()
            self._next = time.monotonic() + self.interval

    def validation(self, row: dict[str, Any]) -> None:
        figure = f", {row['val_bits_per_byte']:.4f} bits/byte" if "val_bits_per_byte" in row else ""
        self.console.print(
            f"step {row['step']}: validation loss {row['val_loss']:.4f}{figure}", markup=False, highlight=False
        )

    def close(self) -> None:
        if self._bar.live.is_started:
            self._draw()
            self._bar.stop()

    def _draw(self) -> None:
        total = f"/{self.pace.total_steps}" if self.pace.total_steps else ""
        self._bar.update(
            self._task, completed=self.pace.done, description=f"{self.pace.last['step']}{total}", refresh=True
        )


def figures(row: dict[str, Any]) -> list[str]:
    """The figures of a row that a person watches, as short texts."""
    out = []
    if "loss" in row:
        out.append(f"loss {row['loss']:.4f}")
    if row.get("tokens_per_s"):
        out.append(f"{quantity(row['tokens_per_s'])} tok/s")
    if row.get("flops_utilization"):
        out.append(f"{100 * row['flops_utilization']:.0f}% of peak")
    if row.get("memory_bytes"):
        out.append(memory(row["memory_bytes"]))
    return out


def quantity(value: float) -> str:
    """Three digits and a unit: 12300 -> ``12.3k``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def memory(size: float) -> str:
    """Bytes in binary units: ``1.50 GiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size / 1024:.0f} KiB"


def clock(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``; ``?`` for what has no end."""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
