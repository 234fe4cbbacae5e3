"""The s2_attention transform on a decoder: documents, cache, parallel cuts, counts, what it refuses."""

import copy
import json

import pytest
import torch

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.models.generate import generate_ids
from trainwright.models.hf_io import save_pretrained
from trainwright.models.ops.s2_attention import s2_attention_reference
from trainwright.models.transforms import s2_attention as s2_transform
from trainwright.models.transforms.s2_attention import S2AttentionConfig, SparseAttend

SETTINGS = {"block_size": 16, "local_blocks": 1, "stride": 4}


def decoder(length=160, n_layers=2, **more):
    torch.manual_seed(0)
    spec = {"dim": 32, "n_layers": n_layers, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 48, **more}
    model = DecoderModelConfig(family="llama", **spec).build(61, length)
    for p in model.parameters():
        p.data.mul_(3.0)  # attention that matters
    return model


def sparse(model=None, **settings):
    return S2AttentionConfig(**{**SETTINGS, **settings}).apply(decoder() if model is None else model).eval()


def ids(count, seed=0):
    return torch.randint(61, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_sparse_layers_are_the_reference_and_dense_ones_stay():
    model, plain = sparse(), decoder().eval()
    tokens = ids(150)
    assert (model(tokens) - plain(tokens)).abs().max() > 1e-3
    for i, block in enumerate(model.blocks):
        assert isinstance(block.attn.attend, SparseAttend) == (i == 0)
    reference = sparse()
    pattern = reference.blocks[0].attn.attend.pattern
    reference.blocks[0].attn.attend = lambda q, k, v, plan: s2_attention_reference(q, k, v, pattern)[0]
    torch.testing.assert_close(model(tokens), reference(tokens), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_stride_1_is_the_dense_model():
    tokens = ids(150)
    torch.testing.assert_close(sparse(stride=1, dense_layers=[])(tokens), decoder().eval()(tokens), atol=1e-5, rtol=0)


@torch.no_grad()
def test_packed_documents_equal_documents_alone():
    """Logits of each, and editing one leaves the other as it is."""
    model = sparse(dense_layers=[])
    a, b = ids(70), ids(85, 1)
    doc_ids = torch.tensor([[0] * 70 + [1] * 85])
    positions = torch.cat([torch.arange(70), torch.arange(85)])[None]
    packed = model(torch.cat([a, b], 1), doc_ids=doc_ids, positions=positions)
    torch.testing.assert_close(packed[:, :70], model(a), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 70:], model(b), atol=1e-5, rtol=1e-5)
    edited = model(torch.cat([(a + 1) % 61, b], 1), doc_ids=doc_ids, positions=positions)
    assert torch.equal(edited[:, 70:], packed[:, 70:])


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[100, 1, 1, 1, 30], [33, 50, 17]])
def test_cached_passes_equal_the_whole(chunks):
    model = sparse(dense_layers=[])
    tokens = ids(sum(chunks))
    want = model(tokens)
    cache = model.new_cache(160)
    got = torch.cat([model(part, cache=cache) for part in tokens.split(chunks, 1)], 1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_generation_from_ragged_prompts_equals_each_alone():
    """Padding on the left shifts slots, not blocks of a document."""
    model = sparse(dense_layers=[])
    prompts = [ids(90, 2)[0].tolist(), ids(37, 3)[0].tolist()]
    together = generate_ids(model, prompts, max_new_tokens=6, temperature=0.0)
    for prompt, found in zip(prompts, together, strict=True):
        assert found == generate_ids(model, [prompt], max_new_tokens=6, temperature=0.0)[0]
        assert found == generate_ids(model, [prompt], max_new_tokens=6, temperature=0.0, use_cache=False)[0]


def test_gradients_and_copies():
    model = copy.deepcopy(sparse().train())
    model(ids(120)).square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_share_of_the_heads_keeps_its_pattern():
    """As a rank of tensor parallelism: its heads of the whole result."""
    attend = sparse().blocks[0].attn.attend
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 130, 4, 8, generator=g) for _ in range(3))
    plan = sparse().plan_attention(None, 1, 130, 0, torch.device("cpu"))
    whole = attend(q, k, v, plan)
    for rank in range(2):
        part = slice(2 * rank, 2 * rank + 2)
        got = attend.narrow(rank, 2)(q[:, :, part], k[:, :, part], v[:, :, part], plan)
        torch.testing.assert_close(got, whole[:, :, part])


def test_flops_are_those_of_the_visible_pairs():
    """By counting what the mask lets through."""
    plain, model = decoder(n_layers=3), sparse(decoder(n_layers=3))
    pattern = model.blocks[0].attn.attend.pattern
    length = 150
    dense = length * (length + 1) / 2
    seen = sum(pattern.pairs(length)) / 4
    arch = plain.arch
    want = plain.flops_per_token(length) - 2 * 12 * arch.n_heads * arch.head_dim * (dense - seen) / length
    assert model.flops_per_token(length) == pytest.approx(want, rel=1e-12)
    assert model.flops_per_token(length) < plain.flops_per_token(length)


def test_numbers_of_the_paper():
    config = build("transform", {"name": "s2_attention"})
    assert config.cache_share(32, 32, 8192) == 1920 / 8192
    assert config.sparse_layers(6) == (0, 2, 4)


@pytest.mark.parametrize(
    "settings, more, key, message",
    [
        ({"block_size": 24}, {}, "block_size", "power of two of at least 16"),
        ({"local_blocks": 0}, {}, "local_blocks", "use 1 or more"),
        ({"num_dense_heads": 5}, {}, "num_dense_heads", "should be 0 to 4"),
        ({"stride": 8}, {}, "stride", "to no head; use stride=4 or less"),
        ({"dense_layers": [2]}, {}, "dense_layers", "the model has layers 0 to 1"),
        ({"dense_layers": [0, 1]}, {}, "dense_layers", "leaves no sparse layer"),
        ({}, {"sliding_window": 32}, "dense_layers", "layer 0 has a sliding window of 32 tokens"),
    ],
)
def test_refused(settings, more, key, message):
    with pytest.raises(ConfigError, match=message) as found:
        sparse(decoder(**more), **settings)
    assert found.value.key == key


def test_uncovered_patterns_need_a_word():
    assert sparse(stride=8, allow_uncovered=True) is not None
    assert sparse(stride=8, num_dense_heads=1) is not None


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="our own decoder"):
        S2AttentionConfig().apply(torch.nn.Linear(2, 2))


def test_with_other_ways_to_swap_attention():
    """Context parallelism is refused; tensor parallelism tells each rank its heads."""
    from types import SimpleNamespace

    from trainwright.parallel.apply import _narrow_attention, _spread_context
    from trainwright.parallel.config import Degrees, ParallelConfig

    mesh = SimpleNamespace(degrees=Degrees(cp=2))
    with pytest.raises(ConfigError, match=r"parallel\.cp=2: spreads the tokens of dense attention"):
        _spread_context(sparse(), mesh, ParallelConfig(cp=2))
    model = sparse()
    whole = model.blocks[0].attn.attend.pattern.residues
    dense = model.blocks[1].attn.attend
    _narrow_attention(model, 1, 2)
    assert model.blocks[0].attn.attend.pattern.residues == whole[2:]
    assert model.plan_attention.pattern.residues == whole[2:] and model.plan_attention.n_heads == 2
    assert model.blocks[1].attn.attend is dense


def test_a_recipe_with_context_parallelism_is_refused_before_any_process_starts():
    from trainwright.config.run_config import RunConfig
    from trainwright.train.degrees import check

    recipe = {"transforms": [{"name": "s2_attention"}], "model": {"dim": 64, "n_heads": 8, "n_kv_heads": 8}}
    check(RunConfig.load({**recipe, "train": {"seq_len": 256}}), 2)
    with pytest.raises(ConfigError, match=r"transforms\.0='s2_attention': swaps the attention.*parallel\.cp=1"):
        check(RunConfig.load({**recipe, "train": {"seq_len": 256}, "parallel": {"cp": 2}}), 2)


def test_exported_weights_say_what_is_not_with_them(tmp_path, caplog):
    save_pretrained(sparse(), tmp_path / "out")
    assert "dense attention, which gives other numbers" in caplog.text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["trainwright_transforms"] == ["s2_attention"]
    caplog.clear()
    save_pretrained(decoder(), tmp_path / "plain")
    assert not caplog.text


@torch.no_grad()
def test_plans_of_a_padded_cache():
    """The gathered blocks, and the mask that devices other than CPU and CUDA take."""
    model = sparse(dense_layers=[])
    attend = model.blocks[0].attn.attend
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 120, 4, 8, generator=g) for _ in range(3))
    cache = model.new_cache(160)
    doc_ids = torch.zeros(2, 120, dtype=torch.int32)
    doc_ids[0, :30] = -1
    cache.extend(torch.zeros(2, 120, dtype=torch.int64), doc_ids)
    plan = cache.plan(20, 0)
    want = attend(q[:, -20:], k, v, plan)
    first = s2_transform._first_slots(plan, 2, 20, torch.device("cpu"))
    assert first.tolist() == [[30] * 20, [0] * 20]
    got, _ = s2_attention_reference(q[:, -20:], k, v, attend.pattern, first)
    torch.testing.assert_close(want, got, atol=1e-5, rtol=1e-5)
