"""Online Subspace Descent: the gradient of the projection against autograd, its fixed points, GaLore as its limit."""

import copy
import json

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.galore import GaLore
from trainwright.optim.online_subspace_descent import OnlineSubspaceDescent, projection_gradient, projection_loss
from trainwright.optim.state import allocate_named_state, load_named_state, named_state, optimizer_state_bytes

F64 = torch.float64


def draw(shape, seed, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def run(optimizer, params, steps, first=0):
    for t in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = draw(p.shape, 1000 * t + i, p.dtype)
        optimizer.step()


def gradient(p, g, kappa):
    r = p.mT @ g
    return projection_gradient(p, g @ r.mT, r @ r.mT, p.mT @ p, g.square().sum((-2, -1), keepdim=True), kappa)


@pytest.mark.parametrize("kappa", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(12, 20), (2, 12, 20)])
def test_a_the_leading_directions_are_a_fixed_point(shape, kappa):
    """Card (a): no slope there, and the loss is the share of the energy in the tail."""
    g = draw(shape, 0)
    u, s, _ = torch.linalg.svd(g, full_matrices=False)
    p = u[..., :4]
    assert gradient(p, g, kappa).abs().max() < 1e-12
    tail = s[..., 4:].square().sum(-1) / s.square().sum(-1)
    torch.testing.assert_close(projection_loss(p, g, kappa), tail, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (3, 6, 8)])
@pytest.mark.parametrize("rule", ["adam", "adam_8bit", "lion"])
def test_b_a_projection_that_stays_is_galore(shape, rule):
    """Card (b)."""
    results = []
    for kind, more in ((GaLore, {"gap": None}), (OnlineSubspaceDescent, {"projection_lr": 0.0})):
        p = nn.Parameter(draw(shape, 1, torch.float32))
        run(kind([p], rank=3, subspace=rule, weight_decay=0.1, **more), [p], 6)
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("kappa", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("shape", [(12, 20), (2, 12, 20)])
def test_c_the_slope_is_that_of_autograd(shape, kappa):
    """Card (c), away from orthonormal columns."""
    g = draw(shape, 0)
    p = (0.5 * draw((*shape[:-1], 4), 1)).requires_grad_()
    (want,) = torch.autograd.grad(projection_loss(p, g, kappa).sum(), p)
    got = gradient(p.detach(), g, kappa)
    assert want.norm() > 0.1
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("left", [True, False])
def test_d_it_learns_the_leading_directions(left):
    """Card (d): a constant gradient, a random start."""
    u = torch.linalg.qr(draw((64, 64), 0))[0]
    v = torch.linalg.qr(draw((128, 64), 1))[0]
    s = 1 / torch.arange(1, 65, dtype=F64)
    g = (u * s) @ v.T
    tail = float(s[8:].square().sum() / s.square().sum())
    start = torch.linalg.qr(draw((64, 8), 2))[0]
    furthest = {}
    for kappa in (0.1, 0.0):
        p = nn.Parameter(torch.zeros(64, 128, dtype=F64) if left else torch.zeros(128, 64, dtype=F64))
        optimizer = OnlineSubspaceDescent([p], rank=8, kappa=kappa)
        optimizer.state[p]["projection"] = start.clone()
        furthest[kappa] = 0.0
        for t in range(1, 601):
            p.grad = g if left else g.T.contiguous()
            optimizer.step()
            basis = optimizer.state[p]["projection"]
            furthest[kappa] = max(furthest[kappa], float((basis.T @ basis - torch.eye(8)).norm()) * (t >= 100))
            if kappa and t in (300, 600):
                loss = float(projection_loss(basis, g, 0.0))
                assert loss < tail * (1.05 if t == 300 else 1.01)
        if kappa:
            assert (basis.T @ basis - torch.eye(8)).norm() < 0.01
    assert furthest[0.0] > 0.1 > furthest[0.1]


def test_the_projection_moves_after_it_was_used():
    """R and the way back are of the old P; the step of P is that of Adam on the slope."""
    p = nn.Parameter(torch.zeros(6, 9, dtype=F64))
    optimizer = OnlineSubspaceDescent([p], lr=0.1, rank=2, scale=1.0, subspace="sgd", projection_lr=0.02, kappa=0.3)
    optimizer.state[p]["projection"] = old = 0.5 * draw((6, 2), 5)
    basis, m, v = old.clone(), 0, 0
    w = torch.zeros(6, 9, dtype=F64)
    optimizer.state[p]["projection"] = old.clone()
    for t in range(1, 5):
        g = draw((6, 9), t)
        p.grad = g.clone()
        optimizer.param_groups[0]["lr"] = lr = 0.1 / t  # the rate of P follows
        optimizer.step()
        w = w - lr * basis @ (basis.T @ g)
        leaf = basis.clone().requires_grad_()
        (slope,) = torch.autograd.grad(projection_loss(leaf, g, 0.3), leaf)
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        basis = basis - 0.02 / t * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (v.sqrt() + 1e-6)
        torch.testing.assert_close(p.data, w, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(optimizer.state[p]["projection"], basis, atol=1e-12, rtol=1e-10)


def test_right_is_left_transposed():
    tall, wide = nn.Parameter(draw((9, 6), 0)), nn.Parameter(draw((9, 6), 0).T.contiguous())
    a, b = OnlineSubspaceDescent([tall], rank=3), OnlineSubspaceDescent([wide], rank=3)
    for t in range(5):
        tall.grad = draw((9, 6), t)
        wide.grad = tall.grad.T.contiguous()
        a.step(), b.step()
    torch.testing.assert_close(tall.data, wide.data.T, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rule, of_projection", [("adam", 3 * 4), ("adam_8bit", 4 + 2), ("lion", 2 * 4), ("sgd", 4)])
def test_e_state_is_the_formula(rule, of_projection):
    """Card (e): m r + 2 r n + 2 m r numbers; with 8-bit moments of P, m r / 2 words (and scales) for the last."""
    p = nn.Parameter(torch.zeros(32, 64))
    optimizer = OnlineSubspaceDescent([p], rank=8, projection_rule=rule)
    run(optimizer, [p], 2)
    scales = 2 * 32 * 4 if rule == "adam_8bit" else 0
    assert optimizer_state_bytes(optimizer) == of_projection * 32 * 8 + scales + 4 * 2 * 8 * 64


@pytest.mark.parametrize("rule", ["adam", "lion", "sgd", "adam_8bit"])
def test_a_zero_gradient_leaves_the_projection(rule):
    p = nn.Parameter(draw((3, 6, 9), 0, torch.float32))
    optimizer = OnlineSubspaceDescent([p], rank=2, projection_rule=rule)
    run(optimizer, [p], 3)
    before = optimizer.state[p]["projection"].clone()
    p.grad = draw((3, 6, 9), 50, torch.float32)
    p.grad[1] = 0  # an expert that no token went to
    p.grad[2] *= 1e-20  # whose squared norm has no inverse in float32
    optimizer.step()
    after = optimizer.state[p]["projection"]
    assert torch.equal(after[1], before[1]) and after.isfinite().all() and p.isfinite().all()
    assert torch.equal(after[2], before[2]) and not torch.equal(after[0], before[0])


@pytest.mark.parametrize("way", ["named", "torch"])
@pytest.mark.parametrize("rule", ["adam", "adam_8bit"])
def test_a_resumed_run_is_the_same(way, rule):
    shapes = [(7, 5), (5, 7), (3, 6, 4)]
    settings = {"rank": 2, "subspace": rule, "projection_rule": rule}
    params = [nn.Parameter(draw(s, i, torch.float32)) for i, s in enumerate(shapes)]
    optimizer = OnlineSubspaceDescent(params, **settings)
    run(optimizer, params, 4)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = OnlineSubspaceDescent(others, **settings)
    if way == "torch":
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        names = [[NamedParam(str(i), p, "matrix") for i, p in enumerate(ps)] for ps in (params, others)]
        state = named_state(optimizer, names[0])
        scalars = json.loads(json.dumps(state["scalars"]))
        tensors = allocate_named_state(names[1], scalars)
        for n, entries in tensors.items():
            for key, t in entries.items():
                t.copy_(state["tensors"][n][key])
        load_named_state(resumed, names[1], {"tensors": tensors, "scalars": scalars})
    run(optimizer, params, 4, first=4), run(resumed, others, 4, first=4)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"projection_lr": 0.2}, "less than or equal to 0.1"),
        ({"projection_lr": -0.1}, "greater than or equal to 0"),
        ({"kappa": -0.1}, "greater than or equal to 0"),
        ({"projection_rule": "svd"}, "projection_rule"),
        ({"gap": 200}, "unknown key"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "online_subspace_descent", **settings})


def test_the_class_refuses():
    p = nn.Parameter(torch.zeros(5, 4))
    for bad in ({"projection_lr": 0.2}, {"projection_lr": -1.0}, {"kappa": -1.0}, {"lr": 0.0}, {"rank": 5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            OnlineSubspaceDescent([p], **bad)
    with pytest.raises(ConfigError, match=r"larger than the shorter side \(4\) of w"):
        build("optimizer", {"name": "online_subspace_descent", "rank": 5}).build([NamedParam("w", p, "matrix")])
