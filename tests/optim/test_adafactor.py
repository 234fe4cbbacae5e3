"""Adafactor against its equations in float64 and torch's own on plain tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.adafactor import Adafactor
from trainwright.optim.state import optimizer_state_bytes


def draws(shape, steps, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


def rms(t):
    return t.square().mean().sqrt()


def reference(w, grads, lr, decay, clip, relative, scale, eps1=1e-30):
    row, column, full = (torch.zeros((), dtype=w.dtype) for _ in range(3))
    for t, g in enumerate(grads, 1):
        b = 1 - t**-0.8
        g2 = g**2 + eps1
        if w.ndim == 2:
            row = b * row + (1 - b) * g2.mean(1)
            column = b * column + (1 - b) * g2.mean(0)
            v = torch.outer(row, column) / row.mean()
        else:
            v = full = b * full + (1 - b) * g2
        u = g / v.sqrt()
        u = u / max(1.0, float(rms(u)) / clip)
        rho = min(lr, t**-0.5) if relative else lr
        step = rho * max(1e-3, float(rms(w))) if scale else rho
        w = w * (1 - lr * decay) - step * u
    return w


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 5), (5, 1), (7,), ()])
@pytest.mark.parametrize("relative, scale", [(True, True), (False, False)])
def test_it_is_the_equation(shape, relative, scale):
    (start,) = draws(shape, 1, seed=1)
    grads = draws(shape, 12)
    p = nn.Parameter(start.clone())
    settings = {"lr": 0.4, "weight_decay": 0.1, "clip": 0.9, "eps1": 0.02}
    optimizer = Adafactor([p], relative_step=relative, scale_parameter=scale, **settings)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    w = reference(start, grads, 0.4, 0.1, 0.9, relative, scale, 0.02)
    torch.testing.assert_close(p.data, w, atol=1e-12, rtol=1e-10)


def test_experts_and_fused_matrices_are_matrices_of_their_own():
    stack, grads = draws((3, 5, 4), 1, seed=1)[0], draws((3, 5, 4), 6)
    fused, fused_grads = draws((9, 4), 1, seed=2)[0], draws((9, 4), 6, seed=3)
    a, b = nn.Parameter(stack.clone()), nn.Parameter(fused.clone())
    optimizer = build("optimizer", {"name": "adafactor", "lr": 0.1}).build(
        [NamedParam("a", a, "expert"), NamedParam("b", b, "matrix", (5, 3, 1))]
    )
    for g, h in zip(grads, fused_grads, strict=True):
        a.grad, b.grad = g.clone(), h.clone()
        optimizer.step()
    for e in range(3):
        w = reference(stack[e], [g[e] for g in grads], 0.1, 0.0, 1.0, True, True)
        torch.testing.assert_close(a.data[e], w, atol=1e-12, rtol=1e-10)
    for at, size in ((0, 5), (5, 3), (8, 1)):
        w = reference(fused[at : at + size], [h[at : at + size] for h in fused_grads], 0.1, 0.0, 1.0, True, True)
        torch.testing.assert_close(b.data[at : at + size], w, atol=1e-12, rtol=1e-10)


def test_equals_torch():
    shapes = [(6, 9), (6, 9), (9, 6), (7,)]
    ours, theirs = (
        [nn.Parameter(draws(s, 1, torch.float32, seed=i)[0]) for i, s in enumerate(shapes)] for _ in range(2)
    )
    a = Adafactor(ours, lr=0.3, weight_decay=0.1)
    b = torch.optim.Adafactor(theirs, lr=0.3, weight_decay=0.1)
    for t in range(20):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = draws(p.shape, 1, torch.float32, seed=100 * t + i)[0]
            q.grad = p.grad.clone()
        a.step(), b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("splits", [(), (4, 2)])
def test_layouts(placement, splits, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        (start,) = draws((6, 8), 1, seed=1)
        p, q = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [placement]))
        a, b = (Adafactor([{"params": [x], "splits": splits}], lr=0.1) for x in (p, q))
        for g in draws((6, 8), 4):
            p.grad, q.grad = g.clone(), distribute_tensor(g.clone(), mesh, [placement])
            a.step(), b.step()
        torch.testing.assert_close(q.full_tensor(), p.data, atol=1e-12, rtol=1e-10)
        assert b.state[q]["row"].shape == (6, 1) and b.state[q]["column"].shape == (len(splits) or 1, 8)
    finally:
        dist.destroy_process_group()


def test_state_of_16_bit_weights_is_wide_and_small():
    p = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = Adafactor([p])
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer_state_bytes(optimizer) == 4 * (64 + 128)
    optimizer.load_state_dict(optimizer.state_dict())
    assert {t.dtype for t in optimizer.state[p].values()} == {torch.float32}


@pytest.mark.parametrize("settings, says", [({"beta2_decay": 0.8}, "less than 0"), ({"clip": 0}, "greater than 0")])
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "adafactor", **settings})


def test_the_class_refuses():
    with pytest.raises(ValueError, match="beta2_decay"):
        Adafactor([nn.Parameter(torch.ones(2))], beta2_decay=0.5)
    with pytest.raises(ValueError, match="clip"):
        Adafactor([nn.Parameter(torch.ones(2))], clip=0.0)
