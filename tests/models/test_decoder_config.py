"""Sizes, dimensions that fit or are refused by name, meta-device and compiled models."""

from __future__ import annotations

import math

import pytest
import torch

from trainwright.core.errors import ConfigError, ModelError
from trainwright.core.registry import build
from trainwright.models.architecture import FAMILIES, SIZES

torch.set_num_threads(1)

COUNTS = {  # ids, parameters of the Llama family
    "1m": (4096, 1_164_160),
    "2m": (4096, 2_114_880),
    "5m": (4096, 5_065_472),
    "10m": (4096, 10_424_448),
    "25m": (4096, 24_583_680),
    "50m": (4096, 50_967_680),
    "125m": (32_768, 124_278_528),
    "350m": (32_768, 341_885_952),
    "1b": (32_768, 1_040_254_976),
    "3b": (32_768, 2_919_410_688),
    "8b": (131_072, 8_053_329_920),
    "14b": (131_072, 14_554_649_600),
    "32b": (131_072, 32_548_459_520),
    "70b": (131_072, 70_599_843_840),
}


@pytest.mark.parametrize("size", SIZES)
def test_named_sizes_have_their_documented_counts(size):
    vocab, count = COUNTS[size]
    with torch.device("meta"):
        model = build("model", {"name": "decoder", "size": size}).build(vocab, 128)
    assert model.num_params() == count
    named = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert abs(math.log(count / named)) < 0.16
    arch = model.arch
    assert arch.dim % 64 == 0 and arch.ffn_dim % 64 == 0 and arch.head_dim in (32, 64, 128)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_every_size(family):
    with torch.device("meta"):
        for size in ("1m", "10m", "1b", "70b"):
            model = build("model", {"name": "decoder", "family": family, "size": size}).build(1000, 128)
            arch = model.arch
            dense = build("model", {"name": "decoder", "size": size}).architecture(1000)
            active = sum(arch.matmul_params(i) for i in range(arch.n_layers))
            want = sum(dense.matmul_params(i) for i in range(arch.n_layers))
            # A mixture of experts is sized by what is active; the router comes on top.
            assert want <= active <= want * 1.05


def refused(match, key, **spec):
    with pytest.raises(ConfigError, match=match) as caught:
        build("model", {"name": "decoder", **spec}).build(spec.get("vocab_size", 100), 16)
    assert caught.value.key == key


def test_bad_dimensions_are_named():
    refused("does not divide dim=100", "n_heads", dim=100, n_heads=3)
    refused("does not divide n_heads=4", "n_kv_heads", n_heads=4, n_kv_heads=3)
    refused("multiple of the head width", "dim", dim=100)
    refused("odd", "head_dim", head_dim=33, n_heads=2)
    refused("greater than 0", "dim", dim=-64)
    refused("greater than 0", "n_layers", n_layers=0)
    refused("did you mean 'llama'", "family", family="lama")
    refused("did you mean", "size", size="10M")
    refused("exceeds the 4 experts", "n_experts_per_token", family="mixtral", n_experts=4, n_experts_per_token=5)
    refused("no experts", "moe_ffn_dim", moe_ffn_dim=64)
    refused("seq_len=16 is beyond", "max_seq_len", max_seq_len=8)
    refused("less than 1", "dropout", dropout=1.5)
    refused(r"unknown key.*n_layers", "n_layer", n_layer=3)
    with pytest.raises(ConfigError, match="smaller than the tokenizer's 100 ids"):
        build("model", {"name": "decoder", "vocab_size": 90}).build(100, 16)
    assert build("model", {"name": "decoder", "size": "1m", "vocab_size": 128}).build(100, 16).vocab_size == 128


def test_too_long_a_sequence_is_refused():
    model = build("model", {"name": "decoder", "size": "1m", "max_seq_len": 16}).build(100, 16)
    with pytest.raises(ModelError, match=r"17 tokens exceed.*16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_the_first_loss_is_that_of_a_uniform_guess():
    torch.manual_seed(0)
    model = build("model", {"name": "decoder", "size": "1m"}).build(257, 64)
    tokens = torch.randint(257, (4, 64))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), torch.randint(257, (256,)))
    assert loss.item() == pytest.approx(math.log(257), abs=0.1)


def test_initial_spread():
    torch.manual_seed(0)
    model = build("model", {"name": "decoder", "size": "2m", "family": "qwen2.5"}).build(512, 64)
    state = model.state_dict()
    depth = math.sqrt(2 * len(model.blocks))
    for name, tensor in state.items():
        if name.endswith("norm.weight"):
            assert tensor.eq(1).all()
        elif name.endswith("bias"):
            assert tensor.eq(0).all()
        else:
            want = 0.02 / depth if ".attn.o." in name or ".down." in name else 0.02
            assert tensor.std().item() == pytest.approx(want, rel=0.05)


def test_meta_model_becomes_the_same_model():
    spec = {"name": "decoder", "size": "1m", "family": "mixtral", "balance": "bias"}
    torch.manual_seed(5)
    want = build("model", spec).build(100, 16)
    with torch.device("meta"):
        model = build("model", spec).build(100, 16)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.init_weights()
    for (n, a), (m, b) in zip(model.state_dict().items(), want.state_dict().items(), strict=True):
        assert n == m and torch.equal(a, b)
    tokens = torch.randint(100, (2, 16))
    assert torch.equal(model(tokens), want(tokens))


def test_dropout_only_in_training():
    torch.manual_seed(0)
    model = build("model", {"name": "decoder", "size": "1m", "dropout": 0.5}).build(100, 16)
    tokens = torch.randint(100, (2, 16))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_rope_tables_made_in_inference_mode_serve_training():
    model = build("model", {"name": "decoder", "size": "1m"}).build(100, 16)
    tokens = torch.randint(100, (2, 16))
    with torch.inference_mode():
        model(tokens)
    model(tokens).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bfloat16_autocast_stays_close():
    torch.manual_seed(0)
    for family in ("llama", "qwen3", "mixtral"):
        model = build("model", {"name": "decoder", "size": "1m", "family": family}).build(100, 16)
        tokens = torch.randint(100, (2, 16))
        doc_ids = torch.tensor([[0] * 7 + [1] * 9, [0] * 16], dtype=torch.int32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = model(tokens, doc_ids=doc_ids)
            low.float().square().mean().backward()
        torch.testing.assert_close(low.float(), model(tokens, doc_ids=doc_ids), atol=0.05, rtol=0)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_compiled_blocks_equal_eager_on_packed_rows(family):
    torch.manual_seed(0)
    model = build("model", {"name": "decoder", "size": "1m", "n_layers": 1, "family": family}).build(100, 32)
    tokens = torch.randint(100, (2, 32))
    doc_ids = torch.tensor([[0] * 7 + [1] * 25, [0] * 32], dtype=torch.int32)

    def run(doc_ids):
        model.zero_grad()
        out = model(tokens, doc_ids=doc_ids)
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    want = [run(None), run(doc_ids)]
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for expected, ids in zip(want, (None, doc_ids), strict=True):
        for a, b in zip(run(ids), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
