import io
import math
import time

import pytest
from rich.console import Console

from trainwright.train import progress
from trainwright.train.progress import Bar, Lines, Pace, clock, make_progress, memory, quantity

ROW = {
    "step": 1,
    "loss": 2.34567,
    "tokens_per_s": 12_345.0,
    "flops_utilization": 0.873,
    "memory_bytes": 3 * 2**29,
    "seconds": 1.0,
}


def test_lines_show_what_a_person_watches():
    out = io.StringIO()
    lines = Lines(100, out=out, interval=0)
    lines.start(0)
    lines.update(ROW)
    lines.update({"step": 2, "loss": 2.0})  # figures that are not measured at each step stay
    lines.validation({"step": 2, "val_loss": 1.5, "val_bits_per_byte": 0.75})
    lines.close()
    first, second, third = out.getvalue().splitlines()
    assert "step 1/100  loss 2.3457  12.3k tok/s  87% of peak  1.50 GiB" in first and first.endswith("left")
    assert "step 2/100  loss 2.0000" in second and "87% of peak" in second
    assert third == "step 2  validation loss 1.5000  0.7500 bits/byte"


def test_lines_keep_to_their_interval_and_end_with_the_last_step():
    out = io.StringIO()
    lines = Lines(1000, out=out, interval=3600)
    lines.start(0)
    for step in range(1, 1001):
        lines.update({"step": step, "loss": 1.0})
    lines.close()
    lines.close()
    assert [x.split()[1] for x in out.getvalue().splitlines()] == ["1/1000", "1000/1000"]


def test_bar_draws_figures():
    out = io.StringIO()
    bar = Bar(10, console=Console(file=out, force_terminal=True, width=140), interval=0)
    bar.start(0)
    bar.update(ROW)
    bar.validation({"step": 1, "val_loss": 1.5})
    bar.update({**ROW, "step": 10})
    bar.close()
    bar.close()
    text = out.getvalue()
    assert "step 10/10" in text and "100%" in text and "12.3k tok/s" in text and "validation loss 1.5000" in text


def test_end_is_what_comes_first_steps_or_clock():
    pace = Pace(100, 60.0)
    pace.begin(0)
    pace.see({"step": 10, "seconds": 30.0})
    assert pace.done == 0.5 and pace.remaining() <= 30.0
    free = Pace(None, None)
    assert free.done == 0.0 and free.remaining() is None
    resumed = Pace(100, None)
    resumed.begin(90)
    assert resumed.remaining() is None and resumed.done == 0.9


def test_modes(monkeypatch):
    assert make_progress("none") is None
    monkeypatch.setattr(progress, "terminal", lambda: Console(file=io.StringIO(), force_terminal=False))
    assert isinstance(make_progress("auto", 5), Lines)
    monkeypatch.setattr(progress, "terminal", lambda: Console(file=io.StringIO(), force_terminal=True))
    assert isinstance(make_progress("auto", 5), Bar) and isinstance(make_progress("lines"), Lines)


@pytest.mark.parametrize(
    "got, want",
    [
        (quantity(999), "999"), (quantity(1000), "1k"), (quantity(999_999), "1M"), (quantity(2.5e12), "2.5T"),
        (memory(1536 * 2**20), "1.50 GiB"), (clock(3725), "1:02:05"), (clock(65), "1:05"), (clock(math.inf), "?"),
    ],
)  # fmt: skip
def test_units(got, want):
    assert got == want


@pytest.mark.parametrize("kind", [Bar, Lines])
def test_most_steps_draw_nothing(kind):
    """What it costs is measured in benchmarks/overhead.py."""
    out = io.StringIO()
    display = kind(
        100_000, **({"console": Console(file=out, force_terminal=True, width=140)} if kind is Bar else {"out": out})
    )
    display.start(0)
    display.update(ROW)
    before = out.tell()
    start = time.monotonic()
    for step in range(2000):
        display.update({**ROW, "step": step})
    drawn, seconds = out.tell() - before, time.monotonic() - start
    display.close()
    assert drawn <= 2000 * (1 + 20 * seconds)  # some 20 screens a second of some hundred characters, not one a step
