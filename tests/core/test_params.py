"""Roles and fused matrices of transformers models."""

import logging

import pytest
import torch

from trainwright.core.params import named_params
from trainwright.core.registry import build

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def splits(model):
    return {n.name.rsplit("layers.0.")[-1].rsplit("h.0.")[-1]: n.splits for n in named_params(model) if n.splits}


def test_phi3_keeps_q_k_v_and_gate_up_in_one():
    model = transformers.AutoModelForCausalLM.from_config(transformers.Phi3Config(**SMALL))
    assert splits(model) == {"self_attn.qkv_proj.weight": (16, 8, 8), "mlp.gate_up_proj.weight": (24, 24)}


def test_gpt2_keeps_them_in_columns():
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=4, n_positions=8)
    )
    assert splits(model) == {"attn.c_attn.weight": (-16, -16, -16)}
    muon = build("optimizer", "muon").build(named_params(model))
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    muon.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_mixtral_experts():
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    found = splits(model)
    stacked = [n for n in named_params(model) if n.role == "expert" and n.param.shape[-2] == 48]
    assert stacked and all(n.splits == (24, 24) for n in stacked)
    assert len(found) == len(stacked)


def test_llama_has_nothing_fused():
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    assert splits(model) == {}


def test_interleaved_heads_are_left_with_a_warning(caplog):
    config = transformers.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})
    with caplog.at_level(logging.WARNING, "trainwright"):
        assert splits(transformers.AutoModelForCausalLM.from_config(config)) == {}
    assert "interleaved by head" in caplog.text
