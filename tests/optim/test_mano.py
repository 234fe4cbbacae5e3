"""Mano (B081): the card's list, letters as there. (d), shards, is in test_slices.py."""

import copy
import math

import pytest
import torch
from optimizer_zoo import Zoo, named, train
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.mano import Mano, mano_direction, tangent
from trainwright.optim.state import load_named_state, named_state


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow_mano(w, grads, version, nesterov, lr=0.01, wd=0.3, mu=0.9, both=False):
    """The equations slice by slice in float64."""
    w, m = w.clone(), torch.zeros_like(w)
    for t, g in enumerate(grads):
        m = mu * m + g
        q = g + mu * m if nesterov else m.clone()
        turns = [1 - t % 2, t % 2] if both else [t % 2]
        for k in turns:  # 0: columns
            for j in range(w.shape[1 - k]):
                at = (slice(None), j) if k == 0 else (j, slice(None))
                x, v = w[at], q[at]
                unit = x / x.norm() if version == "v1" else x
                q[at] = v - unit * (unit @ v)
        for k in turns:
            for j in range(w.shape[1 - k]):
                at = (slice(None), j) if k == 0 else (j, slice(None))
                q[at] = q[at] / (q[at].norm() + (0 if version == "v1" else 1e-8))
        w = w * (1 - lr * wd) - lr * 0.2 * math.sqrt(w.shape[t % 2]) * q
    return w


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)])
def test_mano_is_the_equation(shape, version, nesterov, both):
    start, grads = draw(*shape), [draw(*shape, seed=10 + i) for i in range(7)]
    p = nn.Parameter(start.clone())
    optimizer = Mano([p], 0.01, 0.3, 0.9, version=version, nesterov=nesterov, both=both)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(p.data, slow_mano(start, grads, version, nesterov, both=both), atol=1e-12, rtol=1e-12)
    assert (p.data - start).norm() > 1e-3


@pytest.mark.parametrize("version, nesterov", [("v1", False), ("v2", True)])
def test_nesterov_goes_with_the_version(version, nesterov):
    assert Mano([nn.Parameter(torch.ones(2, 2))], version=version).param_groups[0]["nesterov"] is nesterov


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("shape", [(48, 20), (20, 48)])
def test_a_slices_have_norm_1_and_the_step_has_its_rms(shape, version):
    for turn in (0, 1):
        (u,) = mano_direction([draw(1, *shape, dtype=torch.float32)], [draw(1, *shape, seed=1).float()], turn, version)
        norms = u[0].norm(dim=turn)
        torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-5, rtol=0)
    p = nn.Parameter(draw(*shape, dtype=torch.float32))
    optimizer = Mano([p], lr=0.1, weight_decay=0.0, version=version)
    for i in range(4):
        before = p.detach().clone()
        p.grad = draw(*shape, seed=10 + i, dtype=torch.float32)
        optimizer.step()
        assert (p - before).square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=1e-5)


@pytest.mark.parametrize("turn", [0, 1])
def test_b_v1_is_tangent(turn):
    w, q = draw(3, 30, 20, dtype=torch.float32), draw(3, 30, 20, seed=1, dtype=torch.float32)
    (u,) = mano_direction([w], [q], turn, "v1")
    unit = w / w.norm(dim=turn - 2, keepdim=True)
    assert (u * unit).sum(turn - 2).abs().max() < 1e-5
    assert (q * unit).sum(turn - 2).abs().max() > 0.5  # it was not


@pytest.mark.parametrize("size", [0.05, 1.0, 1.7])
@pytest.mark.parametrize("turn", [0, 1])
def test_b_v2_keeps_one_minus_the_squared_norm_of_the_radial_part(turn, size):
    w = draw(1, 30, 20)
    w = size * w / w.norm(dim=turn - 2, keepdim=True)
    q = draw(1, 30, 20, seed=1)
    (t,) = tangent([w], [q], turn - 2, "v2")
    left, given = (t * w).sum(turn - 2), (q * w).sum(turn - 2)
    torch.testing.assert_close(left, (1 - size**2) * given, atol=1e-9, rtol=1e-6)
    if size == 1.7:  # beyond sqrt(2) it overshoots
        assert (left.abs() > given.abs()).all()


def test_b_mean_slice_norms():
    p = nn.Parameter(torch.cat([torch.full((3, 8), 0.5), torch.zeros(1, 8)]))
    ((columns, rows),) = Mano([p]).mean_slice_norms()
    assert (float(columns), float(rows)) == pytest.approx((0.75, 1.5))


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("both", [False, True])
def test_e_no_gradient_no_step(version, both):
    p = nn.Parameter(draw(6, 4, dtype=torch.float32))
    before = p.detach().clone()
    optimizer = Mano([p], weight_decay=0.0, version=version, both=both)
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p.data, before)
    for turn in (0, 1):
        (u,) = mano_direction([p.detach()[None]], [torch.zeros(1, 6, 4)], turn, version, both)
        assert torch.equal(u, torch.zeros(1, 6, 4))


def test_f_a_resume_at_an_odd_step_goes_on_with_rows():
    """Through a checkpoint the parity comes along; without it the next step is another one."""
    straight = Zoo()
    make = build("optimizer", {"name": "mano", "lr": 0.01}).build
    train(straight, make(named(straight)), 4)
    first = Zoo()
    optimizer = make(named(first))
    train(first, optimizer, 3)
    resumed, reset = copy.deepcopy(first), copy.deepcopy(first)
    a, b = make(named(resumed)), make(named(reset))
    state = named_state(optimizer, named(first))
    assert [g["entries"] for g in state["scalars"]["groups"] if g["entries"]] == [{"step": 3}]
    load_named_state(a, named(resumed), copy.deepcopy(state))
    for group in state["scalars"]["groups"]:
        group["entries"] = dict.fromkeys(group["entries"], 0)
    load_named_state(b, named(reset), copy.deepcopy(state))
    train(resumed, a, 1, first=3), train(reset, b, 1, first=3)
    assert torch.equal(resumed.up, straight.up)
    assert not torch.allclose(reset.up, straight.up, atol=1e-4)


def test_fused_matrices_are_apart():
    """Columns of q, k and v in one parameter are normalised each in its own part, as if they were three."""
    start, grads = draw(11, 6), [draw(11, 6, seed=1 + i) for i in range(4)]
    fused, parts = nn.Parameter(start.clone()), [nn.Parameter(x.clone()) for x in start.split([6, 3, 2])]
    a, b = Mano([{"params": [fused], "splits": (6, 3, 2)}], lr=0.01), Mano(parts, lr=0.01)
    plain = nn.Parameter(start.clone())
    c = Mano([plain], lr=0.01)
    for g in grads:
        fused.grad, plain.grad = g.clone(), g.clone()
        for p, x in zip(parts, g.split([6, 3, 2]), strict=True):
            p.grad = x.clone()
        a.step(), b.step(), c.step()
    torch.testing.assert_close(fused.data, torch.cat([p.data for p in parts]), atol=1e-13, rtol=0)
    assert not torch.allclose(fused.data, plain.data, atol=1e-4)


def test_experts_are_stepped_one_by_one():
    start, grads = draw(3, 6, 4), [draw(3, 6, 4, seed=1 + i) for i in range(3)]
    stack, singles = nn.Parameter(start.clone()), [nn.Parameter(x.clone()) for x in start]
    a, b = Mano([stack], lr=0.01), Mano(singles, lr=0.01)
    for g in grads:
        stack.grad = g.clone()
        for p, x in zip(singles, g, strict=True):
            p.grad = x.clone()
        a.step(), b.step()
    torch.testing.assert_close(stack.data, torch.stack([p.data for p in singles]), atol=1e-13, rtol=0)


def test_many_matrices_go_through_in_parts(monkeypatch):
    from trainwright.optim import slices

    results = []
    for limit in (slices.BATCH_BYTES, 1):
        monkeypatch.setattr(slices, "BATCH_BYTES", limit)
        params = [nn.Parameter(draw(8, 6, seed=i)) for i in range(5)]
        optimizer = Mano(params, lr=0.01)
        for i, p in enumerate(params):
            p.grad = draw(8, 6, seed=50 + i)
        optimizer.step()
        results.append(torch.stack([p.data for p in params]))
    assert torch.equal(*results)


def test_half_precision_is_normalised_in_float32():
    p = nn.Parameter(draw(64, 512, dtype=torch.bfloat16))
    (u,) = Mano([p]).updates(
        [p], [draw(64, 512, seed=1, dtype=torch.bfloat16)], Mano([p]).param_groups[0] | {"step": 1}
    )
    norms = u.float().norm(dim=0)
    assert u.dtype == torch.bfloat16 and (norms / (0.2 * 8) - 1).abs().max() < 4e-3


def test_bad_input():
    with pytest.raises(ValueError, match="takes matrices"):
        Mano([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="version"):
        Mano([nn.Parameter(torch.ones(3, 3))], version="v3")
    with pytest.raises(ConfigError, match="nesterov needs momentum"):
        build("optimizer", {"name": "mano", "momentum": 0.0, "nesterov": True})
    with pytest.raises(ConfigError, match="hidden matrices"):
        build("optimizer", "mano").build([NamedParam("e", nn.Parameter(torch.ones(3, 3)), "embedding")])


def test_embedding_and_head_go_to_the_inner_optimizer():
    model = Zoo()
    optimizer = build("optimizer", "mano").build(named(model))
    mine = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    assert mine == {id(p) for p in (model.up, model.down, model.square, model.experts)}
