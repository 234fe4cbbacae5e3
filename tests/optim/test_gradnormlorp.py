"""GradNormLoRP: the card's checks (a) to (e), the equations in float64, and refusals."""

import one_column_worker
import pytest
import torch
import torch.multiprocessing as mp
from layouts_worker import on_two_ranks
from optimizer_zoo import Zoo, named
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError
from trainwright.core.params import named_params
from trainwright.core.registry import build
from trainwright.models.transforms.lora import LoRALinear
from trainwright.optim.galore import GaLore
from trainwright.optim.gradnormlorp import GradNormLoRP, rebuild_, split_gradient
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
        assert len(found) == 3 * 10 + 6
        for case, figures in found.items():
            assert max(figures["difference"], figures["resumed"]) < 1e-10 < 1e-3 < figures["way"], case


# (e)
def _dora(dropout=0.0):
    torch.manual_seed(0)
    linear = nn.Linear(9, 6, dtype=torch.float64)
    layer = LoRALinear(linear, rank=2, alpha=4, dropout=dropout, dora=True)
    with torch.no_grad():
        layer.lora_b.normal_(generator=torch.Generator().manual_seed(1))
        layer.lora_magnitude.mul_(torch.linspace(0.5, 2, 6))
    return linear, layer


def test_dora_merges_and_comes_back():
    linear, layer = _dora(dropout=0.5)
    layer.eval()
    x, frozen = _randn(4, 9, seed=3), layer.weight.detach().clone()
    v = frozen + 2.0 * layer.lora_b @ layer.lora_a
    wanted = layer.lora_magnitude[:, None] * v / v.norm(dim=1, keepdim=True)
    before = layer(x)
    assert not torch.allclose(before, linear(x))
    torch.testing.assert_close(layer.merged_weight(), wanted.detach(), rtol=1e-6, atol=1e-9)
    plain = layer.plain()  # no cost at inference: a layer of the original kind
    assert type(plain) is nn.Linear and {n for n, _ in plain.named_parameters()} == {"weight", "bias"}
    torch.testing.assert_close(plain(x), before, rtol=1e-6, atol=1e-9)
    layer.merge()
    torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-9)
    layer.unmerge()
    assert torch.equal(layer.weight, frozen) and torch.equal(layer(x), before)


# fine-tuning
DENSE = {"name": "decoder", "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "max_seq_len": 32}
PAPER = {"name": "gradnormlorp", "lr": 3e-5, "rank": 4, "scale": 4.0, "gap": 500}


def _adapted(dora=True, **more):
    torch.manual_seed(0)
    model = build("model", {**DENSE, **more}).build(61, 32)
    return build("transform", {"name": "lora", "dora": dora, "rank": 4, "dropout": 0.0}).apply(model)


def _tokens(t):
    return torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(t))


def _loss(model, t):
    tokens = _tokens(t)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def test_adapters_get_galore_on_a_and_b_and_adamw_on_the_magnitudes():
    """Side by side with GaLore and AdamW, each on its own parameters, over a new projection."""
    settings = {"rank": 2, "scale": 4.0, "gap": 3, "lr": 0.002, "weight_decay": 0.1}
    ours, theirs = _adapted(), _adapted()
    optimizer = build("optimizer", {**settings, "name": "gradnormlorp", "inner": {"name": "adamw", "lr": 0.01}}).build(
        named_params(ours)
    )
    named_ = named_params(theirs)
    galore = GaLore([n.param for n in named_ if n.param.ndim == 2], 0.002, weight_decay=0.1, rank=2, scale=4.0, gap=3)
    magnitudes = [n for n in named_ if n.param.ndim == 1]
    assert len(magnitudes) == 14 and all(n.name.endswith("lora_magnitude") for n in magnitudes)
    adamw = build("optimizer", {"name": "adamw", "lr": 0.01}).build(magnitudes)
    start = {n: p.detach().clone() for n, p in ours.named_parameters()}
    for t in range(7):
        for model, optimizers in ((ours, [optimizer]), (theirs, [galore, adamw])):
            _loss(model, t).backward()
            for o in optimizers:
                o.step(), o.zero_grad()
    for (n, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.data, q.data, rtol=1e-5, atol=1e-7, msg=n)
        assert torch.equal(p.data, start[n]) == ("lora_" not in n), n


def test_bytes_of_the_state_of_adapters():
    """Of A [r, in]: P r p + 2 in p; of B [out, r]: the same with out; of m two numbers for each row."""
    model = _adapted()
    optimizer = build("optimizer", {**PAPER, "rank": 2}).build(named_params(model))
    _loss(model, 0).backward()
    optimizer.step()
    expected = steps = 0
    for n in named_params(model):
        p = n.param
        if p.ndim == 2:
            expected += 4 * (4 * 2 + 2 * 2 * max(p.shape))
        else:
            expected += 4 * 2 * p.numel()
            steps += 4 * ("step" in optimizer.state[p] and torch.is_tensor(optimizer.state[p]["step"]))
    assert optimizer_state_bytes(optimizer) == expected + steps


@pytest.mark.parametrize("optimizer", [PAPER, {"name": "adamw"}, {"name": "muon"}, {"name": "galore"}])
def test_the_dora_form_learns_under_any_optimizer(optimizer):
    rate = {"adamw": 0.02, "muon": 0.02, "galore": 0.02, "gradnormlorp": 0.005}[optimizer["name"]]
    optimizer = {**optimizer, "lr": rate}
    if optimizer["name"] != "adamw":
        optimizer["inner"] = {"name": "adamw", "lr": 0.02}
    model = _adapted()
    built = build("optimizer", optimizer).build(named_params(model))
    losses = []
    for _ in range(25):
        loss = _loss(model, 0)
        loss.backward()
        losses.append(float(loss.detach()))
        built.step(), built.zero_grad()
    assert losses[-1] < losses[0] - 0.2


def test_adapters_without_magnitudes_are_named(caplog):
    build("optimizer", PAPER).build(named_params(_adapted()))
    assert not caplog.records
    build("optimizer", PAPER).build(named_params(_adapted(dora=False)))
    assert "A and B of 14 adapters have no magnitudes" in caplog.text


def test_a_rank_above_the_adapters_is_refused():
    with pytest.raises(ConfigError, match=r"rank=5.*\(4\) of blocks.0.attn.q.lora_a.*rank <= 4"):
        build("optimizer", {**PAPER, "rank": 5}).build(named_params(_adapted()))


def test_a_run_of_the_paper_form_resumes_exactly(recipe):
    data = recipe(
        transforms=[{"name": "lora", "dora": True, "rank": 4, "alpha": 16, "dropout": 0.1}],
        optimizer={**PAPER, "rank": 2, "gap": 2, "inner": {"name": "adamw", "lr": 1e-3}},
        checkpoint={"every": 3, "asynchronous": False},
        **{"train.steps": 5},
    )
    rows = {"whole": [], "parts": []}
    Trainer(RunConfig.load({**data, "run": {**data["run"], "name": "whole"}})).fit(on_step=rows["whole"].append)
    data = {**data, "run": {**data["run"], "name": "parts"}}
    stopped = Trainer(RunConfig.load(data))
    stopped._finished = lambda: stopped.progress.step >= 3
    stopped.fit(on_step=rows["parts"].append)
    Trainer(RunConfig.load(data), resume=True).fit(on_step=rows["parts"].append)
    assert [r["loss"] for r in rows["parts"]] == [r["loss"] for r in rows["whole"]]
    assert len(rows["whole"]) == 5


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


def test_a_column_that_is_sharded(tmp_path):
    """Numbers of rows have the shape of such a matrix and yet another layout; AdaPM's likewise."""
    mp.spawn(one_column_worker.job, args=(str(tmp_path),), nprocs=2)  # raises what a rank raises
