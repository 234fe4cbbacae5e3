"""Kernel averages for quantization: the kernels, the fit of tau, rounding, and the average itself."""

import itertools
import logging
import math

import pytest
import torch
from optimizer_zoo import Zoo, named
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.averaging.lawa import LAWA
from trainwright.optim.averaging.ptq_kernel import (
    KernelAverage,
    Measured,
    choose_tau,
    correlation_of,
    fit_loss,
    kernel_weights,
    largest_tau,
    mean_lag,
    normalized,
    quantized,
    round_to_nearest,
    rounding_step,
    support,
    variance_factor,
)


def one(value, role="matrix"):
    p = nn.Parameter(value)
    return p, [NamedParam("p", p, role)]


def random_walk(average, p, steps, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    held = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            p.add_(scale * torch.randn(p.shape, generator=g).to(p.dtype))
        held.append(p.detach().clone())
        average.update(step)
    return held  # oldest first


def inside(average, p, **kernel):
    with average.swapped(**kernel):
        return p.detach().clone()


# -- (a) weights and limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.5, 1.0, 2.0, 7.5, math.inf])
@pytest.mark.parametrize("reach", [0.0, 1e-12, 0.4, 1.0, 2.0, 6.5, 24.0])
def test_weights_are_an_average(p, reach):
    tau = largest_tau(p, 1) * reach
    w = kernel_weights(p, tau, 30)
    assert len(w) == 30 and min(w) >= 0
    assert abs(math.fsum(w) - 1) < 1e-12
    assert all(a >= b for a, b in itertools.pairwise(w))  # the newest weighs most
    if p < math.inf:
        assert sum(v > 0 for v in w) == max(1, math.ceil(reach)) == support(p, tau)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0])
def test_the_family_is_its_formula(p):
    tau, size = 9.0 / p, 9
    raw = [(1 - s / (p * tau)) ** p for s in range(size)]
    assert kernel_weights(p, tau, 12) == pytest.approx([v / sum(raw) for v in raw] + [0.0] * 3, rel=1e-13)


def test_limits_of_the_family():
    for k in range(1, 40):  # p -> 0 with p tau = k: the plain mean of k, however k / p rounds
        for p in (1e-9, 3e-10, 7e-8):
            assert kernel_weights(p, k / p, 40) == pytest.approx([1 / k] * k + [0.0] * (40 - k), rel=1e-5)
    tau, size = 5.0, 60_000  # p -> infinity: e^(-s / tau)
    steep, exponential = kernel_weights(1e4, tau, size), kernel_weights(math.inf, tau, size)
    assert exponential[:100] == pytest.approx(steep[:100], rel=0.03, abs=1e-6)
    decay = math.exp(-1 / tau)
    assert exponential[:50] == pytest.approx([(1 - decay) * decay**s for s in range(50)], rel=1e-9)
    assert kernel_weights(1.0, 3.0, 3) == pytest.approx([3 / 6, 2 / 6, 1 / 6])  # p = 1: a ramp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tau", [0.0, 1e-9, 1.0])
def test_small_tau_is_the_last_checkpoint_bit_for_bit(dtype, tau):
    p, params = one(torch.zeros(500, dtype=dtype))
    average = KernelAverage(params, size=4, p=1.0, tau=tau, every=2)
    held = random_walk(average, p, 11)
    assert torch.equal(inside(average, p), held[9]) and not torch.equal(held[9], held[10])


@pytest.mark.parametrize("steps", [2, 5, 13])
def test_uniform_is_lawa(steps):
    p, params = one(torch.zeros(500))
    average = KernelAverage(params, size=5, p=1e-9, tau=5e9, every=1)
    lawa = LAWA(params, k=5, every=1)
    for step in range(1, steps + 1):
        random_walk(average, p, 1, seed=step)
        lawa.update(step)
    torch.testing.assert_close(inside(average, p), inside(lawa, p), rtol=0, atol=1e-6)
    assert float((inside(average, p) - p.detach()).abs().max()) > 0.1


def test_the_average_is_the_weighted_sum():
    p, params = one(torch.zeros(300))
    average = KernelAverage(params, size=6, p=2.0, tau=3.0, every=1)
    held = [t.double() for t in random_walk(average, p, 50, scale=10.0)]
    expected = sum(w * held[-1 - s] for s, w in enumerate(kernel_weights(2.0, 3.0, 6)))
    torch.testing.assert_close(inside(average, p).double(), expected, rtol=1e-6, atol=1e-5)


def test_with_few_snapshots_the_kernel_is_cut_off():
    p, params = one(torch.zeros(300))
    average = KernelAverage(params, size=4, p=1.0, tau=4.0, every=1)
    held = random_walk(average, p, 2)
    torch.testing.assert_close(inside(average, p), (4 * held[1] + 3 * held[0]) / 7, rtol=1e-5, atol=1e-6)
    assert average.weights(2) == pytest.approx([4 / 7, 3 / 7])


# -- (b) equal lag --------------------------------------------------------------------------------------------------


def with_lag(p, lag, size=4000):
    low, high = 0.1, 0.9 * largest_tau(p, size)
    for _ in range(100):
        tau = (low + high) / 2
        low, high = (tau, high) if mean_lag(kernel_weights(p, tau, size)) < lag else (low, tau)
    return kernel_weights(p, tau, size)


def test_variance_at_equal_lag():
    """Lag 10. The plain mean of 21 and the exponential leave 1/21, the ramp the least of all."""
    uniform = kernel_weights(1e-9, 21e9, 21)
    assert mean_lag(uniform) == pytest.approx(10.0) and variance_factor(uniform) == pytest.approx(1 / 21)
    variances = {}
    for p, expected in [(math.inf, 1 / 21), (1.0, 0.04234), (2.0, 0.0429), (0.5, 0.0429)]:
        w = with_lag(p, 10.0)
        assert mean_lag(w) == pytest.approx(10.0, abs=1e-6)
        variances[p] = variance_factor(w)
        assert variances[p] == pytest.approx(expected, abs=5e-5), p
    for p in (0.8, 0.95, 1.05, 1.25):
        assert variances[1.0] < variance_factor(with_lag(p, 10.0)) < variances[2.0]
    assert variances[1.0] < min(variances[0.5], variances[2.0])


def test_the_ramp_is_best_among_all_weights():
    """min V + 2 lambda lag over the simplex, by projected gradient, is a ramp."""
    s = torch.arange(30, dtype=torch.float64)
    ramp = torch.tensor(kernel_weights(1.0, 12.0, 30), dtype=torch.float64)
    slope = float(ramp[0] - ramp[1])  # the multiplier that this ramp belongs to
    w = torch.full((30,), 1 / 30, dtype=torch.float64)
    for _ in range(4000):
        w = w - 0.1 * (2 * w + 2 * slope * s)
        ordered = w.sort(descending=True).values  # projection onto the simplex
        shift = (ordered.cumsum(0) - 1) / torch.arange(1, 31)
        w = (w - shift[(ordered > shift).nonzero().max()]).clamp(min=0)
    torch.testing.assert_close(w, ramp, rtol=0, atol=1e-6)


# -- (c) correlated snapshots ---------------------------------------------------------------------------------------


def ar1(average, p, steps, r, seed=0):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        p.copy_(torch.randn(p.shape, generator=g))
        for step in range(1, steps + 1):
            average.update(step)
            p.copy_(r * p + (1 - r * r) ** 0.5 * torch.randn(p.shape, generator=g))


@pytest.mark.parametrize("r", [0.0, 0.6, 0.9])
@pytest.mark.parametrize(("p", "tau"), [(1.0, 8.0), (2.0, 3.0), (math.inf, 1.1)])
def test_variance_of_correlated_snapshots(r, p, tau):
    weight, params = one(torch.zeros(200_000))
    average = KernelAverage(params, size=8, p=p, tau=tau, every=1)
    ar1(average, weight, 8, r)
    expected = variance_factor(kernel_weights(p, tau, 8), r)
    assert float(inside(average, weight).var()) == pytest.approx(expected, rel=0.05)
    if r == 0:
        assert expected == pytest.approx(sum(w * w for w in kernel_weights(p, tau, 8)))


@pytest.mark.parametrize("r", [0.0, 0.3, 0.9])
def test_correlation_time_from_distances(r, caplog):
    weight, params = one(torch.zeros(100_000))
    average = KernelAverage(params, size=6, tau=6.0, every=1)
    ar1(average, weight, 9, r)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        time = average.correlation_time()
    assert time == pytest.approx(-1 / math.log(r) if r else 0.0, rel=0.1, abs=0.25)
    assert ("further apart" in caplog.text) == (r == 0.9)


@pytest.mark.parametrize("r", [0.0, 0.9])
def test_validation_warns_of_snapshots_that_are_too_close(r, caplog):
    """Whoever swaps the average in, as validation and export do, is told: once, when all snapshots are there."""
    weight, params = one(torch.zeros(100_000))
    average = KernelAverage(params, size=6, tau=6.0, every=1)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        ar1(average, weight, 4, r)
        with average.swapped():
            pass
        assert not caplog.records
        ar1(average, weight, 9, r)
        for _ in range(2):
            with average.swapped():
                pass
    assert caplog.text.count("further apart") == (r == 0.9)


def test_weights_that_walk_away_have_no_correlation_time():
    weight, params = one(torch.zeros(2))
    average = KernelAverage(params, size=4, tau=4.0, every=1)
    with pytest.raises(ValueError, match="three snapshots"):
        average.correlation_time()
    for step in range(1, 5):
        with torch.no_grad():
            weight.add_(1.0)
        average.update(step)
    assert average.correlation_time() == math.inf
    assert correlation_of(0.0, 0.0) == 0.0 and correlation_of(2.0, 3.0) == 0.5


# -- (d) constant weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "tau"), [(1.0, 8.0), (0.3, 20.0), (math.inf, 1.0)])
def test_weights_that_do_not_move_are_their_own_average(p, tau):
    weight, params = one(torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3)
    average = KernelAverage(params, size=8, p=p, tau=tau, every=1)
    for step in range(1, 12):
        average.update(step)
    assert torch.equal(inside(average, weight), weight.detach())


# -- (e) choosing tau -----------------------------------------------------------------------------------------------


def measurements(lag_cost, noise, rounding, taus=(0.0, 4.0, 9.0, 16.0), widths=(2, 3, 4, 8), p=1.0, size=32, error=0.0):
    g = torch.Generator().manual_seed(0)
    points = []
    for bits in widths:
        for tau in taus:
            w = kernel_weights(p, tau, size)
            cost = noise + rounding * rounding_step(bits) ** 2
            loss = 3.0 + 1.0 / bits + lag_cost * mean_lag(w) + cost * variance_factor(w)
            points.append(Measured(tau, bits, loss + error * float(torch.randn((), generator=g))))
    return points


@pytest.mark.parametrize("p", [0.5, 1.0, math.inf])
def test_the_fit_finds_the_costs(p):
    taus = [largest_tau(p, 32) * f for f in (0.0, 0.2, 0.5, 1.0)]
    model = fit_loss(measurements(0.01, 0.05, 6.0, taus, p=p), p, 32)
    assert (model.lag_cost, model.noise, model.rounding) == pytest.approx((0.01, 0.05, 6.0), rel=1e-6)
    assert model.offsets == pytest.approx({b: 3 + 1 / b for b in (2, 3, 4, 8)}, rel=1e-9)
    assert model(taus[1], 3, p, 32) == pytest.approx(measurements(0.01, 0.05, 6.0, [taus[1]], [3], p=p)[0].loss)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("costs", [(0.01, 0.05, 6.0), (0.002, 0.0, 1.0), (0.0, 0.1, 1.0), (0.1, 0.0, 0.0)])
@pytest.mark.parametrize("error", [0.0, 0.05])
def test_fewer_bits_never_get_less_averaging(p, costs, error):
    taus = [largest_tau(p, 32) * f for f in (0.0, 0.1, 0.4, 0.9)]
    chosen = choose_tau(measurements(*costs, taus, p=p, error=error), p=p, size=32)
    assert chosen[2] >= chosen[3] >= chosen[4] >= chosen[8] >= 0
    if costs == (0.01, 0.05, 6.0) and error == 0:
        assert chosen[2] > chosen[3] > chosen[4] > chosen[8]


@pytest.mark.parametrize("costs", [(-0.01, 0.5, 6.0), (0.01, -0.5, 6.0), (0.01, 0.5, -6.0), (-0.01, -0.5, -6.0)])
def test_costs_are_never_negative(costs):
    """Losses that contradict the model: the fit is the best without a negative cost, by projected gradient."""
    points = measurements(*costs)
    model = fit_loss(points, 1.0, 32)
    found = torch.tensor([model.lag_cost, model.noise, model.rounding], dtype=torch.float64)
    assert (found >= 0).all() and (found == 0).any()
    widths = sorted(model.offsets)
    rows = []
    for m in points:
        w = kernel_weights(1.0, m.tau, 32)
        v = variance_factor(w)
        rows.append([mean_lag(w), v, v * rounding_step(m.bits) ** 2])
    a, y = torch.tensor(rows, dtype=torch.float64), torch.tensor([m.loss for m in points], dtype=torch.float64)
    for bits in widths:  # the constants are free: only differences to the mean of a width count
        of = torch.tensor([m.bits == bits for m in points])
        a[of] -= a[of].mean(0)
        y[of] -= y[of].mean()
    scale = a.norm(dim=0)
    a = a / scale
    x = torch.zeros(3, dtype=torch.float64)
    for _ in range(5000):
        x = (x - 0.3 * a.T @ (a @ x - y)).clamp(min=0)
    torch.testing.assert_close(found, x / scale, rtol=1e-4, atol=1e-6)


def test_the_choice_is_the_minimum():
    a, b0, bq = 0.01, 0.05, 6.0
    chosen = choose_tau(measurements(a, b0, bq), p=1.0, size=32)
    for bits, tau in chosen.items():

        def cost(t, bits=bits):
            w = kernel_weights(1.0, t, 32)
            return a * mean_lag(w) + (b0 + bq * rounding_step(bits) ** 2) * variance_factor(w)

        assert cost(tau) <= min(cost(32 * i / 500) for i in range(501)) * 1.02


def test_the_plain_checkpoint_is_chosen_where_averaging_costs_more():
    assert choose_tau(measurements(1.0, 0.0, 0.1, taus=(2.0, 4.0, 8.0)), p=1.0, size=32) == dict.fromkeys(
        (2, 3, 4, 8), 0.0
    )
    assert choose_tau(measurements(0.0, 1.0, 0.1), p=1.0, size=32)[8] == 32.0


def test_widths_that_were_not_measured():
    points = measurements(0.01, 0.05, 6.0, widths=(3, 4))
    chosen = choose_tau(points, [2, 3, 5], p=1.0, size=32)
    assert chosen == choose_tau(measurements(0.01, 0.05, 6.0, widths=(2, 3, 5)), p=1.0, size=32)
    alone = measurements(0.01, 0.05, 6.0, widths=(3,))
    assert choose_tau(alone, p=1.0, size=32) == {3: chosen[3]}
    with pytest.raises(ValueError, match="2 bits were not measured"):
        choose_tau(alone, [2], p=1.0, size=32)


def test_too_few_measurements():
    with pytest.raises(ValueError, match="3 bits were measured at 2"):
        choose_tau(measurements(0.1, 0.1, 0.1, widths=(3,), taus=(0.0, 4.0)), p=1.0, size=32)
    with pytest.raises(ValueError, match="measured losses"):
        choose_tau([], p=1.0, size=32)
    with pytest.raises(ValueError, match="finite"):
        choose_tau([Measured(float(t), 3, math.nan) for t in range(4)], p=1.0, size=32)
    with pytest.raises(ValueError, match="8 are missing"):
        choose_tau(measurements(0.1, 0.1, 0.1, taus=(0.0, 4.0, 16.0)), p=1.0, size=8)


# -- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [4, 7, 128, None])
def test_rounding_against_a_loop(bits, group):
    w = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    w[0, :4], w[1] = 0.0, w[1].abs() + 1.0  # a group of zeros, and rows on one side of zero
    w[2] = -w[2].abs() - 1.0
    found = round_to_nearest(w, bits, group)
    assert found.shape == w.shape and found.dtype == w.dtype
    size = group or 30
    for row in range(5):
        for start in range(0, 30, size):
            part = w[row, start : start + size].double()
            low, high = min(0.0, float(part.min())), max(0.0, float(part.max()))
            step = (high - low) / (2**bits - 1) or 1.0
            zero = round(-low / step)
            codes = ((part / step).round() + zero).clamp(0, 2**bits - 1)
            got = found[row, start : start + size].double()
            torch.testing.assert_close(got, (codes - zero) * step, rtol=1e-5, atol=1e-6)
            assert len(got.unique()) <= 2**bits
            assert float((got - part).abs().max()) <= step * 1.0001


def test_rounding_keeps_what_the_format_holds():
    w = torch.tensor([[0.0, 0.5, -1.0, 0.25, 0.0, 0.0]], dtype=torch.bfloat16)
    assert torch.equal(round_to_nearest(w, 8, 2).float()[0, 4:], torch.zeros(2))
    grid = torch.arange(-8, 8).float()[None] * 0.125
    assert torch.equal(round_to_nearest(grid, 4), grid)
    assert not torch.equal(round_to_nearest(grid, 3), grid)
    many = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    errors = [float((round_to_nearest(many, b) - many).square().mean()) for b in (2, 3, 4, 8)]
    steps = [rounding_step(b) ** 2 for b in (2, 3, 4, 8)]
    for e, s in zip(errors[1:], steps[1:], strict=True):  # the error goes as the square of the step
        assert e / s == pytest.approx(errors[1] / steps[1], rel=0.1)
    assert round_to_nearest(torch.zeros(0, 5), 3).shape == (0, 5)  # a rank's empty shard


@pytest.mark.parametrize(
    ("w", "bits", "group", "words"),
    [
        (torch.zeros(3), 0, 128, "bits=0"),
        (torch.zeros(3), 4, 0, "group=0"),
        (torch.zeros(3, dtype=torch.int8), 4, 128, "int8"),
        (torch.zeros(()), 4, 128, "0-d"),
    ],
)
def test_rounding_that_makes_no_sense(w, bits, group, words):
    with pytest.raises(ValueError, match=words):
        round_to_nearest(w, bits, group)


def test_measuring_rounded_averages():
    """The whole way: swap in the average, round its matrices, look, and get the live weights back."""
    model = Zoo()
    params = named(model)
    average = KernelAverage(params, size=4, tau=4.0, every=1)
    for step in range(1, 7):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(step)))
        average.update(step)
    live = {n: p.detach().clone() for n, p in model.named_parameters()}
    with average.swapped(tau=2.0):
        mean = {n: p.detach().clone() for n, p in model.named_parameters()}
        with quantized(params, 3):
            for n in params:
                wanted = mean[n.name]
                if n.role in ("matrix", "expert"):
                    assert not torch.equal(round_to_nearest(wanted, 3), wanted)
                    wanted = round_to_nearest(wanted, 3)
                assert torch.equal(n.param, wanted), n.name
        assert all(torch.equal(p, mean[n]) for n, p in model.named_parameters())
    assert all(torch.equal(p, live[n]) for n, p in model.named_parameters())


# -- bad settings ---------------------------------------------------------------------------------------------------


def test_a_kernel_beyond_the_ring_is_refused():
    with pytest.raises(ConfigError, match=r"reaches over 12 snapshots, 8 are held: 4 are missing; hold 12, or .*tau"):
        build("average", {"name": "ptq_kernel", "size": 8, "p": 2.0, "tau": 6.0})
    with pytest.raises(ConfigError, match="7 are held: 7 are missing"):
        build("average", {"name": "ptq_kernel", "size": 7, "p": "inf", "tau": 2.0})
    assert build("average", {"name": "ptq_kernel", "size": 14, "p": "inf", "tau": 2.0}).build([]).p == math.inf
    p, params = one(torch.zeros(3))
    average = KernelAverage(params, size=8, tau=8.0, every=1)
    with pytest.raises(ValueError, match="no snapshot"):
        average.swapped(tau=4.0)
    random_walk(average, p, 3)
    with pytest.raises(ValueError, match="5 snapshots, 3 are held: 2 are missing"):
        average.swapped(tau=5.0)
    assert inside(average, p, tau=3.0).shape == (3,)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"p": 0.0}, "p"),
        ({"p": -1.0}, "p"),
        ({"tau": -0.5}, "tau"),
        ({"size": 0}, "size"),
        ({"every": 0}, "every"),
        ({"start": -1}, "start"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(ConfigError, match=words):
        build("average", {"name": "ptq_kernel", **settings})
    with pytest.raises(ValueError, match=r"not above 0|not a finite|missing|at least|negative"):
        KernelAverage(one(torch.zeros(1))[1], **settings)


@pytest.mark.parametrize("p", [0.0, -1.0, math.nan])
def test_kernels_that_make_no_sense(p):
    with pytest.raises(ValueError, match="p="):
        kernel_weights(p, 1.0, 4)


def test_negative_weights_are_refused():
    with pytest.raises(ValueError, match="none negative"):
        normalized([1.5, -0.5])
    with pytest.raises(ValueError, match="not all 0"):
        normalized([0.0, 0.0])
