"""Selectors and weighters alone, on made-up losses and gradients."""

import math

import numpy as np
import pytest
import torch

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.data.selectors.base import draw
from trainwright.data.selectors.delta_loss import DeltaLossSelector, window
from trainwright.data.selectors.less import LessSelector, Sketch, adam_direction, influence
from trainwright.data.selectors.loss import LossSelector, band_weights
from trainwright.data.selectors.near import NearSelector, neighbours
from trainwright.data.selectors.none import InOrder
from trainwright.data.selectors.random import RandomSelector
from trainwright.data.weighters.base import row_scales
from trainwright.data.weighters.loss import LossWeighter, scores
from trainwright.data.weighters.uniform import UniformWeighter


class Pool:
    def __init__(self, losses, gradients=None, updates=5):
        self.values, self.found = np.asarray(losses, float), gradients
        self.size, self.updates = len(self.values), updates

    def losses(self):
        return self.values

    def gradients(self, dim, kind):
        return self.found


LOSSES = np.linspace(0, 1, 300)
SELECTORS = [RandomSelector(1), LossSelector(seed=1), DeltaLossSelector(seed=1), InOrder()]


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
def test_ids_are_different_within_the_pool_and_the_same_each_time(selector):
    ids = selector.select(Pool(LOSSES), 7, 100)
    assert len(set(ids.tolist())) == 100 and ids.min() >= 0 and ids.max() < 300 and ids.dtype == np.int64
    again = type(selector)() if isinstance(selector, InOrder) else type(selector)(seed=1)
    assert (again.select(Pool(LOSSES), 7, 100) == ids).all()
    assert set(again.select(Pool(LOSSES), 8, 300).tolist()) == set(range(300))


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
def test_more_than_the_pool_is_refused(selector):
    with pytest.raises(ValueError, match="pool of 300"):
        selector.select(Pool(LOSSES), 0, 301)


def test_a_draw_has_the_chances_of_its_weights():
    weights = np.array([5.0, 1.0, 1.0, 0.0])
    first = np.array([draw(weights, 1, 0, step)[0] for step in range(7000)])
    share = np.bincount(first, minlength=4) / len(first)
    assert share == pytest.approx([5 / 7, 1 / 7, 1 / 7, 0], abs=0.02)
    assert sorted(draw(weights, 3, 0, 1).tolist()) == [0, 1, 2]  # weight 0 only when no other is left
    assert draw(weights, 4, 0, 1)[-1] == 3


@pytest.mark.parametrize(("focus", "third"), [("low", 0), ("medium", 1), ("high", 2)])
def test_the_focus_band_is_drawn_five_times_as_often(focus, third):
    weights = band_weights(LOSSES, focus, 5.0, (0.33, 0.66))
    inside = np.flatnonzero(weights == 5)
    low, high = np.quantile(LOSSES, [0.33, 0.66])
    edges = [-1, low, high, 2]
    assert inside.tolist() == np.flatnonzero((edges[third] < LOSSES) & (edges[third + 1] >= LOSSES)).tolist()
    ids = np.concatenate([LossSelector(focus).select(Pool(LOSSES), step, 10) for step in range(400)])
    share = np.isin(ids, inside).mean()
    expected = 5 * len(inside) / (5 * len(inside) + 300 - len(inside))
    assert share == pytest.approx(expected, abs=0.04)


def test_rows_without_a_token_are_not_selected_by_loss():
    losses = LOSSES.copy()
    losses[::2] = np.nan
    assert (LossSelector().select(Pool(losses), 0, 150) % 2 == 1).all()


def test_delta_loss_goes_from_the_fastest_to_the_slower_rows():
    first = np.full(300, 5.0)
    speed = np.arange(300) / 300  # row 299 falls fastest
    selector = DeltaLossSelector(0.2, seed=0)
    selector.select(Pool(first), 0, 60)
    means = []
    for step in range(1, 5):
        ids = selector.select(Pool(first - speed), step, 40)
        means.append(speed[ids].mean())
    assert means == sorted(means, reverse=True) and means[0] > 0.75 and means[-1] < 0.4
    assert window(4, 4, 300, 0.2) == (int(240 / (1 + math.exp(-5))), int(240 / (1 + math.exp(-5)) + 60))


def test_delta_loss_leaves_out_rows_whose_loss_has_risen_and_keeps_its_state():
    selector = DeltaLossSelector(1.0, seed=0)
    selector.select(Pool(np.full(300, 5.0)), 0, 60)
    now = np.full(300, 6.0)
    now[:150] = 4.0
    other = DeltaLossSelector(1.0, seed=0)
    other.load_state_dict(selector.state_dict())
    ids = selector.select(Pool(now, updates=10**9), 1, 100)
    assert (ids < 150).mean() > 0.9
    assert (other.select(Pool(now, updates=10**9), 1, 100) == ids).all()
    with pytest.raises(ValueError, match="300 rows at first"):
        selector.select(Pool(now[:100]), 2, 10)


def test_less_takes_the_rows_that_point_as_validation_does():
    rng = np.random.default_rng(0)
    target = rng.normal(size=(4, 50)) + 3
    pool = rng.normal(size=(20, 50))
    pool[[3, 11]] += 3
    pool[7] -= 3
    pool[5] = 0
    ids = LessSelector(50, "sgd").select(Pool(np.zeros(20), (pool, target)), 0, 2)
    assert set(ids.tolist()) == {3, 11}
    cosines = [[p @ t / np.linalg.norm(p) / np.linalg.norm(t) if p.any() else 0.0 for t in target] for p in pool]
    assert influence(pool, target) == pytest.approx(np.mean(cosines, 1))


def test_the_sketch_keeps_inner_products():
    torch.manual_seed(0)
    a, b = torch.randn(2, 20_000)
    b = 0.5 * a + b
    exact = float(a @ b)
    found = [float(Sketch(20_000, 4096, seed)(a) @ Sketch(20_000, 4096, seed)(b)) for seed in range(8)]
    assert np.mean(found) == pytest.approx(exact, rel=0.05)
    assert found[0] != found[1] and float(Sketch(20_000, 4096, 0)(a) @ Sketch(20_000, 4096, 0)(b)) == found[0]


def test_adam_direction_is_the_next_step_of_torch_without_bias_correction():
    torch.manual_seed(0)
    g, m, s = torch.randn(9), torch.randn(9), torch.rand(9)
    expected = (0.9 * m + 0.1 * g) / ((0.99 * s + 0.01 * g**2).sqrt() + 1e-8)
    torch.testing.assert_close(adam_direction(g, m, s, (0.9, 0.99)), expected)


def test_near_takes_neighbours_column_by_column():
    table = np.array([[4, 7, 1], [4, 2, 9], [6, 7, 0]])
    selector = NearSelector(table)
    assert selector.select(Pool(np.zeros(10)), 0, 6).tolist() == [4, 6, 7, 2, 1, 9]
    with pytest.raises(ValueError, match="7 different rows"):
        selector.select(Pool(np.zeros(10)), 0, 8)
    with pytest.raises(ValueError, match=r"0 \.\. 5"):
        selector.select(Pool(np.zeros(6)), 0, 2)
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(30, 8))
    assert (neighbours(3 * pool[[5, 9]], pool, 4)[:, 0] == [5, 9]).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "loss", "update_step": 0}, "update_step"),
        ({"name": "loss", "quantiles": [0.7, 0.3]}, "second larger"),
        ({"name": "loss", "focus": "middle"}, "focus"),
        ({"name": "delta_loss", "window": 0}, "window"),
        ({"name": "near"}, "table"),
    ],
)
def test_settings_that_cannot_be(spec, message):
    with pytest.raises(ConfigError, match=message):
        build("selector", spec)


def test_a_table_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        build("selector", {"name": "near", "table": str(tmp_path / "none.npy")}).build(0)
    np.save(tmp_path / "flat.npy", np.arange(3))
    with pytest.raises(ConfigError, match="whole numbers"):
        build("selector", {"name": "near", "table": str(tmp_path / "flat.npy")}).build(0)


# Weighters

ROWS = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize("strategy", ["linupper", "quadratic", "extremes"])
def test_weights_sum_to_one_and_follow_the_published_equations(strategy):
    x = 2 * (ROWS - 1) / 4 - 1
    s = {"linupper": torch.minimum(x + 1, torch.ones(4)), "quadratic": 1 - x**2, "extremes": x.abs()}[strategy]
    expected = s.exp() / s.exp().sum()
    found = LossWeighter(strategy).weights(ROWS)
    torch.testing.assert_close(found, expected.double())
    assert float(found.sum()) == pytest.approx(1, abs=1e-15)


def test_linupper_rises_to_the_middle_and_is_flat_above():
    s = scores(ROWS, "linupper", 1.0).tolist()
    assert s == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("weighter", [UniformWeighter(), LossWeighter(), LossWeighter("extremes", 2.0, 0.5)])
def test_equal_losses_give_the_plain_mean(weighter):
    tokens = torch.tensor([7.0, 3.0, 5.0], dtype=torch.float64)
    w = weighter.weights(torch.full((3,), 2.5, dtype=torch.float64))
    assert w.tolist() == [1 / 3] * 3
    assert row_scales(w, tokens).tolist() == pytest.approx([1.0] * 3, abs=1e-15)


@pytest.mark.parametrize("weighter", [UniformWeighter(), LossWeighter()])
def test_padding_rows_get_nothing(weighter):
    losses = torch.tensor([1.0, float("nan"), 3.0], dtype=torch.float64)
    w = weighter.weights(losses)
    assert float(w[1]) == 0 and float(w.sum()) == pytest.approx(1)
    none = weighter.weights(torch.full((2,), float("nan"), dtype=torch.float64))
    assert none.tolist() == [0, 0] and row_scales(none, torch.zeros(2, dtype=torch.float64)).tolist() == [1, 1]


def test_row_scales_keep_the_weight_of_the_batch():
    tokens = torch.tensor([7.0, 3.0, 5.0, 1.0], dtype=torch.float64)
    scales = row_scales(LossWeighter().weights(ROWS), tokens)
    assert float((scales * tokens).sum()) == pytest.approx(16)


@pytest.mark.parametrize("bad", [{"delta": 0.0}, {"temperature": 0.0}, {"strategy": "best"}])
def test_weighters_that_cannot_be(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LossWeighter(**bad)
