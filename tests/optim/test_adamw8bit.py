"""AdamW with 8-bit moments against AdamW and torchao."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from optimizer_zoo import Zoo, named, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.adamw8bit import AdamW8bit
from trainwright.optim.low_rank_inner import dequantise, quantise
from trainwright.optim.state import allocate_named_state, load_named_state, named_state, optimizer_state_bytes


def draws(shape, steps, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


def run(optimizer, params, steps, first=0):
    for t in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = draws(p.shape, 1, p.dtype, seed=1000 * t + i)[0]
        optimizer.step()


def test_it_is_the_equation_with_rounded_moments():
    start, grads = draws((6, 300), 1, seed=1)[0], draws((6, 300), 10)
    p = nn.Parameter(start.clone())
    optimizer = AdamW8bit([p], lr=0.01, betas=(0.9, 0.95), eps=0.1, weight_decay=0.1, min_size=1)
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, g in enumerate(grads, 1):
        p.grad = g.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 0.1)
        w = w * (1 - 0.001) - 0.01 * u
        m, v = dequantise(*quantise(m, True), True), dequantise(*quantise(v, False), False)
        # what is held is what was rounded, but for entries at the middle between two codes
        held = dequantise(optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_scale"], True)
        assert (held - m).norm() < 1e-2 * m.norm()
    torch.testing.assert_close(p.data, w, atol=2e-3, rtol=0)
    assert (p.data - w).abs().median() < 1e-6


def test_first_step_is_adamw_and_later_ones_are_near():
    start = draws((32, 512), 1, seed=1)[0]
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = AdamW8bit([p], lr=0.01)
    b = torch.optim.AdamW([q], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    run(a, [p], 1), run(b, [q], 1)
    torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    run(a, [p], 30, first=1), run(b, [q], 30, first=1)
    assert 0 < (p - q).norm() < 0.08 * (q - start).norm()


def test_bytes():
    big, stack, small, vector = (nn.Parameter(torch.zeros(s)) for s in ((64, 1000), (2, 32, 128), (8, 8), (8192,)))
    optimizer = AdamW8bit([big, stack, small, vector])
    run(optimizer, [big, stack, small, vector], 2)
    expected = 2 * (big.numel() + 64 * 4 * 4) + 2 * (stack.numel() + 2 * 32 * 4) + 8 * (64 + 8192) + 2 * 4
    assert optimizer_state_bytes(optimizer) == expected
    assert 2 * (big.numel() + 64 * 4 * 4) / big.numel() < 2.04


def test_small_ones_are_adamw_bit_for_bit():
    p, q = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    spec = {"lr": 0.01, "weight_decay": 0.2}
    a = build("optimizer", {"name": "adamw8bit", **spec}).build([NamedParam("p", p, "matrix")])
    b = build("optimizer", {"name": "adamw", **spec}).build_rule([NamedParam("q", q, "matrix")])
    run(a, [p], 5), run(b, [q], 5)
    assert torch.equal(p, q)


def test_equals_torchao():
    """Rows of 256 are its blocks. It may round small second moments to 0, which are left out by eps here."""
    peer = pytest.importorskip("torchao.optim")
    start = draws((64, 256), 1, seed=1)[0]
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = AdamW8bit([p], lr=0.01, eps=1e-3, weight_decay=0.1)
    b = peer.AdamW8bit([q], lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    torch.compiler.set_stance("force_eager")
    try:
        run(a, [p], 20), run(b, [q], 20)
    finally:
        torch.compiler.set_stance("default")
    away = (q - start).norm()
    assert (p - q).norm() < 0.01 * away and away > 1
    for key in ("exp_avg", "exp_avg_sq"):
        apart = (b.state[q][key].codes.int() - a.state[p][key].int()).abs()
        assert (apart > 0).float().mean() < 0.01 and apart.max() < 10


@pytest.mark.parametrize("through", ["names", "torch", "copy"])
def test_resume_is_exact(through):
    starts = draws((16, 300), 1, seed=1) + draws((3, 8, 40), 1, seed=2) + draws((9,), 1, seed=3)
    straight, halted = ([nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    a, b = AdamW8bit(straight, min_size=100), AdamW8bit(halted, min_size=100)
    run(a, straight, 6), run(b, halted, 3)
    resumed = [nn.Parameter(p.detach().clone()) for p in halted]
    c = AdamW8bit(resumed, min_size=100)
    if through == "copy":
        resumed, c = copy.deepcopy((halted, b))
    elif through == "torch":
        c.load_state_dict(copy.deepcopy(b.state_dict()))
        assert {c.state[resumed[0]][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.uint8}
    else:
        names, new = ([NamedParam(str(i), p, "matrix") for i, p in enumerate(ps)] for ps in (halted, resumed))
        state = named_state(b, names)
        scalars = json.loads(json.dumps(state["scalars"]))
        tensors = allocate_named_state(new, scalars)
        for n, entries in tensors.items():
            for key, t in entries.items():
                t.copy_(state["tensors"][n][key])
        load_named_state(c, new, {"tensors": tensors, "scalars": scalars})
    run(c, resumed, 3, first=3)
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))


def test_shards(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        start = draws((16, 300), 1, seed=1)[0]
        p, q = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        a, b = AdamW8bit([p], min_size=100), AdamW8bit([q], min_size=100)
        for t, g in enumerate(draws((16, 300), 6)):
            p.grad, q.grad = g.clone(), distribute_tensor(g.clone(), mesh, [Shard(0)])
            a.step(), b.step()
            if t == 2:  # a checkpoint of one process goes on sharded
                state = named_state(a, [NamedParam("w", p, "matrix")])
                tensors = allocate_named_state([NamedParam("w", q, "matrix")], state["scalars"])
                for key, tensor in tensors["w"].items():
                    source = state["tensors"]["w"][key].clone()
                    tensor.copy_(distribute_tensor(source, mesh, [Shard(0)]) if isinstance(tensor, DTensor) else source)
                load_named_state(b, [NamedParam("w", q, "matrix")], {"tensors": tensors, "scalars": state["scalars"]})
        assert torch.equal(q.full_tensor(), p)
        assert all(isinstance(t, DTensor) for t in b.state[q].values() if isinstance(t, torch.Tensor))
        with pytest.raises(ValueError, match="sharded by columns"):
            AdamW8bit([nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(1)]))])
    finally:
        dist.destroy_process_group()


def test_bf16_and_zero_gradients():
    p = nn.Parameter(torch.ones(8, 600, dtype=torch.bfloat16))
    optimizer = AdamW8bit([p], weight_decay=0.0, lr=0.1)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, torch.ones_like(p))
    run(optimizer, [p], 3, first=1)
    assert p.isfinite().all() and (p == 1).float().mean() < 0.1


def test_portions(monkeypatch):
    from trainwright.optim import adamw8bit

    results = []
    for limit in (adamw8bit.BATCH_BYTES, 1):
        monkeypatch.setattr(adamw8bit, "BATCH_BYTES", limit)
        params = [nn.Parameter(torch.ones(4, 40)) for _ in range(5)]
        run(AdamW8bit(params, min_size=1), params, 3)
        results.append(torch.stack([p.data for p in params]))
    assert torch.equal(*results)


def test_a_regression_ends_where_adamw_ends():
    losses = []
    for name in ("adamw", "adamw8bit"):
        w = nn.Parameter(torch.zeros(16, 300))
        settings = {"name": name, "lr": 0.02, "weight_decay": 0.0} | ({"min_size": 1} if name == "adamw8bit" else {})
        optimizer = build("optimizer", settings).build([NamedParam("w", w, "matrix")])
        x, wanted = draws((600, 300), 1)[0], draws((16, 300), 1, seed=1)[0]
        losses.append(float(((x @ wanted.T) ** 2).mean()))
        for _ in range(150):
            loss = ((x @ (w - wanted).T) ** 2).mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(float(loss.detach()))
    start, plain, _, rounded = losses
    assert plain < 0.002 * start and rounded < 0.003 * start


def test_descends_with_every_matrix_in_8_bits():
    model = Zoo()
    optimizer = build("optimizer", {"name": "adamw8bit", "min_size": 0}).build(named(model))
    found = train(model, optimizer, 120)
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    assert optimizer.state[model.up]["exp_avg"].dtype == torch.uint8


def test_settings_that_make_no_sense():
    with pytest.raises(ConfigError, match="greater than or equal to 0"):
        build("optimizer", {"name": "adamw8bit", "min_size": -1})
    with pytest.raises(ConfigError, match="in \\[0, 1\\)"):
        build("optimizer", {"name": "adamw8bit", "betas": [0.9, 1.0]})
