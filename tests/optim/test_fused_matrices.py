"""Matrices fused into one parameter are stepped as if each were a parameter of its own, by every matrix method."""

import pytest
import torch
from torch import nn

from trainwright.core.params import NamedParam
from trainwright.core.registry import build, methods
from trainwright.optim.matrix import MatrixConfig

METHODS = [m.name for m in methods("optimizer") if issubclass(m.config, MatrixConfig)] + ["adafactor"]
SIZES = (8, 4, 6)


def draw(seed, width=5):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, width, generator=g) for n in SIZES]


def fuse(parts, way):
    rows = torch.cat(parts)
    if way == "columns":
        return torch.cat([p.T for p in parts], dim=1).contiguous()
    if way == "experts":
        return torch.stack([rows, 2 * rows.flip(1)])
    return rows


def parts_of(parts, way):
    if way == "columns":
        return [p.T.contiguous() for p in parts]
    if way == "experts":
        return [torch.stack([p, 2 * p.flip(1)]) for p in parts]
    return [p.clone() for p in parts]


@pytest.mark.parametrize("way", ["rows", "columns", "experts"])
@pytest.mark.parametrize("name", METHODS)
def test_fused_is_apart(name, way):
    role = "expert" if way == "experts" else "matrix"
    splits = tuple(-n for n in SIZES) if way == "columns" else SIZES
    start = draw(0)
    fused = nn.Parameter(fuse(start, way))
    if name == "gradnormlorp" and way == "columns":
        # Its norms are of output rows, and what is fused along columns is stored [in, out].
        start_parts, way_apart = [p.clone() for p in start], "rows"
    else:
        start_parts, way_apart = parts_of(start, way), way
    apart = [nn.Parameter(p) for p in start_parts]
    config = build("optimizer", {"name": name})
    a = config.build([NamedParam("qkv", fused, role, splits)])
    b = config.build([NamedParam(n, p, role) for n, p in zip("qkv", apart, strict=True)])
    for step in range(4):
        grads = draw(10 + step)
        fused.grad = fuse(grads, way)
        for p, g in zip(apart, parts_of(grads, way_apart), strict=True):
            p.grad = g
        a.step(), b.step()
    joined = torch.cat([p.data for p in apart], dim=1 if way_apart != "rows" else 0)
    joined = joined if way_apart == way else joined.T
    assert (joined - fuse(start, way)).abs().max() > 1e-4
    torch.testing.assert_close(fused.data, joined, atol=1e-5, rtol=1e-4)
