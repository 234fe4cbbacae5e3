"""Experts against a loop over tokens, the balancing loss against transformers, the balancing bias against its rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainwright.core.registry import build
from trainwright.models.base import Hidden
from trainwright.models.moe import MoE, load_metrics

torch.set_num_threads(1)


def make(score="softmax", normalise=True, bias=False, experts=5, top_k=2):
    torch.manual_seed(0)
    moe = MoE(8, 12, experts, top_k, score=score, normalise=normalise, bias_balanced=bias).double()
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return moe


def by_token(moe, x):
    """One token at a time, in plain algebra."""
    out = []
    for token in x.reshape(-1, x.shape[-1]):
        logits = moe.router.weight @ token
        scores = logits.sigmoid() if moe.score == "sigmoid" else logits.softmax(0)
        choice = scores if moe.expert_bias is None else scores + moe.expert_bias
        chosen = choice.argsort(descending=True)[: moe.top_k]
        weights = scores[chosen]
        if moe.normalise:
            weights = weights / weights.sum()
        out.append(
            sum(
                w * (moe.down[e] @ (F.silu(moe.gate[e] @ token) * (moe.up[e] @ token)))
                for w, e in zip(weights, chosen.tolist(), strict=True)
            )
        )
    return torch.stack(out).view(x.shape)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equals_a_loop_over_tokens(score, normalise, bias):
    moe = make(score, normalise, bias)
    if moe.expert_bias is not None:
        # float32 holds it whatever the weights are
        assert moe.expert_bias.dtype == torch.float32
        moe.expert_bias.copy_(torch.tensor([0.5, -0.5, 0.25, 0.0, -0.25]))
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    y, _, counts = moe(x)
    want = by_token(moe, x)
    # The router computes in float32.
    torch.testing.assert_close(y, want, atol=1e-6, rtol=0)
    assert counts.sum() == 2 * 7 * 2
    wanted = [x, *moe.parameters()]
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, wanted, g)
    ref = torch.autograd.grad(want, wanted, g)
    for a, b in zip(got, ref, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_an_expert_without_tokens_gets_a_zero_gradient():
    moe = make(experts=5, top_k=1, bias=True)
    moe.expert_bias.copy_(torch.tensor([9.0, 0, 0, 0, 0]))
    y, _, counts = moe(torch.randn(1, 4, 8, dtype=torch.float64))
    y.sum().backward()
    assert counts.tolist() == [4, 0, 0, 0, 0]
    assert moe.up.grad[0].abs().sum() > 0 and moe.up.grad[1:].abs().sum() == 0


def test_balancing_loss_equals_transformers():
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    moe = make(experts=6, top_k=3)
    x = torch.randn(3, 11, 8, dtype=torch.float64)
    _, loss, _ = moe(x)
    logits = moe.router(x.view(-1, 8)).float()
    torch.testing.assert_close(loss.float(), load_balancing_loss_func((logits,), 6, 3), atol=1e-6, rtol=1e-6)
    loss.backward()
    assert moe.router.weight.grad.abs().sum() > 0


def spec(**over):
    return {
        "name": "decoder",
        "family": "mixtral",
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "ffn_dim": 32,
        "n_experts": 4,
        **over,
    }


def test_aux_loss_and_metrics_reach_the_head():
    model = build("model", spec(aux_loss_coefficient=0.5)).build(50, 16)
    tokens = torch.randint(50, (2, 16))
    hidden = model(tokens, head_fn=lambda h: h)
    assert isinstance(hidden, Hidden) and hidden.aux_loss is not None
    assert 0.5 * 2 * 0.9 < hidden.aux_loss.item() < 0.5 * 2 * 2  # coefficient * k at an even load
    assert 0 < hidden.metrics["moe/load_entropy"] <= 1
    assert 0.25 <= hidden.metrics["moe/max_load_fraction"] <= 1
    hidden.aux_loss.backward()
    assert all(b.mlp.router.weight.grad.abs().sum() > 0 for b in model.blocks)
    assert build("model", spec(balance="none")).build(50, 16)(tokens, head_fn=lambda h: h).aux_loss is None


def test_metrics_of_known_loads():
    even, one = torch.tensor([3, 3, 3, 3]), torch.tensor([12, 0, 0, 0])
    assert load_metrics([even])["moe/load_entropy"].item() == pytest.approx(1)
    mixed = load_metrics([even, one])
    assert mixed["moe/load_entropy"].item() == pytest.approx(0.5)
    assert mixed["moe/max_load_fraction"].item() == pytest.approx((0.25 + 1) / 2)


def test_bias_moves_by_the_sign_of_the_load_and_evens_it():
    torch.manual_seed(0)
    model = build("model", spec(balance="bias", bias_update_rate=0.01)).build(50, 16).train()
    moe = model.blocks[0].mlp
    for block in model.blocks:  # a lopsided start: everything goes to expert 0
        block.mlp.expert_bias[0] = 0.5
    before = moe.expert_bias.clone()
    batches = [torch.randint(50, (4, 16)) for _ in range(2)]

    def step():
        return sum(model(b, head_fn=lambda h: h).metrics["moe/max_load_fraction"] for b in batches) / 2

    first = step()
    load = moe.load.clone()
    assert load.sum() == 2 * 4 * 16 * 2  # both micro-batches
    model.update_balancing()
    torch.testing.assert_close(moe.expert_bias, before + 0.01 * torch.sign(load.float().mean() - load))
    assert moe.load is None
    assert first > 0.49
    for _ in range(150):
        last = step()
        model.update_balancing()
    assert last < 0.32
    # An evaluation does not count.
    model.eval()
    step()
    assert moe.load is None


def test_bias_keeps_float32_when_the_model_is_cast():
    model = build("model", spec(balance="bias")).build(50, 16)
    model.blocks[0].mlp.expert_bias.fill_(0.123456789)
    model.to(torch.bfloat16)
    assert model.blocks[0].mlp.expert_bias.dtype == torch.float32
    assert model.blocks[0].mlp.expert_bias[0].item() == pytest.approx(0.123456789, abs=1e-7)
    assert model(torch.randint(50, (1, 4))).dtype == torch.bfloat16


def test_recomputation_does_not_count_twice():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    model = build("model", spec(balance="bias")).build(50, 16).train()
    tokens = torch.randint(50, (2, 16))
    want = model(tokens)
    want.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    loads = [b.mlp.load.clone() for b in model.blocks]
    model.zero_grad()
    for i in range(2):
        model.blocks[i].mlp.load = None
        model.blocks[i] = checkpoint_wrapper(model.blocks[i])
    model(tokens).sum().backward()
    for a, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, a)
    assert [b.mlp.load.tolist() for b in model.blocks] == [load.tolist() for load in loads]


def _worker(rank, world, port, queue):
    import os

    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build("model", spec(balance="bias")).build(50, 16).train()
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(5))
    model(tokens[rank : rank + 1])
    model.update_balancing()
    queue.put((rank, [b.mlp.expert_bias.tolist() for b in model.blocks]))
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_ranks_share_their_load():
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(_worker, args=(2, port, queue), nprocs=2, start_method="spawn")
    biases = dict(queue.get() for _ in range(2))
    torch.manual_seed(0)
    model = build("model", spec(balance="bias")).build(50, 16).train()
    model(torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(5)))
    model.update_balancing()
    assert biases[0] == biases[1] == [b.mlp.expert_bias.tolist() for b in model.blocks]


def test_the_operator_is_sound_for_the_compiler():
    from trainwright.models.moe import grouped_linear

    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    args = (x, w, torch.tensor([2, 0, 4]))
    torch.library.opcheck(
        grouped_linear, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
    torch.testing.assert_close(grouped_linear(*args), torch.cat((x[:2] @ w[0].T, x[2:] @ w[2].T)))
