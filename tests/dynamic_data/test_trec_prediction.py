"""TREC: coefficients in closed form, where the curve is lowest, and placement that keeps every row."""

import math
from collections import Counter

import numpy as np
import pytest

from trainwright.analysis.trec import batch_digest, compare, reevaluate
from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import build
from trainwright.data.mixers.base import MixContext
from trainwright.planning.trec import (
    MLaw,
    decay_for,
    ema_coefficients,
    fit_law,
    fit_m,
    place,
    predicted_curve,
    smoothed,
    timescale,
)

T = 1000
LR = 1e-2
DECAY_TO_ZERO = LR * (1 - np.arange(T) / T)
CONSTANT = np.full(T, LR)
DROP = np.where(np.arange(T) < 700, LR, LR * 1e-3)


def wd(tau):
    return decay_for(tau, LR, T)


# (a)
@pytest.mark.parametrize("lr", [DECAY_TO_ZERO, CONSTANT, DROP, np.random.default_rng(0).random(500) * 0.05])
@pytest.mark.parametrize("decay", [0.1, 1.0, 15.0])
def test_a_coefficients_and_the_rest_sum_to_one(lr, decay):
    c, rest = ema_coefficients(lr, decay)
    assert abs(math.fsum([*c, rest]) - 1) < 1e-12
    # Against an average made step by step.
    w = np.zeros(len(lr) + 1)
    w[0] = 1
    for t, a in enumerate(lr * decay):
        w *= 1 - a
        w[t + 1] += a
    assert np.abs(w[1:] - c).max() < 1e-14 and w[0] == pytest.approx(rest, rel=1e-9)


# (b)
@pytest.mark.parametrize(("tau", "expected"), [(0.1, 0.684), (0.2, 0.553), (0.5, 0.293)])
def test_b_linear_decay_remembers_best_at_one_less_root_tau(tau, expected):
    c, _ = ema_coefficients(DECAY_TO_ZERO, wd(tau))
    assert (int(np.argmax(c)) + 1) / T == pytest.approx(expected, abs=0.002)
    assert expected == pytest.approx(1 - math.sqrt(tau), abs=0.001)


# (c)
@pytest.mark.parametrize("m", [0.0, 1.0])
@pytest.mark.parametrize("tau", [0.1, 0.15, 0.3, 0.5])
def test_c_constant_rate_has_its_minimum_at_the_end_and_a_drop_where_it_drops(tau, m):
    assert int(np.argmin(predicted_curve(CONSTANT, wd(tau), m))) == T - 1
    assert (int(np.argmin(predicted_curve(DROP, wd(tau), m))) + 1) / T == 0.70


def test_the_same_timescale_gives_the_same_curve():
    a = predicted_curve(DECAY_TO_ZERO, 10.0, 1.0)
    b = predicted_curve(DECAY_TO_ZERO / 4, 40.0, 1.0)
    assert np.abs(a - b).max() < 1e-12
    assert timescale(LR, wd(0.15), T) == pytest.approx(0.15, rel=1e-12)


# (e) and bad input
@pytest.mark.parametrize(
    ("lr", "decay", "message"),
    [
        (CONSTANT, 0.0, "remember every step alike"),
        (CONSTANT, 100.0, "below 1"),
        (np.zeros(5), 0.1, "rate 0"),
        (-CONSTANT, 0.1, "negative"),
        (np.array([]), 0.1, "one number a step"),
    ],
)
def test_e_runs_without_a_curve_are_refused(lr, decay, message):
    with pytest.raises(ConfigError, match=message):
        ema_coefficients(lr, decay)


def test_smoothing_is_a_running_mean_with_its_ends_cut():
    values = np.random.default_rng(0).normal(size=50)
    for window in (1, 4, 5):
        expected = [values[max(0, i - (window - 1) // 2) : i + window // 2 + 1].mean() for i in range(50)]
        assert smoothed(values, window) == pytest.approx(expected)


def test_m_is_found_again_and_the_law_too():
    law = MLaw(0.4, 0.3, -0.25)
    runs = []
    for tpp, tau in [(5, 0.1), (20, 0.1), (20, 0.3), (80, 0.2)]:
        curve = 2 + 0.3 * predicted_curve(DECAY_TO_ZERO, wd(tau), law(tpp, tau))
        m, correlation = fit_m(curve, DECAY_TO_ZERO, wd(tau))
        assert m == pytest.approx(law(tpp, tau), abs=0.026) and correlation > 0.999
        runs.append((tpp, tau, law(tpp, tau)))
    found = fit_law(runs)
    assert (found.scale, found.tpp_power, found.tau_power) == pytest.approx((0.4, 0.3, -0.25), rel=1e-9)


@pytest.mark.parametrize("runs", [[(20, 0.1, 1.0)] * 2, [(20, 0.1, 1.0), (20, 0.2, 1.1), (20, 0.3, 1.2)]])
def test_a_law_needs_runs_that_settle_it(runs):
    with pytest.raises(ConfigError, match="do not settle"):
        fit_law(runs)


def test_the_window_is_the_lowest_of_all():
    curve = predicted_curve(DROP, wd(0.15), 1.0)
    found = place(curve, 80)
    means = [curve[i : i + 80].mean() for i in range(T - 79)]
    assert found.mean == pytest.approx(min(means)) and found.stop == 700
    with pytest.raises(ConfigError, match="steps of the run"):
        place(curve, T + 1)


# (d) and the mixer


def context(**changes):
    base = {
        "proportions": {"hq": 0.1, "web": 0.6, "wiki": 0.3}, "total_rows": 8000, "step_rows": 8, "lr": DROP,
        "epoch_rows": {"hq": 900, "web": 10_000, "wiki": 10_000}, "optimizer": "adamw", "weight_decay": wd(0.15),
        "tokens_per_parameter": 20.0, "batch_tokens": 4096,
    }  # fmt: skip
    return MixContext(**{**base, **changes})


def trec(**settings):
    return build("mixer", {"name": "trec", "source": "hq", **settings})


@pytest.mark.parametrize("density", [1.0, 0.5, 0.13])
@pytest.mark.parametrize("rows", [8000, 7993])
def test_d_placement_keeps_the_total_of_every_source(density, rows):
    mixer = trec(density=density).build(context(total_rows=rows))
    totals = Counter()
    for segment in mixer.plan:
        totals.update(segment.rows)
        assert min(segment.rows.values()) >= 0
    assert sum(totals.values()) == rows
    assert all(abs(totals[n] - p * rows) < 1 for n, p in context().proportions.items())
    if rows == 8000:
        assert totals == {"hq": 800, "web": 4800, "wiki": 2400}
    inside = mixer.plan[1].rows
    assert inside["hq"] == totals["hq"]  # all of it in the window, and there by its density
    assert inside["hq"] / sum(inside.values()) == pytest.approx(density, abs=0.01)
    if density >= 0.5:  # else the window is most of the run
        assert mixer.placement.stop == 700


def test_a_continual_run_counts_its_own_steps_alone():
    own = np.linspace(LR, 0, 200, endpoint=False)
    mixer = trec().build(context(lr=own, total_rows=1600, weight_decay=1 / (0.5 * LR * 200)))
    c, _ = ema_coefficients(own, 1 / (0.5 * LR * 200))
    curve = 1 - (c / c.max()) ** 0.5 * (np.arange(1, 201) / 200)
    assert mixer.placement.mean == pytest.approx(min(curve[i : i + 20].mean() for i in range(181)))


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({}, {"weight_decay": 0.0}, "remember every step alike"),
        ({}, {"optimizer": "muon"}, "the curve is AdamW's"),
        ({}, {"optimizer": "sgd"}, "the curve is AdamW's"),
        ({}, {"epoch_rows": {"hq": 900, "web": 4000, "wiki": 10_000}}, "more than the 4000 of one epoch"),
        ({}, {"lr": None, "total_rows": 0}, "known length"),
        ({"critical_batch_tokens": 2048}, {}, "below the batch of 4096"),
        ({"source": "nowhere"}, {}, "no such source"),
        ({}, {"proportions": {"hq": 1.0}}, "only source"),
        ({}, {"proportions": {"hq": 0.0, "web": 1.0}}, "gets no row"),
    ],
)
def test_runs_that_cannot_be_placed(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        trec(**settings).build(context(**changes))


def test_a_shallow_curve_is_warned_about(caplog):
    with caplog.at_level("WARNING"):
        trec().build(context())
    assert not caplog.records
    with caplog.at_level("WARNING"):
        trec(m=0.0).build(context(lr=CONSTANT, weight_decay=0.1 / (LR * T)))  # tau = 10
    assert "hardly matter" in caplog.text


def test_the_exponent_comes_from_m_or_the_law():
    assert trec().exponent(context()) == 1.0
    assert trec(m=0.2).exponent(context()) == 0.2
    expected = 0.5 * 20**0.1 * 0.15**-0.2
    assert trec(law=[0.5, 0.1, -0.2]).exponent(context()) == pytest.approx(expected)


# Measuring


def batches(n=5):
    import torch

    torch.manual_seed(0)
    out = []
    for _ in range(n):
        tokens = torch.randint(0, 20, (3, 8))
        weights = (torch.rand(3, 8) < 0.8).float()
        rest = {"positions": torch.arange(8).expand(3, 8), "doc_ids": torch.zeros(3, 8, dtype=torch.int32)}
        out.append(Batch(tokens, tokens.roll(-1, 1), weights, **rest))
    return out


@pytest.fixture
def model():
    import torch

    torch.manual_seed(0)
    spec = {"name": "decoder", "dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32}
    return build("model", spec).build(20, 8)


@pytest.mark.parametrize("micro", [None, 2])
def test_the_measured_curve_is_each_batch_s_loss(model, micro):
    import torch

    model.train()
    data = batches()
    found = reevaluate(model, data, micro_batch_size=micro, digests=[batch_digest(b) for b in data])
    assert model.training
    for value, batch in zip(found, data, strict=True):
        logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        assert value == pytest.approx(float((nll.view(3, 8) * batch.weights).sum() / batch.weights.sum()), rel=1e-5)


def test_batches_in_another_order_are_refused(model):
    data = batches()
    recorded = [batch_digest(b) for b in data]
    with pytest.raises(DataError, match="step 1 is not"):
        reevaluate(model, data[::-1], digests=recorded)
    with pytest.raises(DataError, match="5 batches were recorded and 4"):
        reevaluate(model, data[:4], digests=recorded)


def test_comparing_finds_where_the_minimum_is():
    rng = np.random.default_rng(0)
    curve = 3 + 0.2 * predicted_curve(DROP, wd(0.15), 1.0) + rng.normal(0, 0.01, T)
    found = compare(curve, DROP, wd(0.15), window=80)
    assert found["pearson"] > 0.95 and abs(found["measured_minimum"] - 0.70) < 0.06
    assert found["tau"] == pytest.approx(0.15) and found["end_above_minimum"] > 0.02
