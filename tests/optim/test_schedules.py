"""Schedules: closed forms, and what all of them must do."""

import logging
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build, methods

METHODS = [m.name for m in methods("schedule")]
every = pytest.mark.parametrize("name", METHODS)
DECAYING = [m.name for m in methods("schedule") if "final" in m.config.model_fields]


def factors(total, **settings):
    schedule = build("schedule", settings).build(total)
    return [schedule(step) for step in range(total + 1)]


def test_there_are_methods():
    assert {"constant", "linear", "cosine", "wsd", "inverse_sqrt"} <= set(METHODS)
    assert set(DECAYING) >= {"linear", "cosine", "wsd"}


@every
@pytest.mark.parametrize("warmup, rungs", [(0, 0), (10, 10), (0.1, 10), (1, 1)])
def test_warmup_is_linear_and_reaches_the_peak(name, warmup, rungs):
    f = factors(100, name=name, warmup=warmup)
    assert f[:rungs] == pytest.approx([(i + 1) / (rungs + 1) for i in range(rungs)])
    assert f[rungs] == pytest.approx(1.0)
    assert f[0] > 0


@every
@given(total=st.integers(1, 400), warmup=st.sampled_from([0, 0.02, 0.5, 1, 3, 50, 1000]))
def test_rises_then_falls_without_jumps(name, total, warmup):
    f = factors(total, name=name, warmup=warmup)
    assert all(0 <= x <= 1 + 1e-12 and math.isfinite(x) for x in f)
    peak = f.index(max(f))
    assert all(b >= a for a, b in pairwise(f[: peak + 1]))
    assert all(b <= a + 1e-12 for a, b in pairwise(f[peak:]))
    assert all(x > 0 for x in f[:total])  # every step of the run trains


@every
def test_no_jumps_in_a_long_run(name):
    f = factors(2000, name=name, warmup=200)
    assert max(abs(b - a) for a, b in pairwise(f)) < 0.006


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_ends_at_final_and_stays(name, final):
    schedule = build("schedule", {"name": name, "final": final, "warmup": 10}).build(100)
    assert schedule(100) == pytest.approx(final)
    assert schedule(1000) == pytest.approx(final)
    assert schedule(99) > 0


def test_closed_forms():
    assert factors(50, name="constant", warmup=0) == [1.0] * 51
    x = [(i - 10) / 90 for i in range(10, 101)]
    assert factors(100, name="linear", warmup=10, final=0.2)[10:] == pytest.approx([1 - 0.8 * t for t in x])
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2 for t in x]
    assert factors(100, name="cosine", warmup=10)[10:] == pytest.approx(cosine)
    assert cosine[45] == pytest.approx(0.55)
    wsd = [1.0] * 80 + [1 - i / 20 for i in range(21)]
    assert factors(100, name="wsd", warmup=0, decay=20) == pytest.approx(wsd)
    assert factors(100, name="wsd", warmup=0, decay=0.2) == pytest.approx(wsd)
    roots = [math.sqrt(17 / (i + 1)) for i in range(16, 101)]
    assert factors(100, name="inverse_sqrt", warmup=16)[16:] == pytest.approx(roots)


def test_decay_longer_than_the_run_starts_after_warmup():
    f = factors(100, name="wsd", warmup=10, decay=5000)
    assert f == pytest.approx(factors(100, name="linear", warmup=10))


def test_short_runs_still_decay():
    assert factors(2, name="wsd", warmup=0) == pytest.approx([1.0, 1.0, 0.0])


def test_warmup_longer_than_the_run_warns(caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        f = factors(10, name="cosine", warmup=100)
    assert max(f) == pytest.approx(11 / 101)
    assert "ends before the rate has reached its peak" in caplog.text


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"name": "cosine", "warmup": -1}, "greater than or equal to 0"),
        ({"name": "cosine", "warmup": 2.5}, "whole number of steps"),
        ({"name": "wsd", "decay": 1.5}, "whole number of steps"),
        ({"name": "wsd", "decay": 0}, "greater than 0"),
        ({"name": "linear", "final": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("schedule", settings)
