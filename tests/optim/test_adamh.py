"""AdamH and MuonH (B090): the card's list, letters as there; (d), (e) in tests/planning, shards in test_slices.py."""

import copy
import math

import pytest
import torch
from optimizer_zoo import Zoo, named, train
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.adamh import AdamH, MuonH, hyperball_step
from trainwright.optim.muon import newton_schulz


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow_hyperball(w, u, radius, lr):
    v = w - lr * radius * u / u.norm()
    return radius * v / v.norm()


def test_adamh_is_the_equation():
    start, lr, b1, b2, eps = draw(7, 5), 0.05, 0.8, 0.97, 1e-3
    p = nn.Parameter(start.clone())
    optimizer = AdamH([p], lr, (b1, b2), eps)
    w, m, v, radius = start.clone(), torch.zeros_like(start), torch.zeros_like(start), start.norm()
    for t in range(1, 11):
        g = draw(7, 5, seed=10 + t)
        p.grad = g.clone()
        optimizer.step()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        w = slow_hyperball(w, (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps), radius, lr)
    torch.testing.assert_close(p.data, w, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_muonh_is_the_equation(nesterov):
    start, lr, mu = draw(9, 5), 0.05, 0.9
    p = nn.Parameter(start.clone())
    optimizer = MuonH([p], lr, mu, nesterov)
    w, m = start.clone(), torch.zeros_like(start)
    for t in range(6):
        g = draw(9, 5, seed=10 + t)
        p.grad = g.clone()
        optimizer.step()
        m = mu * m + (1 - mu) * g
        w = slow_hyperball(w, newton_schulz((1 - mu) * g + mu * m if nesterov else m), start.norm(), lr)
    torch.testing.assert_close(p.data, w, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("base", ["adam", "muon"])
def test_a_the_norm_stays_for_1000_steps(base):
    p = nn.Parameter(draw(12, 20, dtype=torch.float32))
    norm = float(p.detach().double().norm())
    optimizer = AdamH([p], lr=0.1) if base == "adam" else MuonH([p], lr=0.1, dtype=torch.float32)
    start = p.detach().clone()
    for i in range(1000):
        p.grad = draw(12, 20, seed=i, dtype=torch.float32)
        optimizer.step()
    assert float(p.detach().double().norm()) == pytest.approx(norm, rel=1e-6)
    assert torch.cosine_similarity(p.detach().flatten(), start.flatten(), dim=0) < 0.5  # it went far


@pytest.mark.parametrize("lr", [1e-3, 0.02, 0.5])
def test_b_an_orthogonal_update_turns_by_atan_of_the_rate(lr):
    w, u = draw(1, 6, 9), draw(1, 6, 9, seed=1)
    u = u - w * (u * w).sum() / (w * w).sum()
    (new,) = hyperball_step([w], [u], [w.norm().view(1, 1, 1)], lr)
    cosine = (new * w).sum() / w.norm() / new.norm()
    assert math.acos(float(cosine)) == pytest.approx(math.atan(lr), rel=1e-9)


def test_c_decay_inside_the_step_is_a_rate():
    w, u, lr, decay = draw(1, 6, 9), draw(1, 6, 9, seed=1), 0.1, 0.7
    radius = [w.norm().view(1, 1, 1)]
    (decayed,) = hyperball_step([w * (1 - lr * decay)], [u], radius, lr)
    (faster,) = hyperball_step([w], [u], radius, lr / (1 - lr * decay))
    torch.testing.assert_close(decayed, faster, atol=1e-12, rtol=0)
    (plain,) = hyperball_step([w], [u], radius, lr)
    assert (plain - faster).abs().max() > 1e-4


def test_the_scale_of_gradients_and_weights_does_not_matter():
    """Ten times the weights and gradients: ten times the way."""
    ways = []
    for factor in (1.0, 10.0):
        p = nn.Parameter(draw(6, 9) * factor)
        optimizer = AdamH([p], eps=1e-30)
        for i in range(5):
            p.grad = draw(6, 9, seed=10 + i) * factor
            optimizer.step()
        ways.append((p.detach() - draw(6, 9) * factor) / factor)
    torch.testing.assert_close(*ways, atol=1e-12, rtol=1e-10)


def test_parts_and_experts_keep_their_own_norms():
    start, grads = draw(2, 9, 6) * torch.tensor([1.0, 5.0]).view(2, 1, 1), [draw(2, 9, 6, seed=i + 1) for i in range(4)]
    for make in (AdamH, MuonH):
        p, singles = nn.Parameter(start.clone()), [nn.Parameter(x.clone()) for m in start for x in m.split([5, 4])]
        a, b = make([{"params": [p], "splits": (5, 4)}]), make(singles)
        for g in grads:
            p.grad = g.clone()
            for q, x in zip(singles, [x for m in g for x in m.split([5, 4])], strict=True):
                q.grad = x.clone()
            a.step(), b.step()
        torch.testing.assert_close(p.data, torch.cat([q.data for q in singles]).view(2, 9, 6), atol=1e-12, rtol=0)
        assert a.state[p]["norm"].shape == (2, 2)


def test_a_late_parameter_steps_with_the_count_of_its_group():
    """Bias correction cancels in u / |u|, up to eps, so the first step of each has the same length and direction."""
    p, q = nn.Parameter(draw(4, 6)), nn.Parameter(draw(4, 6))
    optimizer = AdamH([p, q], eps=1e-30)
    for _ in range(9):
        p.grad = draw(4, 6, seed=2)
        optimizer.step()
    q.grad = draw(4, 6, seed=2)
    optimizer.step()
    alone = nn.Parameter(draw(4, 6))
    alone.grad = draw(4, 6, seed=2)
    AdamH([alone], eps=1e-30).step()
    torch.testing.assert_close(q.data, alone.data, atol=1e-12, rtol=0)


def test_a_resume_keeps_the_first_norm():
    """Also after something else moved the weights off their sphere: the norm is state, not measured again."""
    model = Zoo()
    optimizer = build("optimizer", "adamh").build(named(model))
    norm = float(model.up.detach().norm())
    train(model, optimizer, 2)
    other = copy.deepcopy(model)
    resumed = build("optimizer", "adamh").build(named(other))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        other.up *= 3
    train(other, resumed, 1)
    assert float(other.up.detach().norm()) == pytest.approx(norm, rel=1e-6)


def test_no_gradient_no_step():
    p = nn.Parameter(draw(4, 6, dtype=torch.float32))
    before = p.detach().clone()
    optimizer = AdamH([p])
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p.data, before)


def test_zero_matrices_are_refused_or_get_a_fan_in_norm():
    zero = nn.Parameter(torch.zeros(8, 32))
    for make in (AdamH, MuonH):
        with pytest.raises(ValueError, match="zeros"):
            make([zero])
    with pytest.raises(ConfigError, match=r"zero_init.*layers.0.out holds a matrix of zeros"):
        build("optimizer", "adamh").build([NamedParam("layers.0.out", zero, "matrix")])
    one_expert = torch.ones(3, 4, 4)
    one_expert[1] = 0
    with pytest.raises(ConfigError, match="zeros"):
        build("optimizer", "adamh").build([NamedParam("e", nn.Parameter(one_expert), "expert")])
    fused = torch.cat([torch.ones(4, 4), torch.zeros(2, 4)])
    with pytest.raises(ConfigError, match="zeros"):
        build("optimizer", "adamh").build([NamedParam("qk", nn.Parameter(fused), "matrix", (4, 2))])

    optimizer = build("optimizer", {"name": "adamh", "zero_init": "fan_in"}).build([NamedParam("w", zero, "matrix")])
    for _ in range(2):
        zero.grad = draw(8, 32, dtype=torch.float32)
        optimizer.step()
    assert float(zero.detach().norm()) == pytest.approx((8 * 32 / 32) ** 0.5, rel=1e-6)


def test_weight_decay_is_refused_with_the_reason():
    p = nn.Parameter(torch.ones(3, 3))
    for make in (AdamH, MuonH):
        with pytest.raises(ValueError, match=r"weight_decay=0.1.*norms are fixed.*weight_decay=0"):
            make([p], weight_decay=0.1)
        with pytest.raises(ValueError, match="weight_decay"):
            make([{"params": [p], "weight_decay": 0.1}])
    with pytest.raises(ConfigError, match=r"weight_decay=0.1.*norms are fixed"):
        build("optimizer", {"name": "adamh", "weight_decay": 0.1})


def test_bad_input():
    for make in (AdamH, MuonH):
        with pytest.raises(ValueError, match="takes matrices"):
            make([nn.Parameter(torch.ones(3))])
        with pytest.raises(ValueError, match="zero_init"):
            make([nn.Parameter(torch.ones(3, 3))], zero_init="no")
    for settings in ({"base": "sgd"}, {"betas": [0.9, 1.0]}, {"zero_init": "x"}, {"base": "muon", "momentum": 0.0}):
        with pytest.raises(ConfigError):
            build("optimizer", {"name": "adamh", **settings})


@pytest.mark.parametrize("base, kind", [("adam", AdamH), ("muon", MuonH)])
def test_the_recipe_line_builds_either(base, kind):
    model = Zoo()
    norms = {n: p.detach().norm() for n, p in model.named_parameters()}
    optimizer = build("optimizer", {"name": "adamh", "base": base}).build(named(model))
    assert type(optimizer.parts[0]) is kind
    losses = train(model, optimizer, 100)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    for name in ("up", "down", "square"):
        assert float(getattr(model, name).detach().norm()) == pytest.approx(float(norms[name]), rel=1e-6)
