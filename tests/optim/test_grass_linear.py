"""Grass with gradients of the selected rows alone: the card's check (d), and that a run is the one with whole ones."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError
from trainwright.core.params import named_params
from trainwright.core.registry import build
from trainwright.core.sliced_gradient import SlicedGradient, ask, is_offered, wanted
from trainwright.memory.fused_backward import FusedBackward
from trainwright.models.transforms.grass_linear import GrassLinear, slice_gradients
from trainwright.optim.clipping.global_norm import GlobalNormClipper
from trainwright.optim.grass import Grass

DENSE = {"name": "decoder", "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "max_seq_len": 32}


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Fixed:
    """Asks for the same rows or columns at every step."""

    def __init__(self, dim, indexes):
        self.found = (dim, torch.tensor(indexes))

    def slice_of(self, param):
        return self.found


# (d)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", [-2, -1])
def test_sliced_backward(dim, bias):
    torch.manual_seed(0)
    whole = nn.Linear(7, 12, dtype=torch.float64, bias=bias)
    layer = GrassLinear(copy.deepcopy(whole))
    asking = Fixed(dim, [1, 4, 5])
    ask(layer.weight, asking.slice_of)
    x, target = _randn(3, 5, 7, seed=1).requires_grad_(), _randn(3, 5, 12, seed=2)
    y = x.detach().clone().requires_grad_()
    torch.testing.assert_close(layer(x), whole(y))
    ((layer(x) - target) ** 2).sum().backward()
    ((whole(y) - target) ** 2).sum().backward()
    grad = layer.weight.grad
    assert isinstance(grad, SlicedGradient) and grad.shape == (12, 7)
    assert grad.kept.shape == ((3, 7) if dim == -2 else (12, 3))
    torch.testing.assert_close(grad.kept, whole.weight.grad.index_select(dim, grad.indexes), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(x.grad, y.grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, whole.bias.grad)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), whole(y))
    del asking, grad
    gc.collect()
    assert wanted(layer.weight) is None  # nobody asks any more


@pytest.mark.parametrize("dim", [-2, -1])
def test_sliced_backward_makes_no_larger_tensor(dim):
    """No product in the backward pass has the size of the weight."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                seen.append(tuple(out.shape))
            return out

    layer, asking = GrassLinear(nn.Linear(64, 32, bias=False)), Fixed(dim, [0, 1, 2, 3])
    ask(layer.weight, asking.slice_of)
    loss = layer(_randn(5, 64, dtype=torch.float32)).sum()
    with Watch():
        loss.backward()
    assert seen == [(4, 64) if dim == -2 else (32, 4)]


# what a sliced gradient is


def _sliced(dim=-2):
    values = _randn(2, 5, seed=1) if dim == -2 else _randn(4, 2, seed=1)
    return SlicedGradient(values, torch.tensor([3, 1]), dim, torch.Size([4, 5]))


@pytest.mark.parametrize("dim", [-2, -1])
def test_sums_scales_and_norms(dim):
    a, b, whole = _sliced(dim), _sliced(dim), _randn(4, 5, seed=2)
    start = a.dense()
    assert torch.equal(start.index_select(dim, a.indexes), a.kept) and int((start != 0).sum()) == a.kept.numel()
    assert torch.equal((a + b).dense(), 2 * start)
    assert torch.equal((a * 3.0).dense(), 3 * start) and torch.equal((a / 2).dense(), start / 2)
    torch.testing.assert_close(torch.linalg.vector_norm(a), start.norm())
    mixed = a + whole
    assert isinstance(mixed, SlicedGradient)
    assert torch.equal(mixed.kept, a.kept + whole.index_select(dim, a.indexes))
    assert torch.equal((whole + a).kept, mixed.kept)
    dense = whole.clone()
    dense += a
    torch.testing.assert_close(dense, whole + start)
    a.mul_(0.5)
    a += b
    assert torch.equal(a.dense(), 1.5 * start)
    assert torch.equal(a.clone().dense(), a.dense()) and a.float().dtype == torch.float32
    assert repr(a) == f"SlicedGradient(2 {'rows' if dim == -2 else 'columns'} of (4, 5), dtype=torch.float64)"


def test_what_needs_the_rest_of_it_fails():
    a = _sliced()
    for use in (lambda: a @ a.mT, lambda: torch.linalg.svdvals(a), lambda: a.abs(), lambda: torch.cat([a, a])):
        with pytest.raises(TypeError, match="needs the whole gradient, and of a parameter there are 2 rows alone"):
            use()


def test_a_parameter_that_nobody_offers():
    p = nn.Parameter(torch.zeros(2, 3))
    assert not is_offered(p) and wanted(p) is None
    with pytest.raises(ValueError, match="no layer offers"):
        ask(p, Fixed(-2, [0]).slice_of)


# training


def _model(sliced, dtype=torch.float64, tied=False):
    torch.manual_seed(0)
    model = build("model", dict(DENSE)).build(61, 32).to(dtype)
    if tied:  # one matrix in both blocks, one within a block
        first, second = model.blocks
        second.mlp.gate.weight = first.mlp.gate.weight
        first.attn.q.weight = first.attn.o.weight
    if sliced:
        found = slice_gradients(model)
        assert len(found) == 14 and "blocks.0.mlp.gate" in found
    return model


def _loss(model, t):
    tokens = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(t))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _steps(model, optimizer, steps, micro=2, start=0):
    sliced = []
    for t in range(start, start + steps):
        for m in range(micro):
            _loss(model, 100 * t + m).backward()
        sliced.append(sum(isinstance(p.grad, SlicedGradient) for p in model.parameters()))
        optimizer.step(), optimizer.zero_grad()
    return sliced


SETTINGS = [
    {},
    {"carry": False},
    {"subspace": "lion"},
    {"subspace": "sgd", "selection": "multinomial", "lr": 0.3},  # 1.0 blows up, and rounding with it
    {"selection": "multinomial"},
    {"selection": "uniform", "replacement": False},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_whole_gradients(settings, tied):
    """Eight steps of two micro-batches, over two new selections."""
    config = build("optimizer", {"name": "grass", "lr": 0.01, "rank": 6, "scale": 1.0, "gap": 3, **settings})
    ours, theirs = _model(True, tied=tied), _model(False, tied=tied)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    a, b = config.build(named_params(ours)), config.build(named_params(theirs))
    count = 12 if tied else 14
    assert _steps(ours, a, 8) == [0, count, count, 0, count, count, 0, count]
    assert _steps(theirs, b, 8) == [0] * 8
    start = _model(False, tied=tied)
    for (n, p), q, s in zip(ours.named_parameters(), theirs.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(p.data, q.data, rtol=1e-9, atol=1e-11, msg=n)
        assert (p - s).norm() > 1e-3 * s.norm(), n
    for (n, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        mine, other = a.state[p], b.state[q]
        assert mine.keys() == other.keys(), n
        for key in mine:
            torch.testing.assert_close(mine[key], other[key], rtol=1e-8, atol=1e-11, msg=f"{n} {key}")


def test_bytes_of_gradients_are_those_of_the_formula():
    """r n numbers instead of m n for each matrix, at every step that selects nothing; counted while the pass runs."""
    model = _model(True, torch.float32)
    optimizer = build("optimizer", {"name": "grass", "rank": 4, "gap": 4}).build(named_params(model))
    held, peaks = {}, []

    def count(p):
        grad = p.grad
        held[p] = (grad.kept if isinstance(grad, SlicedGradient) else grad).untyped_storage().nbytes()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    for t in range(5):
        held.clear()
        _loss(model, t).backward()
        peaks.append(sum(held.values()))
        optimizer.step(), optimizer.zero_grad()
    matrices = [n.param for n in named_params(model) if n.role == "matrix"]
    rest = sum(4 * p.numel() for p in model.parameters()) - sum(4 * p.numel() for p in matrices)
    whole = rest + sum(4 * p.numel() for p in matrices)
    sliced = rest + sum(4 * 4 * max(p.shape) for p in matrices)
    assert peaks == [whole, sliced, sliced, sliced, whole]


def test_the_claim_on_memory_of_13b_by_formula():
    """13B LLaMA in bf16 on 40 GB: beside 26 GB of weights there is room for moments and gradients at rank 256 and for
    some activations; whole gradients alone would not fit. (A selection makes them one by one with fused_backward.)"""
    dim, ffn, layers, vocab, rank = 5120, 13824, 40, 32000, 256
    matrices = layers * (4 * [(dim, dim)] + 3 * [(dim, ffn)])
    hidden = sum(m * n for m, n in matrices)
    rest = 2 * vocab * dim + (2 * layers + 1) * dim
    weights = 2 * (hidden + rest)
    # Gradients and momenta of 2 bytes; second moments of 4, but of 2 in the fused AdamW that steps the rest.
    grass = 8 * sum(rank * max(m, n) for m, n in matrices) + 6 * rest
    assert weights == pytest.approx(26.0e9, rel=0.01)
    assert weights + grass < 34e9 < 40e9 < weights + 2 * (hidden + rest)


def test_norms_are_measured_and_of_a_part():
    model = _model(True)
    optimizer = build("optimizer", {"name": "grass", "rank": 4, "gap": 4}).build(named_params(model))
    _steps(model, optimizer, 1)
    _loss(model, 5).backward()
    params = list(model.parameters())
    dense = [p.grad.dense() if isinstance(p.grad, SlicedGradient) else p.grad for p in params]
    wanted = torch.cat([g.flatten() for g in dense]).norm()
    torch.testing.assert_close(GlobalNormClipper(None)(params), wanted)
    assert sum(isinstance(p.grad, SlicedGradient) for p in params) == 14


def test_not_a_number_among_selected_rows_is_seen():
    model = _model(True)
    optimizer = build("optimizer", {"name": "grass", "rank": 4, "gap": 4}).build(named_params(model))
    _steps(model, optimizer, 1)
    _loss(model, 5).backward()
    model.blocks[0].attn.q.weight.grad.kept[0, 0] = float("nan")
    assert not torch.isfinite(GlobalNormClipper(None)(list(model.parameters())))


def test_within_the_backward_pass():
    """fused_backward: the gradients are gone with the pass, whole ones at a selection included."""
    config = build("optimizer", {"name": "grass", "lr": 0.01, "rank": 6, "scale": 1.0, "gap": 3})
    ours, theirs = _model(True), _model(False)
    fused, plain = FusedBackward(config.build_rule(named_params(ours))), config.build(named_params(theirs))
    for t in range(8):
        with fused.step():
            _loss(ours, 100 * t).backward()
        assert all(p.grad is None for p in ours.parameters())
    _steps(theirs, plain, 8, micro=1)
    for (n, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.data, q.data, rtol=1e-9, atol=1e-11, msg=n)


@pytest.mark.parametrize("at", [1, 3, 4])
def test_state_goes_on_exactly(at):
    """torch's own state_dict, saved in mid-gap and before a selection, into fresh objects."""
    config = build("optimizer", {"name": "grass", "lr": 0.01, "rank": 6, "gap": 3, "selection": "multinomial"})
    model = _model(True)
    optimizer = config.build(named_params(model))
    _steps(model, optimizer, at)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    counts = _steps(model, optimizer, 4, start=at)
    file.seek(0)
    weights, state = torch.load(file)
    again = _model(True)
    other = config.build(named_params(again))
    again.load_state_dict(weights)
    other.load_state_dict(state)
    assert _steps(again, other, 4, start=at) == counts
    for (n, p), q in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), n


def test_a_copy_of_the_model_has_whole_gradients():
    model = _model(True)
    optimizer = build("optimizer", {"name": "grass", "rank": 4}).build(named_params(model))
    _steps(model, optimizer, 1)
    twin = copy.deepcopy(model)
    for m in (twin, model):
        _loss(m, 3).backward()
    assert not any(isinstance(p.grad, SlicedGradient) for p in twin.parameters())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if isinstance(p.grad, SlicedGradient):
            torch.testing.assert_close(p.grad.kept, q.grad.index_select(p.grad.side, p.grad.indexes))


def test_a_gradient_of_old_rows_at_a_selection_is_refused():
    layer = GrassLinear(nn.Linear(6, 9, bias=False))
    optimizer = Grass([layer.weight], rank=2, gap=2)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(1, 6)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    layer.weight.grad = SlicedGradient(torch.ones(9, 2), torch.arange(2), -1, layer.weight.shape)
    with pytest.raises(ValueError, match="needs whole gradients"):
        optimizer.step()


def test_recomputed_and_in_bfloat16():
    from torch.utils.checkpoint import checkpoint

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 24) if i % 2 == 0 else nn.Linear(24, 16) for i in range(4))

        def forward(self, x, again):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False).tanh() if again else layer(x).tanh()
            return x

    grads = []
    for sliced, again in ((True, True), (True, False), (False, False)):
        model = Stack()
        if sliced:
            assert len(slice_gradients(model)) == 4
        optimizer = Grass([p for p in model.parameters() if p.ndim == 2], rank=4, gap=10)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(_randn(5, 16, dtype=torch.float32), again).square().sum()
            loss.backward()
            optimizer.step()
        grads.append([p.grad for p in model.parameters()])
    for a, b, whole in zip(*grads, strict=True):
        assert isinstance(a, SlicedGradient) == isinstance(b, SlicedGradient) == (whole.ndim == 2)
        if isinstance(a, SlicedGradient):
            assert torch.equal(a.kept, b.kept) and a.dtype == torch.float32
            a, whole = a.kept, whole.index_select(a.side, a.indexes)
        torch.testing.assert_close(a, whole, rtol=0.02, atol=0.02)


# recipes

GRASS = {
    "optimizer": {"name": "grass", "lr": 0.01, "rank": 8, "gap": 3, "scale": 1.0},
    "clip": {"name": "none"},
}


def _fit(recipe, name, resume=False, stop=None, **more):
    data = recipe(**GRASS, **more, **{"run.name": name, "train.steps": 7, "log.every": 1})
    trainer = Trainer(RunConfig.load(data), resume=resume)
    if stop is not None:
        trainer._finished = lambda: trainer.progress.step >= stop
    rows = []
    trainer.fit(on_step=rows.append)
    return trainer, rows


def test_a_run_is_the_one_with_whole_gradients_and_resumes_exactly(recipe):
    """Two micro-batches a step, over two selections; stopped in mid-gap."""
    more = {"train.micro_batch_size": 4, "checkpoint": {"every": 4, "asynchronous": False}}
    whole, a = _fit(recipe, "whole", **more)
    sliced, b = _fit(recipe, "sliced", transforms=["grass_linear"], **more)
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], rel=1e-5)
    assert b[0]["grad_norm"] == pytest.approx(a[0]["grad_norm"]) and b[1]["grad_norm"] < a[1]["grad_norm"]
    for (n, p), q in zip(sliced.model.named_parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(p.data, q.data, rtol=1e-3, atol=1e-5, msg=n)
    _, first = _fit(recipe, "parts", transforms=["grass_linear"], stop=4, **more)
    parts, second = _fit(recipe, "parts", transforms=["grass_linear"], resume=True, **more)
    assert [r["loss"] for r in first + second] == [r["loss"] for r in b]
    for p, q in zip(sliced.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "more",
    [
        {"memory": ["activation_checkpointing"], "model.tie_embeddings": True},
        {"memory": ["fused_backward"], "model.tie_embeddings": False},
    ],
)
def test_runs_with_other_methods(recipe, more):
    _, a = _fit(recipe, "whole", **more)
    trainer, b = _fit(recipe, "sliced", transforms=["grass_linear"], **more)
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], rel=1e-5)
    assert any(isinstance(m, GrassLinear) for m in trainer.model.modules())


@pytest.mark.parametrize(
    "more, says",
    [
        ({"clip": {"name": "global_norm"}}, "needs clip=none: of a part of the gradient there is no global norm"),
        ({"clip": {"name": "zclip"}}, "needs clip=none"),
        ({"optimizer": {"name": "galore"}}, "needs optimizer=grass"),
        ({"optimizer": {"name": "mgup", "inner": GRASS["optimizer"]}}, "compares whole gradients"),
        ({"optimizer": {"name": "spectra", "inner": GRASS["optimizer"]}}, "may clip whole gradients"),
        ({"precision": {"name": "fp16"}}, "use bf16"),
        ({"transforms": ["grass_linear", "lora"]}, "frozen there"),
    ],
)
def test_what_needs_whole_gradients_is_refused(recipe, more, says):
    data = recipe(**{**GRASS, "transforms": ["grass_linear"], **more})
    with pytest.raises(ConfigError, match=says):
        RunConfig.load(data)


def test_models_without_such_layers_are_refused():
    frozen = build("model", dict(DENSE)).build(61, 32).requires_grad_(False)
    with pytest.raises(ConfigError, match="no linear layer with a trained hidden matrix"):
        build("transform", "grass_linear").apply(frozen)


def test_experts_keep_whole_gradients(caplog):
    caplog.set_level("INFO", "trainwright")
    moe = {**DENSE, "family": "mixtral", "n_experts": 4, "n_experts_per_token": 2, "moe_ffn_dim": 24}
    model = build("transform", "grass_linear").apply(build("model", moe).build(61, 32))
    assert "8 of 8 hidden matrices and 6 stacks of experts" in caplog.text
    optimizer = build("optimizer", {"name": "grass", "rank": 4}).build(named_params(model))
    assert _steps(model, optimizer, 2) == [0, 8]


def test_transformers_models():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    settings = build("optimizer", {"name": "grass", "rank": 4, "gap": 2, "lr": 0.01})
    models = []
    for sliced in (True, False):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if sliced:
            names = slice_gradients(model.model)  # not the head
            assert len(names) == 14
        optimizer = settings.build(named_params(model))
        for t in range(5):
            tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(t))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step(), optimizer.zero_grad()
        models.append(model)
    for (n, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p.data, q.data, rtol=1e-3, atol=1e-5, msg=n)
