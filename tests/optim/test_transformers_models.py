"""Every optimizer on models of transformers: roles by module types, fused q, k, v by name, tied heads."""

import pytest
import torch

from trainwright.core.params import named_params
from trainwright.core.registry import build, methods

transformers = pytest.importorskip("transformers")


def llama():
    return transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip


def gpt2():
    return transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0)


def phi3():
    return transformers.Phi3Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip


# What the model alone cannot tell.
SETTINGS = {"adapm": {"policy": {"qkv": "full"}}}


@pytest.mark.parametrize("config", [llama, gpt2, phi3], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", [m.name for m in methods("optimizer")])
def test_descends(name, config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config())
    model.eval()  # no dropout
    optimizer = build("optimizer", {"name": name, **SETTINGS.get(name, {})}).build(named_params(model))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    tokens = torch.arange(16)[None] % 7
    losses = []
    for _ in range(12):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for n, p in model.named_parameters():
        assert p.isfinite().all(), n
        assert not torch.equal(p, before[n]), n
