"""SWAN (B101): the card's list, letters as there."""

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.optim.muon import Muon
from trainwright.optim.swan import Swan, grad_norm, swan_direction, whiten


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polar(g):
    left, s, right = torch.linalg.svd(g, full_matrices=False)
    return left @ torch.diag_embed((s > 1e-9 * s[..., :1]).to(g.dtype)) @ right


def test_a_half_converges():
    s = torch.linalg.svdvals(whiten(draw(64, 256)))
    assert (s - 1).abs().max() < 1e-12
    near_square = draw(64, 65)
    assert torch.linalg.svdvals(whiten(near_square, steps=10)).min() < 0.5  # not there yet
    assert (torch.linalg.svdvals(whiten(near_square, steps=30)) - 1).abs().max() < 1e-9


def test_b_the_published_beta_does_not_converge():
    s = torch.linalg.svdvals(whiten(draw(64, 256), beta=0.8))
    assert 0.56 <= s.min() < 0.7 and 1.4 < s.max() <= 1.601
    for beta, converges in ((0.36, True), (0.64, True), (0.32, False), (0.69, False)):
        # At the fixed point b T = 1, so Z Y = 3 - 1 / b, and D's singular values are its root.
        s = torch.linalg.svdvals(whiten(draw(8, 32), steps=300, beta=beta))
        spread = float((s - (3 - 1 / beta) ** 0.5).abs().max()) if beta > 1 / 3 else float(s.max())
        assert (spread < 1e-6) == converges if beta > 1 / 3 else s.max() < 1e-3, beta


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16), (3, 6, 9)])
@pytest.mark.parametrize("method", ["newton_schulz", "nsds", "exact", "polar"])
def test_c_the_norm_is_that_of_the_normalised_gradient(shape, method):
    d = swan_direction(draw(*shape) * 1e-4, method=method)
    norms = d.norm(dim=(-2, -1))
    expected = (shape[-2] * shape[-1]) ** 0.5
    torch.testing.assert_close(norms, torch.full_like(norms, expected), atol=0, rtol=1e-12)


def test_d_centring_makes_a_square_one_singular():
    x = grad_norm(draw(16, 16))
    assert (x @ torch.ones(16, dtype=x.dtype)).abs().max() < 1e-12
    for method in ("newton_schulz", "exact"):
        d = whiten(x, method, steps=30)
        s = torch.linalg.svdvals(d)
        assert d.isfinite().all() and (s < 1e-6).sum() == 1
        assert (s[:-1] - 1).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (2, 8, 40)])
def test_e_it_is_the_polar_factor(shape):
    x = grad_norm(draw(*shape))
    wanted = polar(x) * (x.norm(dim=(-2, -1)) / polar(x).norm(dim=(-2, -1)))[..., None, None]
    torch.testing.assert_close(swan_direction(draw(*shape), steps=12), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(swan_direction(draw(*shape), method="exact"), wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (2, 8, 40), (24, 25)])
def test_polar_is_newton_schulz_once_both_have_converged(shape):
    g = draw(*shape)
    wanted = swan_direction(g, steps=40)
    torch.testing.assert_close(swan_direction(g, method="polar", steps=16), wanted, atol=1e-9, rtol=0)
    torch.testing.assert_close(swan_direction(1e-12 * g, method="polar", steps=16), wanted, atol=1e-9, rtol=0)
    assert not whiten(torch.zeros(shape), "polar", 6).any()


def test_the_default_rounds_of_polar_come_closer_than_those_of_newton_schulz():
    """On small singular values, which ten cubic rounds leave below 1; in bfloat16 to its precision."""
    s = torch.logspace(0, -2.5, 24, dtype=torch.float64)
    left, right = torch.linalg.qr(draw(24, 24)).Q, torch.linalg.qr(draw(60, 24)).Q
    g = left @ torch.diag(s) @ right.T
    off = {m: float((whiten(g, m, k) - left @ right.T).norm()) for m, k in (("newton_schulz", 10), ("polar", 6))}
    assert off["polar"] < 0.2 * off["newton_schulz"]
    near = torch.linalg.svdvals(whiten(g.float(), "polar", 6).double())
    assert (near - 1).abs().max() < 0.05


def test_e_without_grad_norm_it_is_muon_without_momentum(monkeypatch):
    from trainwright.optim import muon

    monkeypatch.setattr(muon, "newton_schulz", lambda g, *_, scale: polar(g) * scale)
    g = draw(12, 40)
    p, q = nn.Parameter(torch.zeros_like(g)), nn.Parameter(torch.zeros_like(g))
    p.grad, q.grad = g.clone(), g.clone()
    Swan([p], lr=1.0, normalise=False, steps=20).step()
    Muon([q], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    torch.testing.assert_close(p / p.norm(), q / q.norm(), atol=1e-9, rtol=0)


def slow_newton_schulz(g, steps, beta):
    """The rounds as the paper writes them, for a pair, on one wide matrix."""
    gram = g @ g.T
    size = gram.norm()
    y, z = gram / size, torch.eye(len(g), dtype=g.dtype)
    for _ in range(steps):
        t = 3 * torch.eye(len(g), dtype=g.dtype) - z @ y
        y, z = beta * y @ t, beta * t @ z
    return z @ g / size.sqrt()


@pytest.mark.parametrize("steps, beta", [(1, 0.5), (4, 0.5), (3, 0.8)])
def test_newton_schulz_is_the_equation(steps, beta):
    g = draw(6, 15)
    torch.testing.assert_close(whiten(g, steps=steps, beta=beta), slow_newton_schulz(g, steps, beta))
    torch.testing.assert_close(whiten(g.T, steps=steps, beta=beta), slow_newton_schulz(g, steps, beta).T)


def test_nsds_is_the_equation():
    g = draw(6, 15)
    gram = g @ g.T
    y, z = gram / gram.norm(), torch.eye(6, dtype=g.dtype)
    for _ in range(2):
        zs, ys = torch.diag(torch.diag(z)), torch.diag(torch.diag(y))
        y, z = 0.4 * y @ (3 * torch.eye(6) - zs @ ys), 0.4 * (3 * torch.eye(6) - zs @ y) @ zs
    torch.testing.assert_close(whiten(g, "nsds", 2, 0.4), z @ g / gram.norm().sqrt())
    # a rough whitening: closer to the polar factor than the gradient is
    x = grad_norm(draw(64, 96) @ draw(96, 96, seed=1))
    cosine = [float((d * polar(x)).sum() / d.norm() / 8) for d in (x, whiten(x, "nsds", 2, 0.4))]
    assert cosine[1] > cosine[0] + 0.01


def test_float32_is_close_to_float64():
    """Badly conditioned: singular values over six decades."""
    left, _, right = torch.linalg.svd(draw(48, 64), full_matrices=False)
    g = left @ torch.diag(torch.logspace(0, -6, 48, dtype=torch.float64)) @ right
    for steps in (10, 30):
        near, exact = whiten(g.float(), steps=steps).double(), whiten(g, steps=steps)
        assert (near - exact).norm() < 2e-3 * exact.norm()


def test_low_rank_gradients_stay_finite():
    g = draw(48, 3, dtype=torch.float32) @ draw(3, 64, seed=1, dtype=torch.float32)
    for beta in (0.5, 0.8):
        d = whiten(g, steps=30, beta=beta)
        s = torch.linalg.svdvals(d.double())
        assert d.isfinite().all() and s[2] > 0.5 and s.max() < 1.7


def test_grad_norm_standardises_rows():
    g = draw(5, 40) * 1e-6 + 3e-7
    x = grad_norm(g)
    mean, std = x.mean(-1), x.std(-1, unbiased=False)
    torch.testing.assert_close(mean, torch.zeros(5, dtype=x.dtype), atol=1e-12, rtol=0)
    torch.testing.assert_close(std, torch.ones(5, dtype=x.dtype), atol=1e-12, rtol=0)


def test_rows_without_variance_become_zero():
    g = draw(4, 30, dtype=torch.float32)
    g[1], g[2] = 0.1, 0.0
    d = swan_direction(g)
    assert d.isfinite().all() and torch.equal(d[1:3], torch.zeros(2, 30)) and (d[[0, 3]].norm(dim=1) > 1).all()
    assert torch.equal(swan_direction(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_the_scale_of_gradients_does_not_matter():
    g = draw(8, 20, dtype=torch.float32)
    for factor in (1e-12, 1e12):
        torch.testing.assert_close(swan_direction(g * factor), swan_direction(g), atol=2e-4, rtol=0)


def test_experts_and_fused_parts_are_whitened_one_by_one():
    g = draw(2, 9, 6)
    p, singles = nn.Parameter(torch.zeros(2, 9, 6)), [nn.Parameter(torch.zeros(k, 6)) for k in (5, 4, 5, 4)]
    p.grad = g.float()
    for q, x in zip(singles, [x for m in g.float() for x in m.split([5, 4])], strict=True):
        q.grad = x.clone()
    Swan([{"params": [p], "splits": (5, 4)}], lr=1.0).step(), Swan(singles, lr=1.0).step()
    torch.testing.assert_close(p.data, torch.cat([q.data for q in singles]).view(2, 9, 6), atol=1e-5, rtol=0)


def test_step_rms_is_lr_times_scale():
    p = nn.Parameter(torch.zeros(8, 24))
    p.grad = draw(8, 24, dtype=torch.float32) * 1e-5
    Swan([p], lr=0.02, scale=0.5).step()
    assert p.detach().square().mean().sqrt().item() == pytest.approx(0.01, rel=1e-5)


def test_defaults_follow_the_whitening():
    group = Swan([nn.Parameter(torch.ones(2, 3))], whitening="nsds").param_groups[0]
    assert (group["steps"], group["beta"]) == (2, 0.4)
    group = Swan([nn.Parameter(torch.ones(2, 3))]).param_groups[0]
    assert (group["steps"], group["beta"]) == (10, 0.5)
    assert Swan([nn.Parameter(torch.ones(2, 3))], whitening="polar").param_groups[0]["steps"] == 6


def test_bad_input():
    with pytest.raises(ValueError, match="takes matrices"):
        Swan([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="whitening"):
        Swan([nn.Parameter(torch.ones(3, 3))], whitening="zca")
    for key, value in (("beta", 1.0), ("steps", 0), ("steps", 31), ("whitening", "zca"), ("scale", 0.0)):
        with pytest.raises(ConfigError, match=key):
            build("optimizer", {"name": "swan", key: value})
