"""Any transformers causal LM behind our interface: what is found out about it, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from trainwright.core.errors import ModelError
from trainwright.core.registry import build
from trainwright.models import save_pretrained
from trainwright.models.generate import generate_ids
from trainwright.models.hf import HFModel

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
IDS = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DIMS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**IDS, **DIMS, intermediate_size=64),
    "opt": lambda: transformers.OPTConfig(**{**IDS, "pad_token_id": 1}, **DIMS, ffn_dim=64, word_embed_proj_dim=32),
    "phi": lambda: transformers.PhiConfig(**IDS, **DIMS, intermediate_size=64),
    "granite": lambda: transformers.GraniteConfig(**IDS, **DIMS, intermediate_size=64, logits_scaling=4.0),
    "cohere": lambda: transformers.CohereConfig(**IDS, **DIMS, intermediate_size=64, logit_scale=0.25),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **IDS,
        **DIMS,
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=8,
    ),
}


def make(kind):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(std=0.2)
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_architectures(kind, tmp_path):
    theirs = make(kind)
    theirs.save_pretrained(tmp_path / "hf")
    model = build("model", {"name": "hf", "path": str(tmp_path / "hf")}).build(61, 32)
    assert isinstance(model, HFModel) and len(model.blocks) == 2 and model.packing != "none"
    ways = [model.packing, "mask"]
    tokens = torch.randint(2, 61, (2, 13))
    doc_ids = torch.tensor([[0] * 6 + [1] * 7, [0] * 13], dtype=torch.int32)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs.eval()(tokens).logits, atol=1e-4, rtol=0)
        for model.packing in ways:  # the one that was chosen, and the one for older versions of transformers
            packed = model(tokens, doc_ids=doc_ids)
            torch.testing.assert_close(packed[:1, :6], model(tokens[:1, :6]), atol=1e-4, rtol=0)
            torch.testing.assert_close(packed[:1, 6:], model(tokens[:1, 6:]), atol=1e-4, rtol=0)
            torch.testing.assert_close(packed[1:], model(tokens[1:]), atol=1e-4, rtol=0)
    save_pretrained(model, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens), atol=1e-4, rtol=0)


def test_a_head_that_is_not_linear_is_refused():
    class Odd(type(make("phi"))):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.7
            return out

    torch.manual_seed(0)
    with pytest.raises(ModelError, match="Odd: its logits are not"):
        HFModel(Odd(CONFIGS["phi"]()))


def test_a_recurrent_model_refuses_packed_rows():
    config = transformers.MambaConfig(**{**IDS, "pad_token_id": 0}, hidden_size=32, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    model = HFModel(transformers.MambaForCausalLM(config))
    tokens = torch.randint(61, (1, 8))
    assert model.packing == "none"
    assert model(tokens, doc_ids=torch.zeros(1, 8, dtype=torch.int32)).shape == (1, 8, 61)
    with pytest.raises(ModelError, match="one document a row"):
        model(tokens, doc_ids=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]))


def test_bad_folders_are_named(tmp_path):
    def attempt(match):
        with pytest.raises(ModelError, match=match):
            build("model", {"name": "hf", "path": str(tmp_path / "hf")}).build(61, 8)

    attempt("not a Hugging Face model folder")
    make("phi").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    attempt("cannot be loaded by transformers")
    make("phi").save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    attempt("misses weights.*layers.2")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "no_such_thing"}))
    attempt("cannot be loaded by transformers")


def test_fresh_weights(tmp_path):
    make("phi").save_pretrained(tmp_path / "hf")
    spec = {"name": "hf", "path": str(tmp_path / "hf")}
    loaded, fresh = build("model", spec).build(61, 8), build("model", {**spec, "fresh": True}).build(61, 8)
    assert not torch.equal(loaded.hf.lm_head.weight, fresh.hf.lm_head.weight)


def test_a_wrapped_model_generates():
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    model = build("model", {"name": "decoder", "size": "1m"}).build(61, 16)
    want = generate_ids(model, [[1, 2], [3]], max_new_tokens=5, temperature=0.0)
    assert generate_ids(Wrapped(model), [[1, 2], [3]], max_new_tokens=5, temperature=0.0) == want
