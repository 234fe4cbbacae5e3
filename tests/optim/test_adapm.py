"""AdaPM: the card's checks (a) to (e), its policy by names, and refusals."""

import logging

import pytest
import torch
from layouts_worker import on_two_ranks
from optimizer_zoo import Zoo, named, train
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam, named_params
from trainwright.core.registry import build
from trainwright.optim.adapm import AdaPM, low_rank_momentum
from trainwright.optim.adapm_blocks import POLICY, block_of, momentum_numel
from trainwright.optim.state import optimizer_state_bytes


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _start(count, m, n, r):
    """left and right of no momentum yet"""
    return torch.zeros(count, m, r, dtype=torch.float64), _randn(1, n, r, seed=99).expand(count, n, r).clone()


# (a)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (3, 5, 8), (3, 8, 5)])
def test_full_rank_is_adamw(shape):
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    start = _randn(*shape, seed=1)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = AdaPM([p], **settings, momentum="low_rank", rank=1.0)
    b = torch.optim.AdamW([q], **settings)
    for t in range(20):
        p.grad = _randn(*shape, seed=10 + t)
        q.grad = p.grad.clone()
        a.step(), b.step()
    torch.testing.assert_close(p.data - start, q.data - start, rtol=1e-4, atol=1e-9)


def test_full_rank_is_adamw_in_float32():
    start = _randn(12, 8, seed=1, dtype=torch.float32)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a, b = AdaPM([p], momentum="low_rank", rank=8), torch.optim.AdamW([q], betas=(0.9, 0.95), weight_decay=0.1)
    for t in range(20):
        p.grad = _randn(12, 8, seed=10 + t, dtype=torch.float32)
        q.grad = p.grad.clone()
        a.step(), b.step()
    assert (p - q).norm() < 1e-4 * (q - start).norm()


# (b)
def test_constant_gradient_of_low_rank_is_estimated_exactly():
    grad = (_randn(24, 4, seed=1) @ _randn(4, 40, seed=2))[None]
    left, right = _start(1, 24, 40, 4)
    for t in range(1, 31):
        estimate, left, right = low_rank_momentum(grad, left, right, 0.9, t)
        torch.testing.assert_close(estimate, grad, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(left.mT @ left, torch.eye(4, dtype=torch.float64)[None])


def test_constant_gaussian_gradient_is_estimated_within_7_percent():
    worst = []
    for seed in range(5):
        errors = []
        grad = _randn(1, 24, 40, seed=seed)
        left, right = _start(1, 24, 40, 4)
        for t in range(1, 101):
            estimate, left, right = low_rank_momentum(grad, left, right, 0.9, t)
            errors.append(float((estimate - grad).norm() / grad.norm()))
        worst.append(max(errors))
    assert sorted(worst)[2] < 0.07 and max(worst) < 0.08  # the card's figure is one draw's


def test_one_step_is_the_equation():
    """T formed whole, orthonormal basis by SVD of T R: the estimate depends on its span alone."""
    count, m, n, r, beta, c, t = 2, 6, 9, 3, 0.8, 0.4, 5
    left, right, grad = torch.linalg.qr(_randn(count, m, r, seed=1)).Q, _randn(count, n, r, seed=2), _randn(count, m, n)
    estimate, new_left, new_right = low_rank_momentum(grad, left, right, beta, t, c)
    turned = beta * left @ right.mT + (1 - beta) * grad
    basis = torch.linalg.svd(turned @ right, full_matrices=False).U
    onto = basis @ basis.mT
    wanted = onto @ turned / (1 - beta**t) + c * (grad - onto @ grad)
    torch.testing.assert_close(estimate, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(new_left @ new_right.mT, onto @ turned, rtol=1e-10, atol=1e-10)


# (c)
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_correction_brings_the_signal_back(noise):
    signal = _randn(1, 24, 40, seed=3)
    recovered = {}
    for correction in (1.0, 0.0):
        left, right = _start(1, 24, 40, 4)
        total = torch.zeros_like(signal)
        g = torch.Generator().manual_seed(4)
        for t in range(1, 2001):
            grad = signal + noise * torch.randn(signal.shape, generator=g, dtype=torch.float64)
            estimate, left, right = low_rank_momentum(grad, left, right, 0.9, t, correction)
            total += estimate
        recovered[correction] = float((total / 2000 * signal).sum() / signal.square().sum())
    assert recovered[1.0] >= 0.95
    assert recovered[0.0] <= 0.4


# (d)
def _llama_60m():
    dim, ffn, layers, vocab = 512, 1376, 8, 32000
    shapes = {"model.embed_tokens.weight": ((vocab, dim), "embedding"), "lm_head.weight": ((vocab, dim), "head")}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{x}_proj.weight": ((dim, dim), "matrix") for x in "qkvo"}
        shapes |= {f"{at}.mlp.{x}_proj.weight": ((ffn, dim), "matrix") for x in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = ((dim, ffn), "matrix")
        shapes[f"{at}.input_layernorm.weight"] = ((dim,), "norm")
    return [NamedParam(n, nn.Parameter(torch.empty(s, device="meta")), r) for n, (s, r) in shapes.items()]


def test_momentum_of_a_60m_llama(caplog):
    params = _llama_60m()
    with caplog.at_level(logging.INFO, "trainwright"):
        optimizer = build("optimizer", "adapm").build(params)
    kinds = {id(p): g["momentum"] for g in optimizer.param_groups for p in g["params"]}
    kept = {"full": 0, "low_rank": 0, "none": 0}
    for n in params:
        kept[kinds[id(n.param)]] += momentum_numel(n, kinds[id(n.param)], 0.05)
        assert kinds[id(n.param)] == POLICY[block_of(n.name, n.role)], n.name
    rank = 26  # ceil(512 / 20)
    assert kept["low_rank"] == 8 * rank * (2 * (512 + 512) + 3 * (512 + 1376))
    assert kept["full"] == 8 * (512 * 512 + 512)
    assert sum(kept.values()) <= 0.1 * sum(n.param.numel() for n in params)
    lines = [r.getMessage() for r in caplog.records]
    for block, share in (("v", "100.0"), ("q", "10.2"), ("o", "0.0"), ("mlp", "7.0"), ("embedding", "0.0")):
        assert any(f"adapm: {block}: " in line and f", {share} % of AdamW's" in line for line in lines), block


@pytest.mark.parametrize("second_moment", ["full", "blockwise"])
def test_bytes(second_moment):
    model = Zoo()
    optimizer = build("optimizer", {"name": "adapm", "second_moment": second_moment}).build(named(model))
    train(model, optimizer, 2)
    expected = 0
    for n in named(model):
        momentum = POLICY[block_of(n.name, n.role)]
        expected += momentum_numel(n, momentum, 0.05) * 4
        by_row = second_moment == "blockwise" and n.param.ndim >= 2
        expected += 4 * n.param.numel() // (n.param.shape[-1] if by_row else 1)
        expected += 4 * (momentum == "full" and second_moment == "full")  # the fused kernel's count of steps
    assert optimizer_state_bytes(optimizer) == expected


# (e)
def test_full_everywhere_is_adamw():
    ours, wrapped, torchs = Zoo(), Zoo(), Zoo()
    policy = dict.fromkeys(POLICY, "full")
    train(ours, build("optimizer", {"name": "adapm", "policy": policy}).build(named(ours)), 10)
    train(wrapped, build("optimizer", "adamw").build_rule(named(wrapped)), 10)
    train(torchs, build("optimizer", "adamw").build(named(torchs)), 10)
    for (n, p), q, t in zip(ours.named_parameters(), wrapped.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(p, q), n
        torch.testing.assert_close(p, t, atol=1e-6, rtol=1e-5, msg=n)


def _blockwise(momentum):
    start = _randn(5, 7, seed=1)
    lr, b1, b2, eps, wd = 0.01, 0.8, 0.9, 1e-6, 0.2
    p = nn.Parameter(start.clone())
    optimizer = AdaPM([p], lr, (b1, b2), eps, wd, momentum=momentum, second_moment="blockwise")
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros(5, 1, dtype=torch.float64)
    for t in range(1, 8):
        p.grad = _randn(5, 7, seed=10 + t)
        m = b1 * m + (1 - b1) * p.grad
        v = b2 * v + (1 - b2) * p.grad.square().mean(1, keepdim=True)
        top = m / (1 - b1**t) if momentum == "full" else p.grad
        w = w * (1 - lr * wd) - lr * top / ((v / (1 - b2**t)).sqrt() + eps)
        optimizer.step()
    torch.testing.assert_close(p.data, w, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("momentum", ["full", "none"])
def test_blockwise_is_the_equation(momentum):
    _blockwise(momentum)


def test_no_momentum_is_the_equation():
    start = _randn(5, 7, seed=1)
    p = nn.Parameter(start.clone())
    optimizer = AdaPM([p], 0.01, (0.9, 0.9), 1e-6, 0.2, momentum="none")
    w, v = start.clone(), torch.zeros_like(start)
    for t in range(1, 8):
        p.grad = _randn(5, 7, seed=10 + t)
        v = 0.9 * v + 0.1 * p.grad**2
        w = w * (1 - 0.002) - 0.01 * p.grad / ((v / (1 - 0.9**t)).sqrt() + 1e-6)
        optimizer.step()
    torch.testing.assert_close(p.data, w, rtol=1e-12, atol=1e-13)
    assert set(optimizer.state[p]) == {"step", "exp_avg_sq"}


def test_fused_and_stacked_matrices_are_each_their_own():
    stacked = _randn(3, 6, 4, seed=1)
    fused = _randn(9, 8, seed=2)
    a = [nn.Parameter(stacked.clone()), nn.Parameter(fused.clone())]
    b = [nn.Parameter(m.clone()) for m in (*stacked, *fused.split([4, 5]))]
    settings = {"momentum": "low_rank", "rank": 2}
    one = AdaPM([{"params": a[:1]}, {"params": a[1:], "splits": (4, 5)}], **settings)
    two = AdaPM(b, **settings)
    for t in range(6):
        a[0].grad, a[1].grad = _randn(3, 6, 4, seed=10 + t), _randn(9, 8, seed=20 + t)
        for p, g in zip(b, (*a[0].grad, *a[1].grad.split([4, 5])), strict=True):
            p.grad = g.clone()
        one.step(), two.step()
    torch.testing.assert_close(a[0].data, torch.stack([p.data for p in b[:3]]))
    torch.testing.assert_close(a[1].data, torch.cat([p.data for p in b[3:]]))


def test_a_zero_gradient_first_does_no_harm():
    p = nn.Parameter(_randn(6, 9))
    optimizer = AdaPM([p], weight_decay=0.0, momentum="low_rank", rank=2)
    for _ in range(2):
        before = p.detach().clone()
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert torch.equal(p, before)
    grad = _randn(6, 2, seed=1) @ _randn(2, 9, seed=2)
    left, right = torch.zeros(1, 6, 2, dtype=torch.float64), torch.zeros(1, 9, 2, dtype=torch.float64)
    for t in range(1, 60):
        estimate, left, right = low_rank_momentum(grad[None], left, right, 0.9, t)
    torch.testing.assert_close(estimate[0], grad, rtol=5e-3, atol=5e-3)  # (1 - beta^60 of the start)


NAMES = {
    "blocks.3.attn.q.weight": "q", "blocks.3.attn.k.weight": "k", "blocks.3.attn.v.weight": "v",
    "blocks.3.attn.o.weight": "o", "blocks.0.mlp.gate.weight": "mlp", "blocks.0.mlp.down.weight": "mlp",
    "model.layers.0.self_attn.q_proj.weight": "q", "model.layers.0.self_attn.v_proj.weight": "v",
    "model.layers.0.mlp.gate_up_proj.weight": "mlp", "transformer.h.0.attn.c_attn.weight": "qkv",
    "transformer.h.0.attn.c_proj.weight": "o", "transformer.h.0.mlp.c_proj.weight": "mlp",
    "transformer.h.0.mlp.c_fc.weight": "mlp", "gpt_neox.layers.0.attention.query_key_value.weight": "qkv",
    "gpt_neox.layers.0.attention.dense.weight": "o", "gpt_neox.layers.0.mlp.dense_4h_to_h.weight": "mlp",
    "encoder.layer.0.attention.output.dense.weight": "o", "encoder.layer.0.intermediate.dense.weight": "mlp",
    "model.decoder.layers.0.self_attn.out_proj.weight": "o", "model.decoder.layers.0.fc1.weight": "mlp",
    "layers.0.mixer.out_proj.weight": "default", "base.layers.0.q_proj.lora_A.default.weight": "q",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_blocks_by_name(name):
    assert block_of(name, "matrix") == NAMES[name]


def test_every_matrix_of_our_decoder_is_known():
    config = build("model", {"name": "decoder", "dim": 32, "n_layers": 2, "n_heads": 2})
    model = config.build(vocab_size=16, seq_len=8)
    blocks = {n.name: block_of(n.name, n.role) for n in named_params(model)}
    assert "default" not in blocks.values()
    assert {"q", "k", "v", "o", "mlp", "embedding", "norm"} <= set(blocks.values())


def _params(**shapes):
    return [NamedParam(n.replace("__", "."), nn.Parameter(torch.ones(s)), "matrix") for n, s in shapes.items()]


def test_patterns_come_before_blocks():
    params = _params(a__q_proj=(8, 8), b__q_proj=(8, 8), mixer__in=(8, 8))
    config = build("optimizer", {"name": "adapm", "policy": {"b.*": "none", "mixer.*": "low_rank"}})
    optimizer = config.build(params)
    kinds = {id(p): g["momentum"] for g in optimizer.param_groups for p in g["params"]}
    assert [kinds[id(n.param)] for n in params] == ["low_rank", "none", "low_rank"]


def test_names_that_say_nothing(caplog):
    with caplog.at_level(logging.INFO, "trainwright"):
        build("optimizer", "adapm").build(_params(a=(8, 8), up=(8, 8)))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert any("default: full momentum" in r.getMessage() and "(a)" in r.getMessage() for r in caplog.records)
    with caplog.at_level(logging.WARNING, "trainwright"):
        build("optimizer", "adapm").build(_params(a=(8, 8), b=(8, 8)))
    assert any("knows none of the 2 hidden matrices" in r.getMessage() for r in caplog.records)


def test_fused_qkv_needs_a_policy():
    params = _params(h__attn__c_attn=(24, 8))
    with pytest.raises(ConfigError, match=r"h\.attn\.c_attn.*set policy\.qkv"):
        build("optimizer", "adapm").build(params)
    optimizer = build("optimizer", {"name": "adapm", "policy": {"qkv": "low_rank"}}).build(params)
    assert optimizer.param_groups[0]["momentum"] == "low_rank"


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"rank": 0}, "at least 1"),
        ({"rank": -0.1}, "share in"),
        ({"rank": 1.5}, "share in"),
        ({"correction": 1.5}, "less than or equal to 1"),
        ({"correction": -0.5}, "greater than or equal to 0"),
        ({"betas": [1.0, 0.9]}, r"in \[0, 1\)"),
        ({"policy": {"qq": "full"}}, "unknown block 'qq'"),
        ({"policy": {"q": "half"}}, "policy"),
        ({"second_moment": "head"}, "second_moment"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "adapm", **settings})


def test_what_the_parameters_cannot_have():
    params = _params(q=(8, 6))
    with pytest.raises(ConfigError, match=r"rank=7.*\(6\) of q; set rank <= 6"):
        build("optimizer", {"name": "adapm", "rank": 7}).build(params)
    with pytest.raises(ConfigError, match=r"matches 'nothing\.\*'"):
        build("optimizer", {"name": "adapm", "policy": {"nothing.*": "full"}}).build(params)
    bias = NamedParam("b", nn.Parameter(torch.ones(3)), "bias")
    with pytest.raises(ConfigError, match="b is no matrix"):
        build("optimizer", {"name": "adapm", "policy": {"bias": "low_rank"}}).build([bias])
    for settings in ({"rank": 7}, {"correction": 2.0}, {"rank": 0}, {"momentum": "some"}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError):
            AdaPM([params[0].param], **{"momentum": "low_rank", **settings})
    with pytest.raises(ValueError, match="takes matrices"):
        AdaPM([bias.param], momentum="low_rank")


def test_late_parameters_have_their_own_count():
    """Bias correction is the parameter's: one whose first gradient comes later moves as if it were new."""
    start = _randn(6, 9)
    late, fresh, other = (nn.Parameter(start.clone()) for _ in range(3))
    a = AdaPM([late, other], weight_decay=0.0, momentum="low_rank", rank=2)
    b = AdaPM([fresh], weight_decay=0.0, momentum="low_rank", rank=2)
    for t in range(4):
        other.grad = _randn(6, 9, seed=t)
        if t >= 2:
            late.grad = _randn(6, 9, seed=10 + t)
            fresh.grad = late.grad.clone()
            b.step()
        a.step()
    torch.testing.assert_close(late.data, fresh.data)


def test_two_ranks(tmp_path):
    for found in on_two_ranks(tmp_path, "adapm"):
        # rank 2 of 64 x 96: R, the product, L^T Q, G^T Q and what goes back; by columns the product alone
        assert found.pop("sent") == [[96 + 128 + 4 + 192 + 96] * 4, [128] * 4]
        assert len(found) == 2 * 10 + 6
        for case, figures in found.items():
            assert max(figures["difference"], figures["resumed"]) < 1e-12 < 1e-3 < figures["way"], case


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (3, 16, 24)])
def test_state_lies_as_a_loaded_one_does(shape):
    """BLAS goes another way by the strides of a matrix of rank 1: a resumed run would differ in the last bit."""
    p = torch.nn.Parameter(torch.randn(*shape))
    optimizer = AdaPM([p], momentum="low_rank", rank=1)
    p.grad = torch.randn(*shape)
    optimizer.step()
    tensors = {k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
    assert {"basis", "factor"} <= set(tensors)
    for name, value in tensors.items():
        assert value.stride() == torch.empty(value.shape).stride(), name
