"""LoRA: equal to its equation, to the model at first, and to PEFT; merged without loss, or refused."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError, ModelError
from trainwright.core.params import named_params
from trainwright.core.registry import build
from trainwright.models.adapter_export import PROOF, export_merged, read_proof, save_adapter
from trainwright.models.transforms.lora import (
    LoRALinear,
    LoRAMoE,
    adapters,
    adapters_off,
    merge_adapters,
    remove_adapters,
    unmerge_adapters,
)

DENSE = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "max_seq_len": 64}


def decoder(**more):
    torch.manual_seed(0)
    return build("model", {"name": "decoder", **DENSE, **more}).build(61, 32)


def lora(model, **settings):
    return build("transform", {"name": "lora", "rank": 4, **settings}).apply(model)


def learned(model, std=0.1):
    """As if trained: B and magnitudes moved."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "lora_" in name:
                p.add_(std * torch.randn_like(p))
    return model


TOKENS = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(2))


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS)


# --- the layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rslora", [True, False])
def test_equation_in_float64(bias, rslora):
    torch.manual_seed(0)
    linear = nn.Linear(7, 5, bias=bias, dtype=torch.float64)
    layer = learned(LoRALinear(linear, 3, 6.0, rslora=rslora), 1.0)
    x = torch.randn(4, 7, dtype=torch.float64)
    scale = 6.0 / (3**0.5 if rslora else 3)
    want = x @ (linear.weight + scale * layer.lora_b @ layer.lora_a).T + (linear.bias if bias else 0)
    torch.testing.assert_close(layer(x), want)
    assert (layer.lora_b @ layer.lora_a).norm() > 1


def test_dora_equation_and_its_gradient():
    """The norms are constants for the gradient (arXiv:2402.09353, section 4.3)."""
    torch.manual_seed(0)
    linear = nn.Linear(7, 5, dtype=torch.float64)
    layer = learned(LoRALinear(linear, 3, 6.0, dora=True), 1.0)
    x = torch.randn(4, 7, dtype=torch.float64)
    a, b, m = (p.detach().clone().requires_grad_() for p in (layer.lora_a, layer.lora_b, layer.lora_magnitude))
    v = linear.weight.detach() + 2.0 * b @ a
    want = x @ (v * (m / v.detach().norm(dim=1))[:, None]).T + linear.bias.detach()
    got = layer(x)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    for mine, theirs in ((layer.lora_a, a), (layer.lora_b, b), (layer.lora_magnitude, m)):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert layer.weight.grad is None and layer.bias.grad is None


def test_dropout_acts_on_the_learned_branch_alone():
    layer = learned(LoRALinear(nn.Linear(64, 5), 3, 6.0, dropout=0.5), 1.0)
    x = torch.randn(4, 64)
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    layer.train()
    nn.init.zeros_(layer.lora_b)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("dora", [True, False])
def test_merge_and_unmerge(dora):
    layer = learned(LoRALinear(nn.Linear(16, 12), 3, dora=dora), 0.5)
    x, before, frozen = torch.randn(4, 16), None, layer.weight.detach().clone()
    before = layer(x)
    layer.merge()
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)
    assert not torch.equal(layer.weight, frozen)
    layer.merge()  # twice is once
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.plain()(x), before, rtol=1e-5, atol=1e-5)
    layer.unmerge()
    assert torch.equal(layer.weight, frozen) and torch.equal(layer(x), before)


def test_sixteen_bit_weights_learn_in_float32():
    layer = LoRALinear(nn.Linear(16, 12, dtype=torch.bfloat16), 3)
    assert layer.lora_a.dtype == layer.lora_b.dtype == torch.float32
    assert layer(torch.randn(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("rank", [0, 6])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match="between 1 and the shorter side"):
        LoRALinear(nn.Linear(7, 5), rank)


# --- a model


@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"rslora": True, "rank": 8}, {"targets": ["q", "v"]}])
def test_a_model_computes_at_first_what_it_did(settings):
    model = decoder()
    before = logits(model)
    torch.testing.assert_close(logits(lora(model, **settings)), before, rtol=1e-5, atol=1e-6)


def test_only_adapters_are_trained_and_the_names_stay():
    plain = decoder()
    names = set(dict(plain.named_parameters()))
    model = lora(decoder())
    trained = {n.name: n.role for n in named_params(model)}
    assert set(trained.values()) == {"matrix"} and all(".lora_" in n for n in trained)
    assert len(trained) == 2 * 2 * 7  # q, k, v, o, gate, up, down of two blocks
    assert set(dict(model.named_parameters())) - set(trained) == names
    model(TOKENS).sum().backward()
    assert all(p.grad is None for n, p in model.named_parameters() if n in names)


@pytest.mark.parametrize(
    "targets, expected",
    [
        (["q"], {"blocks.0.attn.q", "blocks.1.attn.q"}),
        (["attn.(q|v)"], {f"blocks.{i}.attn.{p}" for i in (0, 1) for p in "qv"}),
        (
            [r"blocks\.1\..*"],
            {f"blocks.1.attn.{p}" for p in "qkvo"} | {f"blocks.1.mlp.{p}" for p in ("gate", "up", "down")},
        ),
    ],
)
def test_targets(targets, expected):
    assert {n for n, _ in adapters(lora(decoder(), targets=targets))} == expected


def test_also_train():
    model = lora(decoder(), targets=["q"], also_train=["norm.weight", "embed.weight"])
    full = {n.name for n in named_params(model) if "lora" not in n.name}
    assert "embed.weight" in full and "norm.weight" in full
    assert "blocks.0.attn_norm.weight" not in full  # the name's end begins at a dot
    assert len(full) == 2


BAD = [
    ({"targets": ["qq"]}, "'qq' matches the end of no linear module's name; .*'q'"),
    ({"targets": ["head"]}, "which the loss reads as a plain matrix; train it in full by also_train"),
    ({"targets": ["("]}, "not a regular expression"),
    ({"targets": []}, "name no matrix"),
    ({"also_train": ["nothing"]}, "matches the end of no parameter's name"),
    ({"rank": 33}, r"rank=33: transforms.lora on blocks.0.attn.q: .*between 1 and the shorter side \(32\)"),
]


@pytest.mark.parametrize("settings, said", BAD)
def test_bad_settings(settings, said):
    with pytest.raises(ConfigError, match=said):
        lora(decoder(tie_embeddings=False), **settings)


def test_merging_a_model_and_back():
    model = learned(lora(decoder(), dora=True))
    want = logits(model)
    with adapters_off(model):
        base = logits(model)
    torch.testing.assert_close(base, logits(decoder()), rtol=1e-5, atol=1e-6)
    assert (want - base).abs().max() > 0.05
    merge_adapters(model)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    unmerge_adapters(model)
    assert torch.equal(logits(model), want)
    remove_adapters(model)
    assert not list(adapters(model)) and set(model.state_dict()) == set(decoder().state_dict())
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


# --- experts

MOE = {"family": "mixtral", "n_experts": 4, "n_experts_per_token": 2, "moe_ffn_dim": 24}


def test_experts_equal_their_merged_weights():
    model = decoder(**MOE)
    before = logits(model)
    lora(model)
    moes = [m for _, m in adapters(model) if isinstance(m, LoRAMoE)]
    assert len(moes) == 2 and moes[0].adapted == ("gate", "up", "down")
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-6)
    want = logits(learned(model))
    assert (want - before).abs().max() > 0.02
    merge_adapters(model)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    unmerge_adapters(model)
    assert torch.equal(logits(model), want)
    roles = {n.name: n.role for n in named_params(model)}
    assert roles["blocks.0.mlp.gate_lora_a"] == "expert" and not any("router" in n for n in roles)
    remove_adapters(model)
    assert set(model.state_dict()) == set(decoder(**MOE).state_dict())
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


def test_gradients_of_experts_are_those_of_the_merged_weights():
    """dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, with dL/dW from the plain experts."""
    model = learned(lora(decoder(**MOE), targets=["up"], rank=2, alpha=6.0).double())
    moe = next(m for _, m in adapters(model))
    torch.manual_seed(3)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    plain = moe.plain()
    moe(x)[0].square().sum().backward()
    plain(x)[0].square().sum().backward()
    a, b, g = moe.up_lora_a, moe.up_lora_b, plain.up.grad
    torch.testing.assert_close(b.grad, 3.0 * g @ a.detach().transpose(1, 2))
    torch.testing.assert_close(a.grad, 3.0 * b.detach().transpose(1, 2) @ g)
    assert moe.up.grad is None and moe.gate.grad is None


def test_dora_is_not_for_experts():
    with pytest.raises(ConfigError, match="not made for stacked experts"):
        lora(decoder(**MOE), dora=True)
    assert list(adapters(lora(decoder(**MOE), dora=True, targets=["matrix"])))


# --- out of the model


def test_export_proves_parity(tmp_path):
    model = learned(lora(decoder(dim=64)))
    want = logits(model)
    proof = export_merged(model, tmp_path / "out")
    assert proof == read_proof(tmp_path / "out") and proof.dtype == "float32" and not proof.kept_in_float32
    assert proof.largest_error < 1e-4 < proof.adapter_effect and proof.same_argmax == 1
    from trainwright.models import from_pretrained

    torch.testing.assert_close(logits(from_pretrained(tmp_path / "out")), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="exists"):
        export_merged(learned(lora(decoder())), tmp_path / "out")


@pytest.mark.parametrize("std, kept", [(1e-4, True), (0.1, False)])
def test_sixteen_bit_weights_are_kept_in_float32_where_rounding_loses_the_change(tmp_path, caplog, std, kept):
    model = learned(lora(decoder().to(torch.bfloat16)), std)
    proof = export_merged(model, tmp_path / "out")
    assert (proof.kept_in_float32, proof.dtype) == ((True, "float32") if kept else (False, "bfloat16"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == proof.dtype
    assert ("would lose" in caplog.text) == kept
    assert proof.merged_error <= 0.02 * proof.adapter_effect + 1e-5 * proof.logits


def test_a_merge_that_changes_the_logits_is_refused(tmp_path, monkeypatch):
    whole = LoRALinear.merged_weight
    monkeypatch.setattr(LoRALinear, "merged_weight", lambda self, dtype=None: 1.01 * whole(self, dtype))
    with pytest.raises(ModelError, match="merging changes the logits"):
        export_merged(learned(lora(decoder())), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_computes_otherwise_is_refused(tmp_path, monkeypatch):
    from trainwright.models import adapter_export

    read = adapter_export._read

    def damaged(*arguments):
        model = read(*arguments)
        model.norm.weight.data[0] += 0.01
        return model

    monkeypatch.setattr(adapter_export, "_read", damaged)
    with pytest.raises(ModelError, match="written folder computes other logits"):
        export_merged(learned(lora(decoder())), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def hf_folder(path, kind="llama"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dora", [False, True])
def test_hf_models(tmp_path, kind, dora):
    path = hf_folder(tmp_path / "base", kind)
    model = build("model", {"name": "hf", "path": path}).build(61, 32)
    before = logits(model)
    lora(model, dora=dora)
    assert not any(n.endswith("lm_head") for n, _ in adapters(model)) and len(list(adapters(model))) >= 8
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    want = logits(learned(model))
    proof = export_merged(model, tmp_path / "out")
    assert proof.largest_error < 1e-4 < proof.adapter_effect
    again = build("model", {"name": "hf", "path": str(tmp_path / "out")}).build(61, 32)
    torch.testing.assert_close(logits(again), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["pretrained", "hf", "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"rslora": True, "alpha": 3.0}])
def test_peft_loads_the_adapter_and_computes_the_same(tmp_path, kind, settings):
    peft = pytest.importorskip("peft")
    import transformers

    path = hf_folder(tmp_path / "base", "gpt2" if kind == "gpt2" else "llama")
    model = build("model", {"name": "pretrained" if kind == "pretrained" else "hf", "path": path}).build(61, 32)
    config = build("transform", {"name": "lora", "rank": 4, **settings})
    model = learned(config.apply(model))
    save_adapter(model, tmp_path / "adapter", config, path)
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter"
    )
    with torch.no_grad():
        got = theirs.eval()(TOKENS).logits
    torch.testing.assert_close(got, logits(model), rtol=1e-4, atol=1e-5)
    with adapters_off(model):
        assert (logits(model) - got).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dora", [True, False])
def test_gradients_steps_and_merged_weights_are_those_of_peft(tmp_path, kind, dora):
    """PEFT trains the exported adapter as we do: the same gradients, weights after three steps of Adam, and merge."""
    peft = pytest.importorskip("peft")
    import transformers

    path = hf_folder(tmp_path / "base", kind)
    model = build("model", {"name": "hf", "path": path}).build(61, 32)
    config = build("transform", {"name": "lora", "rank": 4, "alpha": 16, "dora": dora})
    model = learned(config.apply(model))
    save_adapter(model, tmp_path / "adapter", config, path)
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter", is_trainable=True
    )
    assert theirs.peft_config["default"].use_dora == dora
    model.eval(), theirs.eval()  # GPT-2's own dropout
    named = dict(theirs.named_parameters())

    def pairs():
        for name, layer in adapters(model):
            prefix = f"base_model.model.{name.removeprefix('hf.')}"
            yield layer.lora_a, named[f"{prefix}.lora_A.default.weight"]
            yield layer.lora_b, named[f"{prefix}.lora_B.default.weight"]
            if dora:
                yield layer.lora_magnitude, named[f"{prefix}.lora_magnitude_vector.default.weight"]

    both = list(pairs())
    trained = {id(p) for p in theirs.parameters() if p.requires_grad}
    assert {id(q) for _, q in both} == trained  # all that PEFT trains has its partner
    steps = [torch.optim.Adam([pair[i] for pair in both], 1e-2) for i in (0, 1)]
    for _ in range(3):
        model(TOKENS).square().mean().backward()
        theirs(TOKENS).logits.square().mean().backward()
        for mine, other in both:
            assert mine.grad.norm() > 0
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)
        for step in steps:
            step.step(), step.zero_grad()
    for mine, other in both:
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
        other.data.copy_(mine.data)
    merged = dict(theirs.merge_and_unload().named_parameters())
    for name, layer in adapters(model):
        torch.testing.assert_close(
            layer.merged_weight(), merged[f"{name.removeprefix('hf.')}.weight"], rtol=1e-5, atol=1e-6
        )
        assert (layer.merged_weight() - layer.weight).norm() > 0.01


def test_what_an_adapter_alone_cannot_hold(tmp_path):
    experts = build("transform", {"name": "lora", "rank": 4})
    with pytest.raises(ModelError, match="adapters of experts"):
        save_adapter(experts.apply(decoder(**MOE)), tmp_path / "a", experts)
    more = build("transform", {"name": "lora", "rank": 4, "also_train": ["embed.weight"]})
    with pytest.raises(ModelError, match="also_train"):
        save_adapter(more.apply(decoder()), tmp_path / "a", more)
    with pytest.raises(ModelError, match="no adapters"):
        save_adapter(decoder(), tmp_path / "a", more)


# --- in a run


def test_a_run_learns_resumes_and_exports(tmp_path, recipe, capsys):
    from trainwright.data.tokenizers.bytes import ByteTokenizer
    from trainwright.models import save_pretrained
    from trainwright.train.runs import export_run, load_run

    torch.manual_seed(0)
    base = build("model", {"name": "decoder", **DENSE}).build(259, 32)
    save_pretrained(base, tmp_path / "own", ByteTokenizer())
    settings = {
        "model": {"name": "pretrained", "path": str(tmp_path / "own")},
        "tokenizer": None,
        "transforms": [{"name": "lora", "rank": 4, "dropout": 0.1}],
        "optimizer": {"name": "adamw", "lr": 2e-2},
        "checkpoint": {"every": 3, "asynchronous": False},
    }
    whole, first, second = [], [], []
    trainer = Trainer(RunConfig.load(recipe(**settings, **{"train.steps": 6, "run.name": "whole"})))
    trainer.fit(on_step=whole.append)
    assert whole[-1]["loss"] < whole[0]["loss"]
    for name, p in trainer.parallel.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(p, dict(base.named_parameters())[name]), name
    data = recipe(**settings, **{"train.steps": 6, "run.name": "parts"})
    stopped = Trainer(RunConfig.load(data))
    original = stopped._finished
    stopped._finished = lambda: stopped.progress.step >= 3 or original()
    stopped.fit(on_step=first.append)
    Trainer(RunConfig.load(data), resume=True).fit(on_step=second.append)
    assert [r["loss"] for r in first + second] == [r["loss"] for r in whole]

    model, _, _ = load_run(trainer.config.run_dir, device="cpu")
    out = export_run(trainer.config.run_dir, tmp_path / "out")
    proof = read_proof(out)
    assert (out / PROOF).is_file() and proof.largest_error < 1e-4 and proof.adapter_effect > 1e-3
    from trainwright.models import from_pretrained

    tokens = torch.randint(259, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(from_pretrained(out).eval()(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    from trainwright import cli

    assert cli.run(["export", str(trainer.config.run_dir), str(tmp_path / "cli")]) == 0
    assert f"{tmp_path / 'cli'}\nmerged in float32: logits of the written folder differ" in capsys.readouterr().out
    assert cli.run(["export", str(trainer.config.run_dir), str(tmp_path / "adapter"), "--adapter"]) == 0
    folder = tmp_path / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "own") and config["r"] == 4
    plain = recipe(**{"run.name": "plain", "train.steps": 1})
    Trainer(RunConfig.load(plain)).fit()
    with pytest.raises(ConfigError, match="trained no adapter"):
        export_run(RunConfig.load(plain).run_dir, tmp_path / "x", adapter=True)


SHARDED = [({}, {}), ({"dora": True}, {}), ({}, MOE)]


def test_sharded_over_two_processes(tmp_path):
    """FSDP2: loss and gradients of the adapters are those of the whole model, and the frozen weights have none."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    worker = Path(__file__).with_name("lora_worker.py")
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    workers = [
        subprocess.Popen([sys.executable, str(worker), str(tmp_path)], env={**os.environ, **common, "RANK": str(r)})
        for r in range(2)
    ]
    try:
        assert [w.wait(120) for w in workers] == [0, 0]
    finally:
        for w in workers:
            w.kill()
    for i, (settings, more) in enumerate(SHARDED):
        model = learned(lora(decoder(**more), **settings)).train()
        losses = [model(TOKENS[r : r + 1]).square().mean() for r in range(2)]
        (sum(losses) / 2).backward()
        want = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        for r in range(2):
            loss, grads, named = torch.load(tmp_path / f"{r}.pt")[i]
            assert loss == pytest.approx(losses[r].item(), rel=1e-5)
            assert grads.keys() == want.keys() and set(named) == set(want)
            for n, grad in want.items():
                torch.testing.assert_close(grads[n], grad, rtol=1e-4, atol=1e-6, msg=n)


def test_with_recomputed_activations_and_in_16_bits(recipe):
    """Frozen embeddings give activation checkpointing inputs without gradient; the losses stay as they are."""
    runs = {}
    for name, more in {
        "plain": {},
        "checkpointed": {"memory": ["activation_checkpointing"]},
        "bf16": {"precision": {"name": "bf16"}},
    }.items():
        rows = runs[name] = []
        data = recipe(transforms=[{"name": "lora", "dora": True}], **more, **{"run.name": name, "train.steps": 3})
        Trainer(RunConfig.load(data)).fit(on_step=rows.append)
    losses = {name: [r["loss"] for r in rows] for name, rows in runs.items()}
    assert losses["checkpointed"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["bf16"] == pytest.approx(losses["plain"], rel=0.01)
    assert losses["plain"][-1] < losses["plain"][0]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dora", [False, True])
def test_compiled_blocks_with_adapters_train_as_eager_ones(recipe, monkeypatch, backend, dora):
    """``train.compile``, with the compiler's own backend (slow) and with one that only traces."""
    compiled = []

    def compile(module):
        compiled.append(module)
        module._compiled_call_impl = torch.compile(module._call_impl, backend=backend)

    monkeypatch.setattr(nn.Module, "compile", compile)
    losses = {}
    for name in ("eager", "compiled"):
        rows = []
        data = recipe(
            transforms=[{"name": "lora", "dora": dora}],
            **{"run.name": name, "train.steps": 3, "train.compile": name == "compiled"},
        )
        trainer = Trainer(RunConfig.load(data))
        assert compiled == ([] if name == "eager" else list(trainer.model.blocks))
        trainer.fit(on_step=rows.append)
        losses[name] = [r["loss"] for r in rows]
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-5)
    assert losses["eager"][-1] < losses["eager"][0]
