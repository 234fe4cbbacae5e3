"""Functions of whole matrices: stacks, fused matrices, experts, and sharded ones divided over four real ranks."""

import json
import time

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from whole_worker import SHAPES, draw, polar, work

from trainwright.optim import whole
from trainwright.optim.muon import Muon
from trainwright.optim.whole import map_whole, on_stacks, owners


def test_every_matrix_alone():
    tensors = draw(SHAPES)
    for t, u in zip(tensors, map_whole(polar, tensors), strict=True):
        assert u.shape == t.shape
        torch.testing.assert_close(u, torch.stack([polar(m) for m in t.reshape(-1, *t.shape[-2:])]).reshape(t.shape))


def test_equal_shapes_go_through_together():
    calls = []
    map_whole(lambda s: calls.append(tuple(s.shape)) or s, draw(SHAPES))
    assert sorted(calls) == sorted([(2, 13, 6), (1, 6, 13), (4, 6, 6), (1, 2, 5), (1, 1, 7), (1, 40, 8)])


def test_fused_matrices_are_taken_apart():
    q, k, v = draw([(8, 6), (4, 6), (4, 6)])
    (fused,) = map_whole(polar, [torch.cat([q, k, v])], splits=(8, 4, 4))
    torch.testing.assert_close(fused, torch.cat([polar(q), polar(k), polar(v)]))
    (columns,) = map_whole(polar, [torch.cat([q, k, v]).T.contiguous()], splits=(-8, -4, -4))
    torch.testing.assert_close(columns, torch.cat([polar(q), polar(k), polar(v)]).T)
    gate_up = torch.stack([torch.cat(pair) for pair in zip(*[draw([(5, 6)] * 3, s) for s in (1, 2)], strict=True)])
    (experts,) = map_whole(polar, [gate_up], splits=(5, 5))
    torch.testing.assert_close(experts, torch.cat([polar(gate_up[:, :5]), polar(gate_up[:, 5:])], dim=1))


def test_columns_and_empty_tensors():
    a, b = draw([(4, 3), (0, 3), (4, 3)], 1), draw([(4, 3), (0, 3), (4, 3)], 2)
    found = on_stacks(lambda x, y: x - 2 * y, a, b)
    for x, y, z in zip(a, b, found, strict=True):
        torch.testing.assert_close(z, x - 2 * y)


def test_work_is_shared_out_by_cost():
    shapes = [torch.Size(s) for s in [(64, 64)] * 4 + [(256, 64)] * 4 + [(8, 8)] * 3]
    owner = owners(shapes, 4)
    load = [sum(s.numel() * min(s[-2:]) for s, o in zip(shapes, owner, strict=True) if o == r) for r in range(4)]
    assert max(load) <= 1.01 * min(load)


def test_muon_refuses_splits_that_do_not_add_up():
    with pytest.raises(ValueError, match=r"splits=\(8, 4\) do not add up"):
        Muon([{"params": [nn.Parameter(torch.zeros(16, 4))], "splits": (8, 4)}])


def test_muon_on_fused_matrices_is_muon_on_each():
    q, k = draw([(8, 6), (4, 6)])
    fused, apart = nn.Parameter(torch.cat([q, k])), [nn.Parameter(q.clone()), nn.Parameter(k.clone())]
    a = Muon([{"params": [fused], "splits": (8, 4)}], dtype=torch.float32)
    b = Muon(apart, dtype=torch.float32)
    for step in range(3):
        apart[0].grad, apart[1].grad = draw([(8, 6), (4, 6)], 10 + step)
        fused.grad = torch.cat([p.grad for p in apart])
        a.step(), b.step()
    torch.testing.assert_close(fused.data, torch.cat([p.data for p in apart]), atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    job = mp.spawn(work, args=(str(folder),), nprocs=4, join=False)
    deadline = time.monotonic() + 120
    while not (finished := job.join(timeout=1)) and time.monotonic() < deadline:
        pass
    if not finished:
        for process in job.processes:
            process.kill()
        pytest.fail("the four-rank job did not end within 120 s")
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(4)]


@pytest.mark.parametrize("layout", ["rows", "columns", "hybrid", "both", "replicated"])
@pytest.mark.parametrize("divide", [True, False])
def test_sharded_equals_whole(ranks, layout, divide):
    for r in ranks:
        figures = r[f"{layout} {divide}"]
        assert figures["error"] < 1e-6
        assert figures["laid_out"]


def test_no_matrix_is_computed_twice(ranks):
    total = sum(torch.Size(s).numel() * min(s[-2:]) for s in SHAPES)
    assert sum(r["rows True"]["work"] for r in ranks) == total
    assert max(r["rows True"]["work"] for r in ranks) < 0.6 * total  # one matrix has 0.54 of it
    assert sum(r["hybrid True"]["work"] for r in ranks) == 2 * total  # once in each replica
    experts = 3 * 6 * 6 * 6
    assert all(r["rows False"]["work"] >= total - experts for r in ranks)


def test_fused_and_sharded(ranks):
    assert all(r["fused"] < 1e-6 for r in ranks)


def test_half_the_traffic_costs_half_the_digits(ranks):
    assert all(1e-6 < r["bf16"] < 0.02 for r in ranks)


def test_muon_of_four_ranks_is_muon(ranks):
    assert all(r["muon"] < 1e-6 for r in ranks)
    assert sum(r["muon_state"] for r in ranks) == sum(torch.Size(s).numel() for s in SHAPES)


def test_rounds_bound_what_a_rank_holds(monkeypatch):
    monkeypatch.setattr(whole, "CPU_BATCH_BYTES", 4 * 13 * 6 + 1)
    calls = []
    map_whole(lambda s: calls.append(s.shape[0]) or s, draw([(13, 6)] * 3))
    assert calls == [1, 1, 1]
