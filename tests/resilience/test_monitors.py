"""Every monitor: its state round-trips through JSON, a clean noisy curve raises nothing, injected faults are found."""

import json
import math
import random

import pytest

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build, methods
from trainwright.resilience.base import SEVERITY, StepInfo
from trainwright.resilience.loss_spike import LossSpike, robust_z

MONITORS = [m.name for m in methods("monitor")]
# What each monitor must find when it is put in place of a clean step. A new monitor adds its line.
FAULTS = {
    "non_finite": [("loss", math.nan), ("loss", math.inf), ("grad_norm", math.nan), ("grad_norm", math.inf)],
    "loss_spike": [("loss", 9.0), ("loss", 50.0)],
}


def curve(seed: int, steps: int, tail: float = 0.0):
    """A power-law loss curve from 8.3 to about 3 with batch noise and, with ``tail``, now and then a hard batch."""
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        loss = 2.5 + 5.8 * (1 + step / 20) ** -0.6 + rng.gauss(0, 0.05)
        if rng.random() < tail:
            loss += rng.expovariate(1 / 0.1)
        yield StepInfo(step, loss, 0.5 + abs(rng.gauss(0, 0.2)))


def make(name):
    return build("monitor", name).build()


def test_all_have_faults():
    assert set(FAULTS) <= set(MONITORS)


@pytest.mark.parametrize("name", MONITORS)
@pytest.mark.parametrize("seed", range(6))
def test_no_verdict_on_a_clean_run(name, seed):
    monitor = make(name)
    assert [v for s in curve(seed, 1200, tail=0.05) if (v := monitor.inspect(s)).action != "ok"] == []


@pytest.mark.parametrize("name, field, value", [(n, *f) for n, faults in FAULTS.items() for f in faults])
def test_injected_fault_is_found_once_and_named(name, field, value):
    monitor = make(name)
    verdicts = []
    for step in curve(1, 400):
        if step.step == 300:
            step = StepInfo(**{**vars(step), field: value})
        verdicts.append(monitor.inspect(step))
    assert [i + 1 for i, v in enumerate(verdicts) if v.action != "ok"] == [300]
    assert verdicts[299].monitor == name and verdicts[299].reason and verdicts[299].action in SEVERITY


@pytest.mark.parametrize("name", MONITORS)
def test_state_round_trip_in_mid_run(name):
    """A monitor restored through JSON goes on exactly as the one that was never stopped, faults in both halves."""
    steps = list(curve(3, 400))
    for at in (150, 151, 199, 201, 260):
        for field, value in FAULTS.get(name, []):
            steps[at] = StepInfo(**{**vars(steps[at]), field: value})
    whole, first = make(name), make(name)
    expected = [whole.inspect(s) for s in steps]
    for s in steps[:200]:
        first.inspect(s)
    second = make(name)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert [second.inspect(s) for s in steps[200:]] == expected[200:]
    assert second.state_dict() == whole.state_dict()


def test_non_finite_stops_only_when_in_a_row():
    monitor = build("monitor", {"name": "non_finite", "patience": 3}).build()
    bad, good = StepInfo(1, math.nan, 1.0), StepInfo(1, 1.0, 1.0)
    assert [monitor.inspect(s).action for s in (bad, bad, good, bad, bad, bad)] == [
        "skip", "skip", "ok", "skip", "skip", "stop",
    ]  # fmt: skip


def test_gradient_norm_that_is_not_computed_is_no_fault():
    assert make("non_finite").inspect(StepInfo(1, 2.0, None)).action == "ok"


def test_robust_z_is_the_closed_form():
    assert robust_z(10.0, [1.0, 2.0, 3.0, 4.0, 5.0]) == (7 / 1.4826, 7.0)  # median 3, MAD 1
    assert robust_z(3.5, [3.0] * 20) == (math.inf, 0.5) and robust_z(3.0, [3.0] * 20) == (0.0, 0.0)


def test_outliers_do_not_hide_each_other():
    """Ten of a hundred values are spikes: a mean and standard deviation would let the next one pass at z < 4."""
    history = [2.0 + 0.01 * (i % 7) for i in range(90)] + [9.0] * 10
    assert robust_z(9.0, history)[0] > 100


def test_a_ripple_on_a_flat_curve_is_no_spike():
    monitor = LossSpike(warmup=0)
    for step in range(1, 200):
        assert monitor.inspect(StepInfo(step, 2.0, 1.0)).action == "ok"
    assert monitor.inspect(StepInfo(200, 2.25, 1.0)).action == "ok"
    assert monitor.inspect(StepInfo(201, 2.35, 1.0)).action == "skip"


@pytest.mark.parametrize("sustained", ["accept", "rollback", "stop"])
def test_a_lasting_rise_goes_to_sustained(sustained):
    monitor = LossSpike(warmup=20, patience=16, sustained=sustained)
    level = [2.0 + 0.01 * (i % 5) for i in range(100)] + [6.0 + 0.01 * (i % 5) for i in range(60)]
    verdicts = [monitor.inspect(StepInfo(i + 1, x, 1.0)) for i, x in enumerate(level)]
    actions = [v.action for v in verdicts]
    assert actions[100:115] == ["skip"] * 15
    if sustained == "accept":
        assert set(actions[115:]) == {"ok"}
    else:
        assert actions[115] == sustained and verdicts[115].since == 101


def test_going_back_to_a_higher_level_is_no_spike():
    """A rollback replays early, higher losses; what was seen after the checkpoint must not judge them."""
    monitor = LossSpike(warmup=10)
    falling = [8.0 - 0.02 * i for i in range(300)]
    for i, loss in enumerate(falling):
        monitor.inspect(StepInfo(i + 1, loss, 1.0))
    assert [monitor.inspect(StepInfo(i + 1, falling[i] + 0.01, 1.0)).action for i in range(40, 120)] == ["ok"] * 80
    assert monitor.inspect(StepInfo(121, 12.0, 1.0)).action == "skip"


@pytest.mark.parametrize(
    "spec, key",
    [
        ({"name": "loss_spike", "window": 3}, "window"),
        ({"name": "loss_spike", "action": "panic"}, "action"),
        ({"name": "loss_spike", "threshold": -1}, "threshold"),
        ({"name": "non_finite", "patience": 0}, "patience"),
        ({"name": "non_finite", "patince": 3}, "patience"),
    ],
)
def test_wrong_settings_are_named(spec, key):
    with pytest.raises(ConfigError, match=key):
        build("monitor", spec)
