"""GradNormLoRP: the card's checks (a) to (e), the equations in float64, and refusals."""

import pytest
import torch
from layouts_worker import on_two_ranks
from optimizer_zoo import Zoo, named
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.optim.galore import GaLore
from trainwright.optim.gradnormlorp import DoRALinear, GradNormLoRP, rebuild_, split_gradient
from trainwright.optim.state import optimizer_state_bytes


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# (a)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 5, 4)])
def test_gradients_are_those_of_autograd(shape):
    weight, grad = _randn(*shape, seed=1), _randn(*shape, seed=2)
    norms, to_norms, to_v = split_gradient(weight, grad)
    v = weight.clone().requires_grad_()
    s = weight.norm(dim=-1, keepdim=True).requires_grad_()
    (s * v / v.norm(dim=-1, keepdim=True) * grad).sum().backward()
    torch.testing.assert_close(norms, s.detach())
    torch.testing.assert_close(to_norms, s.grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(to_v, v.grad, rtol=1e-6, atol=1e-9)
    assert ((to_v * weight).sum(-1).abs() < 1e-6 * to_v.norm(dim=-1) * weight.norm(dim=-1)).all()


# (b)
@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_full_rank_sgd_is_a_step_of_weight_norm(shape):
    layer = weight_norm(nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64), dim=0)
    p = nn.Parameter(layer.weight.detach().clone())
    x, target = _randn(7, shape[1], seed=1), _randn(7, shape[0], seed=2)
    ((layer(x) - target) ** 2).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.01).step()
    ((x @ p.T - target) ** 2).sum().backward()
    start = p.detach().clone()
    GradNormLoRP([p], 0.01, rank=1.0, scale=1.0, subspace="sgd").step()
    torch.testing.assert_close(p.data - start, layer.weight.detach() - start, rtol=1e-6, atol=1e-9)
    assert (p.data - start).norm() > 0.01 * start.norm()


# (c)
@pytest.mark.parametrize("subspace", ["adam", "adam_8bit", "lion", "sgd"])
def test_norms_stay_with_magnitudes_frozen(subspace):
    start = _randn(12, 8, dtype=torch.float32)
    p = nn.Parameter(start.clone())
    optimizer = GradNormLoRP([p], rank=3, scale=1.0, gap=5, learn_magnitude=False, subspace=subspace)
    for t in range(20):
        p.grad = _randn(12, 8, seed=t, dtype=torch.float32)
        optimizer.step()
    torch.testing.assert_close(p.data.norm(dim=1), start.norm(dim=1), rtol=1e-6, atol=0)
    assert (p.data - start).norm() > 0.01 * start.norm()
    assert not any(key.startswith("norm") for key in optimizer.state[p])


# (d)
@pytest.mark.parametrize("shape", [(64, 160), (160, 64)])
def test_bytes_of_state(shape):
    """P m r + 2 r n as in GaLore, and two numbers for each row: the magnitude itself is the norm of the row."""
    p = nn.Parameter(_randn(*shape, dtype=torch.float32))
    p.grad = _randn(*shape, seed=1, dtype=torch.float32)
    optimizer = GradNormLoRP([p], rank=16)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == 4 * (64 * 16 + 2 * 16 * 160 + 2 * shape[0])


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_steps_are_the_equations(shape, learn):
    start, lr, wd, b1, b2, eps, scale, gap, r = _randn(*shape), 0.02, 0.3, 0.8, 0.9, 1e-5, 0.5, 3, 2
    p = nn.Parameter(start.clone())
    optimizer = GradNormLoRP(
        [p], lr, wd, rank=r, scale=scale, betas=(b1, b2), eps=eps, gap=gap, learn_magnitude=learn
    )  # fmt: skip
    w, left = start.clone(), shape[0] < shape[1]
    m = v = torch.zeros(r, shape[1], dtype=torch.float64) if left else torch.zeros(shape[0], r, dtype=torch.float64)
    ms = vs = torch.zeros(shape[0], 1, dtype=torch.float64)
    for t in range(8):
        p.grad = _randn(*shape, seed=10 + t)
        optimizer.step()
        s = w.norm(dim=1, keepdim=True)
        d = w / s
        gs = (p.grad * d).sum(1, keepdim=True)
        gv = p.grad - d * gs
        basis = optimizer.state[p]["projection"].clone()  # signs are LAPACK's
        if t % gap == 0:
            u, _, vh = torch.linalg.svd(gv)
            leading = u[:, :r] if left else vh[:r].T
            torch.testing.assert_close(basis @ basis.T, leading @ leading.T, rtol=1e-9, atol=1e-10)
        g = basis.T @ gv if left else gv @ basis
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        ms, vs = b1 * ms + (1 - b1) * gs, b2 * vs + (1 - b2) * gs**2
        correction = (1 - b2 ** (t + 1)) ** 0.5 / (1 - b1 ** (t + 1))
        n = correction * m / (v.sqrt() + eps)
        moved = w - lr * scale * (basis @ n if left else n @ basis.T)
        s = s * (1 - lr * wd) - lr * learn * correction * ms / (vs.sqrt() + eps)
        w = s * moved / moved.norm(dim=1, keepdim=True)
        torch.testing.assert_close(p.data, w, rtol=1e-9, atol=1e-11)


def test_rows_of_zeros_are_trained():
    p = nn.Parameter(torch.zeros(6, 8))
    with torch.no_grad():
        p[0] = 1.0
    optimizer = GradNormLoRP([p], weight_decay=0.1, rank=2, scale=1.0)
    p.grad = _randn(6, 8, seed=1, dtype=torch.float32)
    p.grad[5] = 0
    optimizer.step()
    assert p.isfinite().all()
    assert (p[1:5].norm(dim=1) > 1e-3).all() and p[5].norm() < 1e-6
    before = p.detach().clone()
    p.grad = _randn(6, 8, seed=2, dtype=torch.float32)
    optimizer.step()
    assert (p[1:5] - before[1:5]).norm() > 1e-3


def test_a_magnitude_that_passes_zero_turns_its_row_round():
    """Gradient descent on the row itself goes through zero as well; so does its momentum."""
    p = nn.Parameter(torch.tensor([[0.015, 0.0], [3.0, 0.0]], dtype=torch.float64))
    optimizer = GradNormLoRP([p], 0.01, rank=1, scale=1e-9)
    places = []
    for _ in range(4):
        p.grad = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        optimizer.step()
        places.append(p[0, 0].item())
    assert places == pytest.approx([0.005, -0.005, -0.015, -0.025], abs=1e-4)


def test_rebuild_keeps_what_is_asked():
    moved, magnitudes = _randn(4, 6), _randn(4, 1, seed=1)
    norms = torch.ones(4, 1, dtype=torch.float64)
    found = moved.clone()
    rebuild_(found, norms, magnitudes)
    torch.testing.assert_close(found, magnitudes * moved / moved.norm(dim=1, keepdim=True))


def test_experts_are_each_their_own():
    stack = _randn(3, 6, 9)
    whole, singles = nn.Parameter(stack.clone()), [nn.Parameter(m.clone()) for m in stack]
    a, b = (GradNormLoRP(x, rank=2, gap=2, weight_decay=0.1) for x in ([whole], singles))
    for t in range(5):
        whole.grad = _randn(3, 6, 9, seed=10 + t)
        for p, g in zip(singles, whole.grad, strict=True):
            p.grad = g.clone()
        a.step(), b.step()
    torch.testing.assert_close(whole.data, torch.stack([p.data for p in singles]), rtol=1e-10, atol=1e-12)


def test_a_transposed_fused_matrix_is_its_parts_transposed():
    fused = _randn(9, 12)
    whole, parts = nn.Parameter(fused.clone()), [nn.Parameter(m.T.clone()) for m in fused.split([5, 7], dim=1)]
    a = GradNormLoRP([{"params": [whole], "splits": (-5, -7)}], rank=2)
    b = GradNormLoRP(parts, rank=2)
    for t in range(5):
        whole.grad = _randn(9, 12, seed=10 + t)
        for p, g in zip(parts, whole.grad.split([5, 7], dim=1), strict=True):
            p.grad = g.T.clone()
        a.step(), b.step()
    torch.testing.assert_close(whole.data, torch.cat([p.data.T for p in parts], dim=1), rtol=1e-9, atol=1e-11)


def test_two_ranks(tmp_path):
    for found in on_two_ranks(tmp_path, "gradnormlorp"):
        del found["sent"]
        assert len(found) == 2 * 10 + 6
        for case, figures in found.items():
            assert max(figures["difference"], figures["resumed"]) < 1e-10 < 1e-3 < figures["way"], case


# (e)
def _dora(dropout=0.0):
    torch.manual_seed(0)
    linear = nn.Linear(9, 6, dtype=torch.float64)
    layer = DoRALinear(linear, rank=2, alpha=4, dropout=dropout)
    with torch.no_grad():
        layer.b.normal_(generator=torch.Generator().manual_seed(1))
        layer.magnitude.mul_(torch.linspace(0.5, 2, 6)[:, None])
    return linear, layer


def test_dora_starts_as_the_layer_it_wraps():
    linear = nn.Linear(9, 6)
    x = _randn(4, 9, dtype=torch.float32)
    layer = DoRALinear(linear, rank=4).eval()
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-5, atol=1e-6)
    assert {n for n, p in layer.named_parameters() if p.requires_grad} == {"a", "b", "magnitude"}


def test_dora_is_the_equation():
    linear, layer = _dora()
    x = _randn(4, 9, seed=3)
    v = linear.weight.detach() + 2.0 * layer.b @ layer.a
    wanted = x @ (layer.magnitude * v / v.norm(dim=1, keepdim=True)).T + linear.bias.detach()
    wanted.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    y = layer(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, wanted)
    assert set(grads) == {"a", "b", "magnitude"}
    for n, g in grads.items():
        torch.testing.assert_close(dict(layer.named_parameters())[n].grad, g, msg=n)


def test_dora_merges_and_comes_back():
    linear, layer = _dora(dropout=0.5)
    layer.eval()
    x, frozen = _randn(4, 9, seed=3), layer.weight.detach().clone()
    before = layer(x)
    assert not torch.allclose(before, linear(x))
    for _ in range(2):  # the second does nothing
        layer.merge()
    torch.testing.assert_close(nn.functional.linear(x, layer.weight, layer.bias), before, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-9)
    for _ in range(2):
        layer.unmerge()
    torch.testing.assert_close(layer.weight.data, frozen, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-9)


def test_dora_is_trained_with_projected_gradients():
    torch.manual_seed(0)
    layer = DoRALinear(nn.Linear(9, 6), rank=4, dropout=0.0)
    x = _randn(64, 9, dtype=torch.float32)
    target = nn.Linear(9, 6)(x).detach()
    subspace = GaLore([layer.a, layer.b], 0.005, rank=2, scale=4.0, gap=20)
    magnitude = torch.optim.AdamW([layer.magnitude], 0.02, weight_decay=0.0)
    losses = []
    for _ in range(150):
        loss = ((layer(x) - target) ** 2).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        for optimizer in (subspace, magnitude):
            optimizer.step(), optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]


def test_dora_refusals():
    with pytest.raises(ValueError, match=r"rank=7.*\(6\)"):
        DoRALinear(nn.Linear(9, 6), rank=7)
    _, layer = _dora()
    with torch.no_grad():
        layer.magnitude[0] = 0
    layer.merge()
    with pytest.raises(ValueError, match="magnitude 0"):
        layer.unmerge()


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"gap": 0}, "greater than 0"),
        ({"rank": 0}, "rank"),
        ({"betas": [0.9, 1.0]}, r"in \[0, 1\)"),
        ({"subspace": "adafactor"}, "subspace"),
        ({"inner": {"name": "gradnormlorp"}}, "inner"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "gradnormlorp", **settings})


def test_what_cannot_be_had():
    with pytest.raises(ConfigError, match=r"rank=7.*\(6\) of up"):
        build("optimizer", {"name": "gradnormlorp", "rank": 7}).build(named(Zoo()))
    with pytest.raises(ConfigError, match="not linear in the rate"):
        build("optimizer", "gradnormlorp").build_rule(named(Zoo()))
    with pytest.raises(ValueError, match="takes matrices"):
        GradNormLoRP([nn.Parameter(torch.zeros(4))])
    with pytest.raises(ValueError, match="larger than the shorter side"):
        GradNormLoRP([nn.Parameter(torch.zeros(4, 6))], rank=5)
