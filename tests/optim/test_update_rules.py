"""Update rules against closed forms in float64 and against torch's own."""

import math

import pytest
import torch
from torch import nn

from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.muon import Muon, newton_schulz, update_scale


def _grads(shape, steps, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


@pytest.mark.parametrize("role, decayed", [("matrix", True), ("norm", False)])
def test_adamw_is_the_equation(role, decayed):
    start = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lr, wd, b1, b2, eps = 3e-3, 0.2, 0.8, 0.97, 1e-6
    p = nn.Parameter(start.clone())
    config = build("optimizer", {"name": "adamw", "lr": lr, "weight_decay": wd, "betas": [b1, b2], "eps": eps})
    optimizer = config.build([NamedParam("p", p, role)])
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, grad in enumerate(_grads(start.shape, 10, torch.float64), 1):
        p.grad = grad.clone()
        optimizer.step()
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        w = w * (1 - lr * wd * decayed) - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    torch.testing.assert_close(p.data, w, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_equation(nesterov):
    start = torch.ones(4, 3, dtype=torch.float64)
    p = nn.Parameter(start.clone())
    config = build("optimizer", {"name": "sgd", "lr": 0.1, "weight_decay": 0.3, "momentum": 0.7, "nesterov": nesterov})
    optimizer = config.build([NamedParam("p", p, "matrix")])
    w, b = start.clone(), torch.zeros_like(start)
    for grad in _grads(start.shape, 6, torch.float64):
        p.grad = grad.clone()
        optimizer.step()
        g = grad + 0.3 * w
        b = 0.7 * b + g
        w = w - 0.1 * (g + 0.7 * b if nesterov else b)
    torch.testing.assert_close(p.data, w, atol=1e-13, rtol=1e-12)


def _orthogonal_by_svd(u, steps=5):
    """The iteration acts on singular values alone: s -> a s + b s^3 + c s^5."""
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return left @ torch.diag_embed(s) @ right


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (1, 9), (9, 1), (3, 6, 4)])
def test_newton_schulz_is_a_polynomial_of_singular_values(shape):
    (u,) = _grads(shape, 1, torch.float64)
    torch.testing.assert_close(newton_schulz(u), _orthogonal_by_svd(u), atol=1e-10, rtol=1e-9)
    assert torch.equal(newton_schulz(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128), (512, 128), (2, 64, 96)])
def test_five_rounds_bring_singular_values_near_one(shape):
    """B033(b): those from 0.3 % of the Frobenius norm up into [0.68, 1.21], those from 1 % up into [0.68, 1.14]."""
    (u,) = _grads(shape, 1, torch.float64)
    shares = torch.linalg.svdvals(u) / u.norm(dim=(-2, -1), keepdim=True).squeeze(-1)
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    # In the iteration singular vectors stay, so that each value can be followed.
    values = (left.mT @ newton_schulz(u, steps=5) @ right.mT).diagonal(dim1=-2, dim2=-1)
    for least, high in ((0.003, 1.21), (0.01, 1.14)):
        some = values[shares >= least]
        assert len(some) > 0.5 * values.numel()
        assert some.min() >= 0.68 and some.max() <= high, (least, float(some.min()), float(some.max()))


def test_newton_schulz_does_not_see_the_scale():
    (u,) = _grads((10, 6), 1, torch.float64)
    torch.testing.assert_close(newton_schulz(u * 1e4), newton_schulz(u), atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(newton_schulz(u * 1e-4), newton_schulz(u), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (3, 6, 4)])
def test_muon_is_the_equation(shape, nesterov, adjust):
    start = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lr, wd, mu = 0.02, 0.3, 0.9
    p = nn.Parameter(start.clone())
    optimizer = Muon([p], lr=lr, weight_decay=wd, momentum=mu, nesterov=nesterov, adjust=adjust)
    w, m = start.clone(), torch.zeros_like(start)
    rows, columns = shape[-2:]
    scale = 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    for grad in _grads(shape, 6, torch.float64):
        p.grad = grad.clone()
        optimizer.step()
        m = mu * m + (1 - mu) * grad
        u = (1 - mu) * grad + mu * m if nesterov else m
        w = w * (1 - lr * wd) - lr * scale * _orthogonal_by_svd(u)
    torch.testing.assert_close(p.data, w, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_equals_torch(nesterov, adjust):
    """Same momentum convention, scale and bfloat16 iteration; ours runs matrices of a shape as one batch, so the last
    bits of bfloat16 may differ: within 2 % of the length of the way."""
    shapes = [(24, 16), (24, 16), (16, 24), (16, 16)]
    starts = [_grads(s, 1, torch.float32, seed=i)[0] for i, s in enumerate(shapes)]
    ours = [nn.Parameter(s.clone()) for s in starts]
    theirs = [nn.Parameter(s.clone()) for s in starts]
    a = Muon(ours, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust=adjust, dtype=torch.bfloat16)
    b = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    for t in range(10):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = _grads(p.shape, 1, torch.float32, seed=1000 * t + i)[0]
            q.grad = p.grad.clone()
        a.step(), b.step()
    for p, q, s in zip(ours, theirs, starts, strict=True):
        assert (p - q).norm() < 0.02 * (q - s).norm()


def test_experts_are_orthogonalised_one_by_one():
    stack = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    whole, singles = nn.Parameter(stack.clone()), [nn.Parameter(m.clone()) for m in stack]
    a, b = Muon([whole], dtype=torch.float32), Muon(singles, dtype=torch.float32)
    for grad in _grads((3, 6, 4), 3, torch.float32):
        whole.grad = grad
        for p, g in zip(singles, grad, strict=True):
            p.grad = g.clone()
        a.step(), b.step()
    torch.testing.assert_close(whole.data, torch.stack([p.data for p in singles]), atol=1e-6, rtol=1e-5)


def test_many_matrices_go_through_in_parts(monkeypatch):
    from trainwright.optim import whole

    starts = _grads((5, 8, 6), 1, torch.float32)[0]
    results = []
    for limit in (whole.CPU_BATCH_BYTES, 1):
        monkeypatch.setattr(whole, "CPU_BATCH_BYTES", limit)
        params = [nn.Parameter(s.clone()) for s in starts]
        optimizer = Muon(params, dtype=torch.float32)
        for p, g in zip(params, _grads((8, 6), 5, torch.float32, seed=3), strict=True):
            p.grad = g
        optimizer.step()
        results.append(torch.stack([p.data for p in params]))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)
    assert not torch.equal(results[0], starts)


def test_match_rms_gives_nearly_the_size_of_an_adamw_step():
    """B033(c): RMS = 0.2 sqrt(mean of s^2), for 5 rounds on Gaussians 0.17 to 0.18 and not the 0.2 of exact factors."""
    for shape in [(64, 64), (256, 256), (512, 128), (128, 512)]:
        (u,) = _grads(shape, 1, torch.float64)
        turned = newton_schulz(u, steps=5)
        rms = float((turned * update_scale(shape, "match_rms_adamw")).square().mean().sqrt())
        assert round(rms, 2) in (0.17, 0.18)
        assert rms == pytest.approx(0.2 * float(torch.linalg.svdvals(turned).square().mean().sqrt()), rel=1e-9)


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="takes matrices"):
        Muon([nn.Parameter(torch.zeros(3))])


def test_classes_come_from_the_package():
    import trainwright.optim
    from trainwright.core.registry import methods

    for name in trainwright.optim.__all__:
        assert getattr(trainwright.optim, name).__name__ == name
    files = {m.config.__module__.removeprefix("trainwright.optim.") for m in methods("optimizer")}
    assert files - set(trainwright.optim._CLASSES.values()) == {"sgd"}  # torch's own
    with pytest.raises(AttributeError, match="nothing"):
        trainwright.optim.nothing  # noqa: B018
