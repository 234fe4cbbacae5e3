"""SSO: its singular vectors, its multiplier and its step, against decompositions in float64; Muon as a limit."""

import copy
import logging
import math

import pytest
import torch
from optimizer_zoo import Zoo, named, train
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.leading import leading_triplets
from trainwright.optim.muon import Muon
from trainwright.optim.spectral_sphere import SpectralSphere, msign, solve_multiplier, target_radius


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polar(x):
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    return left @ right


def spectral_norm(x):
    return torch.linalg.matrix_norm(x.double(), 2)


def theta_of(w):
    left, _, right = torch.linalg.svd(w.double(), full_matrices=False)
    return left[..., :, :1] @ right[..., :1, :]


def stepped(start, grads, **settings):
    p = nn.Parameter(start.clone())
    optimizer = SpectralSphere([p], **settings)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach(), optimizer


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 12, 5), (2, 5, 12), (1, 1, 9), (1, 9, 1)])
def test_msign_is_the_polar_factor(shape):
    x = randn(*shape)
    torch.testing.assert_close(msign(x), polar(x), atol=2e-3, rtol=0)
    torch.testing.assert_close(msign(x, steps=14), polar(x), atol=1e-10, rtol=0)
    torch.testing.assert_close(msign(1e-4 * x), msign(x), atol=1e-10, rtol=0)
    assert not msign(torch.zeros(shape)).any()


@pytest.mark.parametrize("shape", [(2, 200, 200), (2, 96, 256), (2, 256, 96), (1, 3, 40), (1, 40, 3), (2, 1, 5)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-4), (torch.float32, 1e-4)])
def test_leading_singular_values_from_a_cold_start(shape, dtype, tolerance):
    w = randn(*shape, dtype=dtype)
    (sigma,), (u,), (v,) = leading_triplets([w], [w.new_zeros(shape[0], 1, shape[2])])
    torch.testing.assert_close(sigma.flatten().double(), spectral_norm(w), atol=0, rtol=tolerance)
    torch.testing.assert_close(u.mT @ w @ v.mT, sigma, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(u.norm(dim=-2), torch.ones_like(u[:, 0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(v.norm(dim=-1), torch.ones_like(v[..., 0]), atol=1e-5, rtol=0)


def test_a_start_that_points_elsewhere_and_a_matrix_of_zeros():
    """The second vector of a diagonal matrix is an invariant space of its own; the search has to leave it."""
    w = torch.stack([torch.diag(torch.tensor([3.0, 2.0, 1.0])), torch.zeros(3, 3)])
    start = torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.0, 0.0]]])
    (sigma,), (u,), (v,) = leading_triplets([w], [start])
    assert sigma.flatten().tolist() == pytest.approx([3.0, 0.0], abs=1e-5)
    torch.testing.assert_close(u[0] @ v[0], torch.diag(torch.tensor([1.0, 0, 0])), atol=1e-4, rtol=0)
    assert not (u[1] @ v[1]).any()


def momenta(n, shape):
    """Directions of norm 1 that lie aslant to theta by every degree, and theta."""
    theta = theta_of(randn(n, *shape))
    share = torch.tensor([0, 0.05, -0.05, 0.3, -0.3, 1, -1, 2, -2, 5, -5, 10, -10], dtype=torch.float64)
    m = randn(n, *shape, seed=1)
    m = m / m.norm(dim=(-2, -1), keepdim=True) + share[:n, None, None] * theta
    return m / m.norm(dim=(-2, -1), keepdim=True), theta


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 25)])
def test_the_multiplier_is_a_root(shape):
    """(b): in float64 with the exact polar factor; and |l| <= 1, so the ends at 1.023 enclose it."""
    m, theta = momenta(13, shape)
    found, there, residual, enclosed = solve_multiplier(m, theta, polar, steps=40)
    torch.testing.assert_close(there, polar(m + found[:, None, None] * theta), atol=1e-10, rtol=0)
    assert enclosed.all() and residual.abs().max() < 1e-10
    assert 0.98 < found.abs().max() <= 1
    at = (theta * polar(m + found[:, None, None] * theta)).sum((-2, -1))
    assert at.abs().max() < 1e-10
    grid = torch.linspace(-1.02, 1.02, 60, dtype=torch.float64)
    values = torch.stack([(theta * polar(m + x * theta)).sum((-2, -1)) for x in grid])
    assert (values.diff(dim=0) > -1e-9).all()  # h does not decrease


def test_the_multiplier_of_square_matrices_is_a_change_of_sign():
    """Where a square m + l T turns singular its polar factor jumps, and h may jump over 0."""
    m, theta = momenta(13, (24, 24))
    found, _, _, enclosed = solve_multiplier(m, theta, polar, steps=60)
    assert enclosed.all() and found.abs().max() <= 1
    below, above = ((theta * polar(m + (found + x)[:, None, None] * theta)).sum((-2, -1)) for x in (-1e-7, 1e-7))
    assert (below < 1e-12).all() and (above > -1e-12).all()


def bisection(m, theta, sign):
    """The authors' search, one matrix at a time: doublings from 1e-3, then 20 bisections."""
    found = []
    for x, t in zip(m, theta, strict=True):
        h = lambda at, x=x, t=t: float((t * sign((x + at * t)[None])[0]).sum())  # noqa: E731
        a, fa = 0.0, h(0.0)
        step = 1e-3 if fa < 0 else -1e-3
        while (fb := h(a + step)) * fa > 0:
            a, fa, step = a + step, fb, 2 * step
        b = a + step
        for _ in range(20):
            c = (a + b) / 2
            fc = h(c)
            a, fa, b = (c, fc, b) if fc * fa > 0 else (a, fa, c)
        found.append((a + b) / 2)
    return torch.tensor(found, dtype=m.dtype)


def test_the_default_rounds_come_as_close_as_bisection():
    """To 1e-4, the tolerance of the card; with one more, closer than 20 bisections after doublings."""
    m, theta = momenta(13, (24, 32))
    reference = bisection(m, theta, msign)
    found, _, residual, enclosed = solve_multiplier(m, theta)
    torch.testing.assert_close(found, reference, atol=1e-5, rtol=0)
    assert enclosed.all() and residual.abs().max() < 1e-4
    at = (theta * msign(m + reference[:, None, None] * theta)).sum((-2, -1))
    assert solve_multiplier(m, theta, steps=6)[2].abs().max() < at.abs().max()


@pytest.mark.parametrize("decay", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("shape", [(24, 96), (96, 48)])
def test_the_default_rounds_are_enough_on_decaying_spectra(shape, decay):
    """Momenta are such, and there h is steep: the first step from l = 0 must not be one for equal singular values."""
    left, _, right = torch.linalg.svd(randn(20, *shape), full_matrices=False)
    m = left * torch.exp(-decay * torch.arange(left.shape[-1])) @ right
    m = m / m.norm(dim=(-2, -1), keepdim=True)
    theta = theta_of(randn(20, *shape, seed=1))
    found, p, residual, enclosed = solve_multiplier(m, theta)
    torch.testing.assert_close(p, msign(m + found[:, None, None] * theta), atol=1e-12, rtol=0)
    torch.testing.assert_close((theta * p).sum((-2, -1)), residual, atol=1e-12, rtol=0)
    assert enclosed.all() and residual.abs().max() < 1e-4 and residual.abs().median() < 1e-6


def test_zero_momentum_gives_a_zero_step():
    theta = theta_of(randn(1, 6, 4))
    found, p, residual, enclosed = solve_multiplier(torch.zeros(1, 6, 4, dtype=torch.float64), theta)
    assert found == 0 and not p.any() and residual == 0 and enclosed


@pytest.mark.parametrize("shape", [(32, 32), (64, 24), (24, 64), (3, 16, 20)])
@pytest.mark.parametrize("radius", [1.0, 2.5])
def test_the_weights_come_to_the_sphere(shape, radius):
    """(a): a step of rate 1e-9 leaves the retraction alone."""
    w, _ = stepped(randn(*shape, dtype=torch.float32), [randn(*shape, seed=1, dtype=torch.float32)], lr=1e-9)
    torch.testing.assert_close(
        spectral_norm(w), torch.full_like(spectral_norm(w), target_radius(shape)), atol=0, rtol=1e-4
    )
    grads = [randn(*shape, seed=i, dtype=torch.float32) for i in range(1, 16)]
    rates = {"lr": 0.02, "radius": radius}
    p = nn.Parameter(randn(*shape, dtype=torch.float32))
    optimizer = SpectralSphere([p], **rates)
    for g in grads:  # vectors that are warm now
        p.grad = g
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-9
    optimizer.step()
    wanted = math.sqrt(shape[-2] / shape[-1]) * radius
    torch.testing.assert_close(spectral_norm(p), torch.full_like(spectral_norm(p), wanted), atol=0, rtol=1e-4)


def test_drift_is_of_second_order():
    """(c): a gradient along theta moves the norm by lr R without the multiplier, and hardly with it."""
    lr, start = 1e-2, randn(24, 32)
    start = start / spectral_norm(start) * target_radius((24, 32))
    radius = target_radius((24, 32))
    for share in (0.3, 3.0, 10.0):
        grad = randn(24, 32, seed=3)
        grad = grad / spectral_norm(grad) - share * theta_of(start)
        drift = {}
        for solve in (True, False):
            w, _ = stepped(start, [grad], lr=lr, solve=solve, nesterov=False, solver_steps=30)
            drift[solve] = float(spectral_norm(w) - radius) / radius
        assert abs(drift[True]) <= 5e-4
        assert drift[False] > 9e-3 or share < 1


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (3, 6, 4)])
@pytest.mark.parametrize("solve", [False, True])
def test_spectral_sphere_is_the_equation(shape, nesterov, solve):
    start, lr, mu = randn(*shape, seed=9), 0.02, 0.8
    grads = [randn(*shape, seed=20 + t) for t in range(5)]
    found, optimizer = stepped(
        start,
        grads,
        lr=lr,
        momentum=mu,
        nesterov=nesterov,
        solve=solve,
        solver_steps=60,
        msign_steps=16,
        power_steps=30,
    )
    w, m, radius = start.clone(), torch.zeros_like(start), target_radius(shape)
    for g in grads:
        m = mu * m + (1 - mu) * g
        x = (1 - mu) * g + mu * m if nesterov else m
        x = x / x.norm(dim=(-2, -1), keepdim=True)
        theta = theta_of(w)
        w = w * radius / spectral_norm(w)[..., None, None]
        if solve:
            flat, t = x.reshape(-1, *shape[-2:]), theta.reshape(-1, *shape[-2:])
            x = (flat + solve_multiplier(flat, t, polar, 60)[0][:, None, None] * t).reshape(shape)
        w = w - lr * radius * polar(x)
    torch.testing.assert_close(found, w, atol=1e-7, rtol=0)
    assert optimizer.bracket_failures == 0


def test_decay_is_undone_by_hard_retraction():
    """(d)"""
    grads = [randn(8, 12, seed=i) for i in range(6)]
    a, b = (stepped(randn(8, 12), grads, weight_decay=wd)[0] for wd in (0.0, 0.1))
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
    c = stepped(randn(8, 12), grads, weight_decay=0.1, retract="none")[0]
    assert (a - c).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (3, 6, 4)])
def test_without_multiplier_and_retraction_it_is_muon(shape):
    """(e): Muon with the scale R and this iteration; against Muon's own with its coefficients repeated in place."""
    start, grads = randn(*shape), [randn(*shape, seed=30 + t) for t in range(6)]
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    found, optimizer = stepped(start, grads, solve=False, retract="none", msign_steps=16, **settings)
    p = nn.Parameter(start.clone())
    other = Muon([p], **settings)
    scale = target_radius(shape)
    other.orthogonalise = lambda directions, group: [polar(d) * scale for d in directions]
    for g in grads:
        p.grad = g.clone()
        other.step()
    torch.testing.assert_close(found, p.detach(), atol=1e-9, rtol=0)
    assert set(optimizer.state_dict()["state"][0]) == {"momentum"}


def test_dynamic_retraction():
    """Hard in the first step, then by alpha lr either way."""
    start, lr, alpha = randn(10, 14), 1e-3, 0.5
    radius = target_radius((10, 14))
    one, _ = stepped(start, [torch.ones(10, 14, dtype=torch.float64)], lr=1e-9, retract="dynamic")
    assert float(spectral_norm(one)) == pytest.approx(radius, rel=1e-6)
    for size in (0.9, 1.1):
        p = nn.Parameter(start.clone())
        optimizer = SpectralSphere([p], lr=lr, retract="dynamic", retract_alpha=alpha)
        p.grad = randn(10, 14, seed=2)
        optimizer.step()
        p.data *= size * radius / spectral_norm(p.data)
        before = p.detach().clone()
        optimizer.param_groups[0]["retract_alpha"] = 1.0
        optimizer.step()
        step = before * (1 + lr * (1 if size < 1 else -1)) - p.detach()
        assert float(spectral_norm(step)) == pytest.approx(lr * radius, rel=1e-2)


def test_the_first_step_of_each_matrix_is_hard():
    """Not the one at rate 0 that a warm-up begins with, and not before an expert has a gradient."""
    p = nn.Parameter(3 * randn(2, 10, 14))
    optimizer = SpectralSphere([p], lr=1e-3, retract="dynamic")
    group = optimizer.param_groups[0]
    radius, norms = target_radius((10, 14)), []
    for lr, second in ((0.0, False), (1e-3, False), (1e-3, True)):
        group["lr"] = lr
        p.grad = randn(2, 10, 14)
        p.grad[1] *= second
        optimizer.step()
        norms.append((spectral_norm(p) / radius).tolist())
    assert min(norms[0]) > 3 and norms[1][1] == norms[0][1]
    assert norms[1][0] == pytest.approx(1, abs=2e-3) and norms[2] == pytest.approx([1, 1], abs=3e-3)


def test_weights_loaded_after_construction_come_to_the_sphere():
    p = nn.Parameter(randn(8, 8))
    optimizer = SpectralSphere([p], lr=1e-9)
    p.data.copy_(7 * randn(8, 8, seed=5))
    loaded = p.detach().clone()
    p.grad = torch.ones(8, 8, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(p.detach(), loaded / spectral_norm(loaded), atol=1e-6, rtol=0)


def test_matrices_without_a_gradient_so_far_stay():
    """Experts that no token went to, and everything at rate 0."""
    p = nn.Parameter(randn(3, 6, 4))
    before = p.detach().clone()
    optimizer = SpectralSphere([p], lr=0.01)
    p.grad = torch.zeros_like(p)
    p.grad[1] = 1.0
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p, before)
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    assert torch.equal(p[0], before[0]) and torch.equal(p[2], before[2]) and not torch.equal(p[1], before[1])


def test_experts_and_fused_matrices_are_stepped_one_by_one():
    stack, fused = randn(3, 6, 4), randn(12, 4, seed=1)
    params = {"stack": nn.Parameter(stack.clone()), "fused": nn.Parameter(fused.clone())}
    optimizer = build("optimizer", "spectral_sphere").build(
        [NamedParam("stack", params["stack"], "expert"), NamedParam("fused", params["fused"], "matrix", (6, 4, 2))]
    )
    singles = [*stack, *fused.split([6, 4, 2])]
    alone = [nn.Parameter(s.clone()) for s in singles]
    other = SpectralSphere(alone)
    for i in range(3):
        params["stack"].grad, params["fused"].grad = randn(3, 6, 4, seed=10 + i), randn(12, 4, seed=20 + i)
        for p, g in zip(alone, [*params["stack"].grad, *params["fused"].grad.split([6, 4, 2])], strict=True):
            p.grad = g.clone()
        optimizer.step(), other.step()
    torch.testing.assert_close(params["stack"].data, torch.stack([p.data for p in alone[:3]]), atol=1e-9, rtol=0)
    torch.testing.assert_close(params["fused"].data, torch.cat([p.data for p in alone[3:]]), atol=1e-9, rtol=0)
    shapes = [tuple(optimizer.state[params[n]]["leading"].shape) for n in ("stack", "fused")]
    assert shapes == [(3, 1, 4), (3, 4)]


def test_matrices_fused_by_columns_are_stepped_one_by_one():
    fused, sizes = randn(4, 12), [6, 4, 2]
    p, alone = nn.Parameter(fused.clone()), [nn.Parameter(s.clone()) for s in fused.split(sizes, dim=-1)]
    a = build("optimizer", "spectral_sphere").build([NamedParam("p", p, "matrix", (-6, -4, -2))])
    b = SpectralSphere(alone)
    for i in range(3):
        p.grad = randn(4, 12, seed=10 + i)
        for q, g in zip(alone, p.grad.split(sizes, dim=-1), strict=True):
            q.grad = g.clone()
        a.step(), b.step()
    torch.testing.assert_close(p.data, torch.cat([q.data for q in alone], dim=-1), atol=1e-9, rtol=0)
    assert tuple(a.state[p]["leading"].shape) == (1, 12)


def test_failures_to_enclose_a_root_are_counted_and_said_once(caplog):
    """With something that is no polar factor, h does not change its sign."""
    p = nn.Parameter(randn(8, 8, dtype=torch.float32))
    optimizer = SpectralSphere([p])
    m, theta = momenta(13, (8, 8))
    _, _, residual, enclosed = solve_multiplier(m, theta, lambda x: x + 10 * theta)
    assert not enclosed.any() and (residual > 0).all()
    optimizer._failures.put((~enclosed).sum())
    with caplog.at_level(logging.WARNING, "trainwright"):
        for _ in range(3):
            p.grad = torch.ones(8, 8)
            optimizer.step()
    assert len([r for r in caplog.records if "no multiplier found for 13 matrices" in r.getMessage()]) == 1
    assert optimizer.metrics()["bracket_failures"] == 13


def test_all_matrices_of_the_zoo_stay_on_their_spheres():
    model = Zoo()
    optimizer = build("optimizer", "spectral_sphere").build(named(model))
    losses = train(model, optimizer, 60)
    assert sum(losses[-5:]) < sum(losses[:5])
    for p in (model.up, model.down, model.square, model.experts):
        torch.testing.assert_close(
            spectral_norm(p), torch.full_like(spectral_norm(p), target_radius(p.shape)), atol=0, rtol=1e-2
        )


def test_a_copy_goes_on_alike():
    model = Zoo(dtype=torch.bfloat16)
    optimizer = build("optimizer", "spectral_sphere").build(named(model))
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    other, copied = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(model)
    loaded = build("optimizer", "spectral_sphere").build(named(third))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, copied), (third, loaded)):
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        o.step()
    for p, q, r in zip(model.parameters(), other.parameters(), third.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p, r)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"radius": 0}, r"radius=0.*greater than 0"),
        ({"radius": -1.0}, "greater than 0"),
        ({"retract": "soft"}, "retract"),
        ({"retract_alpha": 0}, "retract_alpha"),
        ({"momentum": 1.0}, "less than 1"),
        ({"momentum": 0}, "nesterov needs momentum"),
        ({"solver_steps": 0}, "solver_steps"),
        ({"msign_steps": 0}, "msign_steps"),
        ({"power_steps": 0}, "power_steps"),
        ({"inner": "muon"}, "cannot"),
        ({"lr": 2.0, "weight_decay": 0.5}, r"lr \* weight_decay"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "spectral_sphere", **settings})


def test_parameters_that_make_no_sense():
    config = build("optimizer", "spectral_sphere")
    zero = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ConfigError, match="out_proj holds a matrix of zeros"):
        config.build([NamedParam("out_proj", zero, "matrix")])
    with pytest.raises(ConfigError, match="no hidden matrices"):
        config.build([NamedParam("embed", nn.Parameter(torch.ones(4, 4)), "embedding")])
    with pytest.raises(ValueError, match="matrix of zeros"):
        SpectralSphere([zero])
    with pytest.raises(ValueError, match="takes matrices"):
        SpectralSphere([nn.Parameter(torch.ones(4))])
    for settings in ({"radius": 0.0}, {"retract": "x"}, {"momentum": 1.0}, {"solver_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            SpectralSphere([nn.Parameter(torch.ones(4, 4))], **settings)


def test_decay_under_hard_retraction_warns(caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        build("optimizer", {"name": "spectral_sphere", "weight_decay": 0.1}).build(named(Zoo()))
    assert "no effect" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trainwright"):
        build("optimizer", {"name": "spectral_sphere", "weight_decay": 0.1, "retract": "dynamic"}).build(named(Zoo()))
    assert not caplog.records


def test_equals_the_public_package():
    """Its form without retraction and scale, on square matrices; it computes in bfloat16."""
    peer = pytest.importorskip("pytorch_optimizer")
    start = randn(32, 32, dtype=torch.float32)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = SpectralSphere([ours], lr=0.02, retract="none")
    b = peer.SpectralSphere(
        [theirs],
        lr=0.02,
        momentum=0.9,
        weight_decay=0.0,
        msign_steps=8,
        power_iteration_steps=200,
        solver_max_iterations=20,
    )
    for t in range(10):
        ours.grad = randn(32, 32, seed=t + 1, dtype=torch.float32)
        theirs.grad = ours.grad.clone()
        a.step(), b.step()
    assert (ours - theirs).norm() < 0.01 * (theirs - start).norm()


def test_stochastic_rounding_counts_the_retraction():
    """It is a factor within bfloat16's last bit: rounded to the nearest, it would do nothing."""
    p = nn.Parameter(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    config = build("optimizer", {"name": "spectral_sphere", "lr": 1e-9, "stochastic_rounding": True})
    optimizer = config.build([NamedParam("w", p, "matrix")])
    p.grad = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    optimizer.step()
    on_sphere = p.detach().float()
    optimizer.param_groups[0]["radius"] = 1.001
    optimizer.step()
    scale = (p.detach().float() * on_sphere).sum() / on_sphere.square().sum()
    assert float(scale) == pytest.approx(1.001, abs=3e-4)
