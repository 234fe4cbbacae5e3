"""Signum against its equation in float64 and Lion with equal betas."""

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.lion import Lion
from trainwright.optim.signum import Signum


def draws(shape, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize("role, decayed", [("matrix", True), ("norm", False)])
def test_it_is_the_equation(beta, role, decayed):
    (start,) = draws((5, 7), 1, seed=1)
    p = nn.Parameter(start.clone())
    config = build("optimizer", {"name": "signum", "lr": 0.01, "weight_decay": 0.4, "momentum": beta})
    optimizer = config.build([NamedParam("p", p, role)])
    w, m = start.clone(), torch.zeros_like(start)
    for grad in draws((5, 7), 12):
        p.grad = grad.clone()
        optimizer.step()
        m = beta * m + (1 - beta) * grad
        w = w * (1 - 0.01 * 0.4 * decayed) - 0.01 * m.sign()
    torch.testing.assert_close(p.data, w, atol=1e-13, rtol=1e-12)
    assert ("momentum" in optimizer.state[p]) == (beta > 0)


def test_lion_with_equal_betas():
    (start,) = draws((5, 7), 1, seed=1)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = Signum([p], lr=0.01, momentum=0.9, weight_decay=0.1)
    b = Lion([q], lr=0.01, betas=(0.9, 0.9), weight_decay=0.1)
    for grad in draws((5, 7), 12):
        p.grad, q.grad = grad.clone(), grad.clone()
        a.step(), b.step()
    assert torch.equal(p, q)


def test_bad_settings():
    with pytest.raises(ConfigError, match="less than 1"):
        build("optimizer", {"name": "signum", "momentum": 1.0})
    with pytest.raises(ValueError, match="momentum"):
        Signum([nn.Parameter(torch.ones(2))], momentum=1.0)
