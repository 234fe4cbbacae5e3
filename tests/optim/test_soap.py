"""SOAP against its equations in float64 and the public package."""

import math

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim import soap
from trainwright.optim.soap import SOAP, first_basis, next_basis


def draws(shape, steps, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


def reference(w, grads, lr, betas, shampoo, decay, frequency, sides=(True, True), eps=1e-8):
    m, n = w.shape
    b1, b2 = betas
    bases = [torch.eye(m, dtype=w.dtype), torch.eye(n, dtype=w.dtype)]
    grams, first, second = [None, None], torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads):
        new = [g @ g.T, g.T @ g]
        if t == 0:
            u = g / (g.abs() + eps)
            grams = [(1 - shampoo) * x for x in new]
            for side in (0, 1):
                if sides[side]:
                    k = len(new[side])
                    tie = soap.TIE_BREAK * new[side].diagonal().mean() * torch.linspace(1, 0, k, dtype=w.dtype)
                    bases[side] = torch.linalg.eigh(new[side] + tie.diag()).eigenvectors.flip(-1)
            w = w * (1 - lr * decay) - lr * u
            continue
        p, q = bases
        first = b1 * first + (1 - b1) * g
        second = b2 * second + (1 - b2) * (p.T @ g @ q) ** 2
        corrected = (p.T @ first @ q / (1 - b1**t)) / ((second.sqrt() + eps) / math.sqrt(1 - b2**t))
        w = w * (1 - lr * decay) - lr * p @ corrected @ q.T
        for side in (0, 1):
            grams[side] = shampoo * grams[side] + (1 - shampoo) * new[side]
            if t % frequency == 0 and sides[side]:
                turned = grams[side] @ bases[side]
                order = (bases[side] * turned).sum(0).argsort(descending=True)
                bases[side] = torch.linalg.qr(turned[:, order]).Q
                second = second[order] if side == 0 else second[:, order]
    return w


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6), (1, 4)])
def test_it_is_the_equation(shape):
    start, grads = draws(shape, 1, seed=1)[0], draws(shape, 14)
    p = nn.Parameter(start.clone())
    optimizer = SOAP([p], lr=0.01, betas=(0.9, 0.95), shampoo_beta=0.8, weight_decay=0.1, frequency=3)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    w = reference(start, grads, 0.01, (0.9, 0.95), 0.8, 0.1, 3)
    torch.testing.assert_close(p.data, w, atol=1e-9, rtol=1e-7)


def test_long_sides_are_not_preconditioned():
    start, grads = draws((9, 4), 1, seed=1)[0], draws((9, 4), 8)
    for max_side, sides in ((8, (False, True)), (3, (False, False))):
        p = nn.Parameter(start.clone())
        optimizer = SOAP([p], lr=0.01, max_side=max_side, weight_decay=0.0, frequency=2)
        for g in grads:
            p.grad = g.clone()
            optimizer.step()
        assert ("left" in optimizer.state[p], "right" in optimizer.state[p]) == sides
        w = reference(start, grads, 0.01, (0.95, 0.95), 0.95, 0.0, 2, sides)
        torch.testing.assert_close(p.data, w, atol=1e-9, rtol=1e-7)


def test_without_bases_it_is_adam():
    """From the second step on; the first one only makes bases."""
    start, grads = draws((4, 4), 1, seed=1)[0], draws((4, 4), 6)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = SOAP([p], lr=0.01, max_side=1, betas=(0.9, 0.95), weight_decay=0.0)
    b = torch.optim.AdamW([q], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-30)
    a.param_groups[0]["eps"] = 1e-30
    for t, g in enumerate(grads):
        p.grad, q.grad = g.clone(), g.clone()
        if t == 0:
            a.param_groups[0]["lr"] = 0.0
            a.step()
            a.param_groups[0]["lr"] = 0.01
        else:
            a.step(), b.step()
    torch.testing.assert_close(p.data, q.data, atol=1e-12, rtol=1e-10)


def test_experts_and_fused_matrices_are_matrices_of_their_own():
    stack, grads = draws((3, 5, 4), 1, seed=1)[0], draws((3, 5, 4), 6)
    fused, fused_grads = draws((9, 4), 1, seed=2)[0], draws((9, 4), 6, seed=3)
    a, b = nn.Parameter(stack.clone()), nn.Parameter(fused.clone())
    spec = {"name": "soap", "lr": 0.01, "weight_decay": 0.0, "frequency": 2}
    optimizer = build("optimizer", spec).build([NamedParam("a", a, "expert"), NamedParam("b", b, "matrix", (5, 4))])
    for g, h in zip(grads, fused_grads, strict=True):
        a.grad, b.grad = g.clone(), h.clone()
        optimizer.step()
    rest = (0.01, (0.95, 0.95), 0.95, 0.0, 2)
    for e in range(3):
        torch.testing.assert_close(a.data[e], reference(stack[e], [g[e] for g in grads], *rest), atol=1e-9, rtol=1e-7)
    for rows in (slice(0, 5), slice(5, 9)):
        w = reference(fused[rows], [h[rows] for h in fused_grads], *rest)
        torch.testing.assert_close(b.data[rows], w, atol=1e-9, rtol=1e-7)


def test_equals_pytorch_optimizer(monkeypatch):
    """Which does not move in its first step, and decays after the step."""
    peer = pytest.importorskip("pytorch_optimizer")
    monkeypatch.setattr(soap, "TIE_BREAK", 0.0)
    starts = [draws((6, 6), 1, seed=i)[0] for i in range(2)]
    ours, theirs = ([nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    a = SOAP(ours, lr=0.01, weight_decay=0.0, frequency=3)
    b = peer.SOAP(theirs, lr=0.01, weight_decay=0.0, precondition_frequency=3)
    for t in range(15):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = draws(p.shape, 1, seed=100 * t + i)[0]
            q.grad = p.grad.clone()
        a.param_groups[0]["lr"] = 0.01 if t else 0.0
        a.step(), b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)  # the package's QR is in float32


def test_bases_become_eigenvectors():
    """Power iterations of a fixed matrix end at its eigenvectors, in the order of falling eigenvalues."""
    basis = torch.linalg.qr(draws((7, 7), 1)[0]).Q
    values = torch.tensor([64.0, 32, 16, 8, 4, 2, 1], dtype=torch.float64)
    gram = (basis @ values.diag() @ basis.T)[None]
    q = torch.eye(7, dtype=torch.float64)[None]
    for _ in range(60):
        q, _ = next_basis(gram, q)
    turned = (q.mT @ gram @ q)[0]
    torch.testing.assert_close(turned, values.diag(), atol=1e-8, rtol=0)
    at_once = first_basis(gram)
    assert (at_once.mT @ q)[0].diagonal().abs().min() > 0.99  # but for the tie break


def test_rounding_does_not_choose_the_first_bases():
    g = draws((13, 4), 1, torch.float32)[0]
    gram = (g @ g.T)[None]
    noisy = gram * (1 + 1e-7 * torch.randn(gram.shape, generator=torch.Generator().manual_seed(0)))
    noisy = (noisy + noisy.mT) / 2
    overlap = (first_basis(gram).mT @ first_basis(noisy))[0].abs()
    assert (overlap - torch.eye(13)).abs().max() < 1e-2


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"betas": [0.9, 1.0]}, "in \\[0, 1\\)"),
        ({"shampoo_beta": 1.0}, "less than 1"),
        ({"frequency": 0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "soap", **settings})


def test_the_class_refuses():
    with pytest.raises(ValueError, match="takes matrices"):
        SOAP([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="frequency"):
        SOAP([nn.Parameter(torch.zeros(3, 3))], frequency=0)
    with pytest.raises(ValueError, match="betas"):
        SOAP([nn.Parameter(torch.zeros(3, 3))], betas=(0.9, 1.0))
