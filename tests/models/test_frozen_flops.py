"""FLOPs per token where weights are frozen, against torch's own count of what forward and backward do."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainwright.core.registry import build

DENSE = {"dim": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "max_seq_len": 64}
B, T, V = 2, 16, 61


def decoder(**more):
    torch.manual_seed(0)
    return build("model", {"name": "decoder", **DENSE, **more}).build(V, T)


def counted(model):
    """FLOPs per token of matrix products, attention left out (torch counts its square whole)."""
    tokens = torch.randint(0, V, (B, T))
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens).float().square().mean()
        loss.backward()
    found = counter.get_flop_counts()["Global"]
    wanted = {"mm", "addmm"}
    return sum(n for op, n in found.items() if str(op).split(".")[-1].split("::")[-1] in wanted) / (B * T)


def attention_pairs(model):
    arch = model.arch
    return sum(12.0 * arch.n_heads * arch.head_dim * arch.attended(i, T) for i in range(arch.n_layers))


def own_count(model, pairs=None):
    return model.flops_per_token(T) - (attention_pairs(model) if pairs is None else pairs)


def readers(block):
    """Frozen weights that read the block's own input, and adapters on them: no gradient goes on to that input."""
    names = ("attn.q", "attn.k", "attn.v")
    out = 0
    for name in names:
        linear = block.get_submodule(name)
        out += linear.weight.numel()
        if hasattr(linear, "lora_a"):
            out += linear.lora_a.numel()
    return out


def test_a_model_trained_in_full_is_counted_as_before():
    for tied in (True, False):
        model = decoder(tie_embeddings=tied)
        assert model.flops_per_token(T) == model.arch.flops_per_token(T)
        assert counted(model) == own_count(model)


@pytest.mark.parametrize("settings", [{}, {"targets": ["q", "v"]}])
@pytest.mark.parametrize("tied", [True, False])
def test_lora(settings, tied):
    model = decoder(tie_embeddings=tied)
    full = model.flops_per_token(T)
    model = build("transform", {"name": "lora", "rank": 4, **settings}).apply(model)
    got = model.flops_per_token(T)
    assert 0.6 * full < got < 0.9 * full
    first = model.blocks[0]
    # In the first block nothing is owed to its own input.
    assert counted(model) == own_count(model) - 2 * readers(first)


def test_the_first_blocks_frozen():
    model = decoder()
    for part in (model.embed, *model.blocks[:2]):
        part.requires_grad_(False)
    arch = model.arch
    pairs = [12.0 * arch.n_heads * arch.head_dim * arch.attended(i, T) for i in range(3)]
    # The third block's norm is trained, so its q, k and v do hand a gradient on.
    assert counted(model) == own_count(model, pairs[0] / 3 + pairs[1] / 3 + pairs[2])


def test_experts_count_by_what_is_active():
    model = decoder(n_experts=4, n_experts_per_token=2, moe_ffn_dim=24)
    full = model.flops_per_token(T)
    adapted = build("transform", {"name": "lora", "rank": 2, "targets": ["expert"]}).apply(model)
    dim, ffn, layers = 32, 24, 3
    adapters = 2 * 6 * 2 * 3 * (dim + ffn) * layers  # two active experts, 6 FLOPs, rank 2, gate, up and down
    frozen = sum(model.arch.matmul_params(i) for i in range(layers)) + V * dim
    assert adapted.flops_per_token(T) == full - 2 * frozen + adapters


def test_the_trainer_and_compare_count_so(recipe):
    from trainwright import RunConfig
    from trainwright.lab.prepare import flops_per_token

    config = RunConfig.load(recipe(transforms=[{"name": "lora"}]))
    plain = RunConfig.load(recipe())
    assert flops_per_token(config, 259) < 0.9 * flops_per_token(plain, 259)


def test_transformers_models():
    transformers = pytest.importorskip("transformers")
    from trainwright.models.hf import HFModel

    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model = HFModel(transformers.LlamaForCausalLM(config))
    full = model.flops_per_token(T)
    lora = build("transform", {"name": "lora", "rank": 4}).apply(model)
    got = lora.flops_per_token(T)
    frozen = sum(p.numel() for n, p in lora.named_parameters() if "lora_" not in n and p.ndim == 2 and "embed" not in n)
    adapters = sum(p.numel() for n, p in lora.named_parameters() if "lora_" in n)
    assert got == full - 2 * frozen + 6 * adapters
