"""Effective learning rate (B090): measurement, theory and the transfer of rates; letters as on the card."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.core.errors import InputError
from trainwright.core.params import NamedParam
from trainwright.optim.adamh import AdamH
from trainwright.planning.effective_lr import (
    EffectiveRateMeter,
    NoOptimum,
    Trial,
    effective_rates,
    equilibrium_angle,
    equilibrium_norm,
    fit_law,
    fit_parabola,
    regress,
    relaxation_steps,
    transfer,
    turn_angles,
)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Theory


@pytest.mark.parametrize("product", [1e-3, 1e-2])
def test_d_decay_leads_to_the_norm_and_the_angle_of_the_theory(product):
    decay, length = 0.1, 3.0
    lr = product / decay
    g = torch.Generator().manual_seed(0)
    w = draw(1, 2000, seed=1)
    w = 5 * w / w.norm()
    norms, angles = [], []
    settle = int(10 * relaxation_steps(lr, decay))
    for t in range(5 * settle):  # chance alignments make the norm swing over the relaxation time, too
        u = torch.randn(1, 2000, generator=g, dtype=torch.float64)
        new = w * (1 - lr * decay) - lr * length * u / u.norm()
        if t >= settle:
            angles.append(float(turn_angles(w, new)))
            norms.append(float(new.norm()))
        w = new
    assert np.mean(norms) == pytest.approx(equilibrium_norm(lr, decay, length), rel=0.01)
    assert np.mean(angles) == pytest.approx(equilibrium_angle(lr, decay), rel=0.01)


def test_d_the_squared_norm_relaxes_exponentially():
    lr, decay, length = 0.02, 0.1, 1.0
    after = int(relaxation_steps(lr, decay))
    end = equilibrium_norm(lr, decay, length) ** 2
    w2 = 4 * end
    for _ in range(after):
        w2 = w2 * (1 - lr * decay) ** 2 + (lr * length) ** 2
    assert (w2 - end) / (3 * end) == pytest.approx(math.exp(-1), rel=0.01)


# Measuring


def test_rates_of_stacks_and_parts():
    before, way = draw(2, 5, 4), draw(2, 5, 4, seed=1)
    found = effective_rates(before, before * (1 - 0.3) - way, 0.3, (3, 2))
    wanted = [
        w.norm() / b.norm()
        for b, w in zip(before, way, strict=True)
        for b, w in zip(b.split([3, 2]), w.split([3, 2]), strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(wanted))
    turned = effective_rates(before.mT, before.mT * (1 - 0.3) - way.mT, 0.3, (-3, -2))
    torch.testing.assert_close(turned, found)
    assert effective_rates(torch.zeros(3, 3), torch.ones(3, 3)).tolist() == [0.0]


@pytest.mark.parametrize("angle", [1e-6, 1e-3, 1.0, 3.0])
def test_angles_small_and_large(angle):
    a, b = draw(1, 50, dtype=torch.float64), draw(1, 50, seed=1)
    b = b - a * (a * b).sum() / (a * a).sum()
    turned = 7 * (math.cos(angle) * a / a.norm() + math.sin(angle) * b / b.norm())
    assert float(turn_angles(a, turned)) == pytest.approx(angle, rel=1e-3)


def test_the_meter_sees_what_the_optimizer_did():
    """AdamW with decay, rate halved in the second half, one matrix fused and one without gradient."""
    w, q, still, norm = (nn.Parameter(draw(*s, seed=i)) for i, s in enumerate([(6, 4), (5, 4), (3, 3), (4,)]))
    params = [
        NamedParam("w", w, "matrix"), NamedParam("q", q, "matrix", (3, 2)), NamedParam("still", still, "matrix"),
        NamedParam("norm", norm, "norm"),
    ]  # fmt: skip
    optimizer = torch.optim.AdamW([w, q, still, norm], lr=0.1, weight_decay=0.5, betas=(0.9, 0.9))
    meter = EffectiveRateMeter(optimizer, params)
    seen, moments = [], {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in (w, q)}
    for t in range(1, 5):
        lr = 0.1 if t <= 2 else 0.05
        optimizer.param_groups[0]["lr"] = lr
        rates = []
        for i, p in enumerate((w, q)):
            p.grad = draw(*p.shape, seed=10 * t + i)
            m, v = (0.9 * old + 0.1 * x for old, x in zip(moments[p], (p.grad, p.grad**2), strict=True))
            moments[p] = m, v
            u = m / (1 - 0.9**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-8)
            for part, x in zip(p.split([6] if p is w else [3, 2]), u.split([6] if p is w else [3, 2]), strict=True):
                rates.append(float(lr * x.norm() / part.detach().norm()))
        with meter.step():
            optimizer.step()
        seen.append((24 * rates[0] + 12 * rates[1] + 8 * rates[2] + 9 * 0) / (24 + 20 + 9))
    measured = meter.result()
    assert measured.peak == pytest.approx(np.mean(seen[:2]), rel=1e-6)
    assert measured.mean == pytest.approx(np.mean(seen), rel=1e-6)
    assert measured.steps == 4 and set(measured.by_name) == {"w", "q", "still"}
    assert len(measured.by_name["q"]) == 2 and measured.by_name["still"] == [0.0]


def test_the_meter_reads_adamh_s_rate_by_hooks():
    p = nn.Parameter(draw(40, 50))
    optimizer = AdamH([p], lr=0.03)
    meter = EffectiveRateMeter(optimizer, [NamedParam("p", p, "matrix")], every=3)
    handles = meter.attach()
    for i in range(7):
        p.grad = draw(40, 50, seed=1 + i)
        optimizer.step()
    assert meter.result().steps == 3
    assert meter.result().mean == pytest.approx(0.03, rel=0.02)  # up to what of u is along W
    for handle in handles:
        handle.remove()
    optimizer.step(), optimizer.step(), optimizer.step()
    assert meter.result().steps == 3


def test_the_meter_has_to_have_something_to_measure():
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([p])
    with pytest.raises(InputError, match="no hidden matrices"):
        EffectiveRateMeter(optimizer, [NamedParam("p", p, "embedding")])
    with pytest.raises(InputError, match="no step was measured"):
        EffectiveRateMeter(optimizer, [NamedParam("p", p, "matrix")]).result()


# Parabolas

GRID = [1e-3 * 2**k for k in range(7)]


def bowl(rate, best=6e-3, height=3.0, curvature=0.2):
    return height + 0.5 * curvature * math.log(rate / best) ** 2


@pytest.mark.parametrize("points", [3, 5])
def test_a_parabola_is_found_exactly(points):
    rate, loss, curvature = fit_parabola(GRID, [bowl(r) for r in GRID], points)
    assert (rate, loss, curvature) == pytest.approx((6e-3, 3.0, 0.2), rel=1e-9)


def test_far_points_and_order_do_not_matter():
    losses = [bowl(r) for r in GRID]
    losses[0] += 5  # far from the optimum the loss is no parabola
    order = [3, 0, 6, 2, 5, 1, 4]
    rate, _, _ = fit_parabola([GRID[i] for i in order], [losses[i] for i in order])
    assert rate == pytest.approx(6e-3, rel=1e-9)


def test_seeds_are_averaged():
    rates = [r for r in GRID for _ in range(2)]
    losses = [bowl(r) + sign * 0.5 for r in GRID for sign in (-1, 1)]
    assert fit_parabola(rates, losses)[0] == pytest.approx(6e-3, rel=1e-9)


@pytest.mark.parametrize("best, side", [(1e-4, "lower"), (1.1e-3, "lower"), (1.0, "higher")])
def test_an_optimum_on_the_edge_is_refused(best, side):
    with pytest.raises(NoOptimum, match=f"edge.*add {side}"):
        fit_parabola(GRID, [bowl(r, best) for r in GRID])


def test_diverged_runs_are_an_edge():
    losses = [bowl(r) for r in GRID[:3]] + [math.nan, math.inf, math.nan, math.nan]
    with pytest.raises(NoOptimum, match="edge"):
        fit_parabola(GRID, losses)
    losses = [bowl(r) for r in GRID[:5]] + [math.nan, math.inf]
    assert fit_parabola(GRID, losses)[0] == pytest.approx(6e-3, rel=1e-9)


def test_too_few_rates_and_flat_losses_are_refused():
    with pytest.raises(NoOptimum, match="3 or more"):
        fit_parabola(GRID[:2], [3.0, 2.9])
    with pytest.raises(NoOptimum, match="3 or more"):
        fit_parabola([1e-3] * 5, [3.0] * 5)
    with pytest.raises(NoOptimum, match=r"edge|flat"):
        fit_parabola(GRID, [3.0] * 7)
    with pytest.raises(InputError, match="above 0"):
        fit_parabola([0.0, 1.0, 2.0], [3.0, 2.0, 3.0])
    with pytest.raises(InputError, match="3 or more"):
        fit_parabola(GRID, [bowl(r) for r in GRID], points=2)


# Laws

SIZES = [5e9, 1e10, 2e10, 4e10, 8e10]


def sweep(law, effective=None, noise=0.0, params=10**8, seed=0, setup=""):
    """Trials over SIZES whose best lr is law(D); effective(lr, D) is what they measured."""
    g = np.random.default_rng(seed)
    trials = []
    for tokens in SIZES:
        for k in range(-3, 4):
            lr = 2e-3 * 2**k
            loss = bowl(lr, law(tokens)) + noise * g.standard_normal()
            trials.append(Trial(params, int(tokens), lr, loss, effective(lr, tokens) if effective else None, setup))
    return trials


def power(tokens, exponent=-0.3):
    return 2.2e-3 * (tokens / 2e10) ** exponent


def bent(tokens):
    """Upward at scale, as the raw rate's."""
    return power(tokens) * math.exp(0.08 * math.log(tokens / 2e10) ** 2)


def test_e_the_exponent_of_a_known_law_is_recovered():
    assert fit_law(sweep(power)).exponent == pytest.approx(-0.3, abs=1e-9)
    found = [fit_law(sweep(power, noise=0.001, seed=seed)).exponent for seed in range(20)]
    assert np.mean(found) == pytest.approx(-0.3, abs=0.02)
    assert fit_law(sweep(power, noise=5e-4)).exponent == pytest.approx(-0.3, abs=0.02)


def test_e_the_straighter_law_is_chosen_and_is_the_better_extrapolation():
    """The best eta_eff is a power of D, and a bent map leads from lr to it."""
    to_effective = lambda lr, tokens: 0.5 * lr * power(tokens, -0.2) / bent(tokens)  # noqa: E731
    trials = sweep(bent, to_effective, noise=2e-4)
    found = transfer(trials, 3.2e11)
    assert found.chosen.rate == "effective_lr" and found.other is not None
    assert found.chosen.bend < found.other.bend and found.other.bend > 4
    assert found.chosen.exponent == pytest.approx(-0.2, abs=0.02)
    truth = 0.5 * power(3.2e11, -0.2)
    assert found.prediction.low < truth < found.prediction.high
    assert found.prediction.value == pytest.approx(truth, rel=0.1)
    assert found.other.at(3.2e11).value < 0.8 * bent(3.2e11)  # the raw line misses
    # the other way round the raw rate is straight
    trials = sweep(power, lambda lr, tokens: lr * bent(tokens) / power(tokens), noise=2e-4)
    back = transfer(trials, 3.2e11)
    assert back.chosen.rate == "lr" and back.lr == back.prediction.value


def test_the_rate_for_the_optimizer():
    """eta_eff = 3 sqrt(lr): back to lr where the runs of the largest D measured it, else not."""
    trials = sweep(power, lambda lr, tokens: 3 * lr**0.5, noise=1e-4)
    found = transfer(trials, 1.6e11)
    if found.chosen.rate == "effective_lr":
        assert found.lr == pytest.approx((found.prediction.value / 3) ** 2, rel=1e-6)
    assert found.lr == pytest.approx(power(1.6e11), rel=0.05)
    steep = sweep(lambda d: power(d, -0.7), lambda lr, tokens: 3 * lr**0.5)
    effective = fit_law(steep, "effective_lr")
    assert effective.exponent == pytest.approx(-0.35, abs=1e-6)
    assert transfer(steep, 1e15).lr in (None, pytest.approx(power(1e15, -0.7), rel=1e-6))


def test_regression_is_that_of_scipy():
    from scipy.stats import linregress

    rates = [power(d) * math.exp(0.05 * math.sin(7 * i)) for i, d in enumerate(SIZES)]
    fit, theirs = regress(SIZES, rates, 1), linregress(np.log(SIZES), np.log(rates))
    assert fit.coefficients[1] == pytest.approx(theirs.slope)
    assert math.sqrt(fit.covariance[1, 1]) == pytest.approx(theirs.stderr)
    assert fit.ratio == pytest.approx(abs(theirs.slope) / theirs.stderr)
    coefficients, covariance = np.polyfit(np.log(SIZES) - fit.centre, np.log(rates), 2, cov=True)
    quadratic = regress(SIZES, rates, 2)
    assert quadratic.coefficients[::-1] == pytest.approx(coefficients)
    assert quadratic.ratio == pytest.approx(abs(coefficients[0]) / math.sqrt(covariance[0, 0]))


def test_the_interval_covers_what_it_says():
    """Optima with lognormal errors about a power law: the next one is in the 90 % interval in 90 % of cases."""
    from trainwright.planning.effective_lr import Law, Optimum

    g = np.random.default_rng(0)
    inside = 0
    for _ in range(600):
        errors = np.exp(0.1 * g.standard_normal(len(SIZES) + 1))
        rates = [power(d) * e for d, e in zip(SIZES, errors, strict=False)]
        optima = [Optimum(int(d), r, 3.0, 0.2) for d, r in zip(SIZES, rates, strict=True)]
        found = Law("lr", optima, regress(SIZES, rates, 1), None).at(1.6e11, confidence=0.9)
        inside += found.low < power(1.6e11) * errors[-1] < found.high
    assert 0.86 < inside / 600 < 0.94


def test_three_sizes_give_a_line_and_an_interval_but_no_bend():
    trials = [t for t in sweep(power, noise=1e-3) if t.tokens < 3e10]
    law = fit_law(trials)
    assert law.quadratic is None and math.isnan(law.bend)
    assert law.linear.freedom == 1 and math.isfinite(law.at(1e11).high)


def test_what_cannot_be_compared_is_refused():
    trials = sweep(power)
    with pytest.raises(InputError, match="one model size"):
        fit_law(trials + sweep(power, params=2 * 10**8))
    with pytest.raises(InputError, match=r"different setups.*batch 1M.*cosine"):
        fit_law(sweep(power, setup="cosine") + sweep(power, setup="batch 1M"))
    with pytest.raises(InputError, match="3 or more data sizes, got 2"):
        fit_law([t for t in trials if t.tokens < 1.5e10])
    with pytest.raises(InputError, match="effective_lr was not measured in 7 trials"):
        fit_law(trials, "effective_lr")
    with pytest.raises(NoOptimum, match=r"5000000000 tokens, lr: .*edge"):
        fit_law([t for t in trials if t.tokens > 6e9 or t.lr < 2e-3])
    with pytest.raises(InputError):
        regress([1e9, 1e9, 2e9], [1.0, 1.0, 1.0], 2)
