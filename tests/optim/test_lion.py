"""Lion against its equations in float64 and the public package."""

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.base import UpdateRule
from trainwright.optim.lion import Lion


def draws(shape, steps, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


@pytest.mark.parametrize("shape", [(5, 7), (6,), (2, 3, 4), ()])
@pytest.mark.parametrize("role, decayed", [("matrix", True), ("norm", False)])
def test_lion_is_the_equation(shape, role, decayed):
    (start,) = draws(shape, 1, seed=1)
    lr, wd, b1, b2 = 0.01, 0.4, 0.8, 0.95
    p = nn.Parameter(start.clone())
    config = build("optimizer", {"name": "lion", "lr": lr, "weight_decay": wd, "betas": [b1, b2]})
    optimizer = config.build([NamedParam("p", p, role)])
    w, m = start.clone(), torch.zeros_like(start)
    for grad in draws(shape, 12):
        p.grad = grad.clone()
        optimizer.step()
        u = (b1 * m + (1 - b1) * grad).sign()
        m = b2 * m + (1 - b2) * grad
        w = w * (1 - lr * wd * decayed) - lr * u
    torch.testing.assert_close(p.data, w, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(optimizer.state[p]["momentum"], m, atol=1e-13, rtol=1e-12)


def test_betas_of_zero_give_signs_of_the_gradient():
    p = nn.Parameter(torch.zeros(4))
    optimizer = Lion([p], lr=0.5, betas=(0.0, 0.0), weight_decay=0.0)
    p.grad = torch.tensor([3.0, -1e-20, 0.0, -7.0])
    optimizer.step()
    assert p.tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_equals_pytorch_optimizer():
    peer = pytest.importorskip("pytorch_optimizer")
    starts = draws((6, 5), 1, torch.float32, seed=2) + draws((5,), 1, torch.float32, seed=3)
    ours, theirs = ([nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    a = Lion(ours, lr=0.01, betas=(0.9, 0.99), weight_decay=0.2)
    b = peer.Lion(theirs, lr=0.01, betas=(0.9, 0.99), weight_decay=0.2, weight_decouple=True)
    for t in range(20):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = draws(p.shape, 1, torch.float32, seed=100 * t + i)[0]
            q.grad = p.grad.clone()
        a.step(), b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


def test_its_update_can_be_wrapped():
    p = nn.Parameter(torch.ones(3, 3))
    assert isinstance(build("optimizer", "lion").build_rule([NamedParam("p", p, "matrix")]), UpdateRule)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"betas": [0.9, 1.0]}, "in \\[0, 1\\)"),
        ({"betas": [-0.1, 0.9]}, "in \\[0, 1\\)"),
        ({"lr": 0}, "greater than 0"),
        ({"lr": 0.5, "weight_decay": 2.0}, "lr \\* weight_decay"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "lion", **settings})


def test_the_class_refuses_bad_betas():
    with pytest.raises(ValueError, match="betas"):
        Lion([nn.Parameter(torch.ones(2))], betas=(0.9, 1.5))
