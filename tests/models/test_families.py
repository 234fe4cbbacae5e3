"""Our decoder against transformers, family by family: folders in, folders out, the same logits."""

from __future__ import annotations

import json
import os
import shutil

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from trainwright.core.errors import ConfigError, ModelError
from trainwright.core.registry import build
from trainwright.models import from_pretrained, save_pretrained

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

DIMS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING = {"sliding_window": 7, "use_sliding_window": True}
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
    "llama-rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-rope-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 16},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-mixed-window": ("Qwen2", {**SLIDING, "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias-window": ("Qwen3", {"head_dim": 8, "attention_bias": True, **SLIDING, "max_window_layers": 0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 7, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "qwen3_moe-norm-dense": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}


def hf_model(case: str):
    name, options = CASES[case]
    config = getattr(transformers, f"{name}Config")(**{**DIMS, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            # Larger than the usual 0.02, and no norm at 1 or bias at 0: nothing may hide behind a trivial value.
            p.copy_(torch.rand_like(p) + 0.5 if "norm" in n else torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.15))
    return model


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(97, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_both_ways(case, tmp_path, tokens):
    theirs = hf_model(case)
    theirs.save_pretrained(tmp_path / "in")
    ours = from_pretrained(tmp_path / "in")
    with torch.no_grad():
        want = theirs(tokens).logits
        got = ours(tokens)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)

    save_pretrained(ours, tmp_path / "out", max_shard_size=20_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(again) is type(theirs)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, want, atol=1e-4, rtol=0)
    back = from_pretrained(tmp_path / "out")
    assert back.arch == ours.arch
    for (n, a), (m, b) in zip(ours.state_dict().items(), back.state_dict().items(), strict=True):
        assert n == m and torch.equal(a, b)


FRESH = [
    {"family": "llama"},
    {"family": "llama", "attention_bias": True, "tie_embeddings": False},
    {"family": "mistral", "sliding_window": 5},
    {"family": "qwen2.5", "sliding_window": 5},
    {"family": "qwen3"},
    {"family": "qwen3", "attention_bias": True},
    {"family": "mixtral"},
    {"family": "qwen3_moe"},
    {"family": "mixtral", "balance": "bias"},
    {"family": "qwen3_moe", "balance": "bias", "attention_bias": True},
    {"family": "llama", "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_seq_len": 16}},
]


@pytest.mark.parametrize("spec", FRESH, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_fresh_models_export(spec, tmp_path, tokens):
    torch.manual_seed(0)
    spec = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "max_seq_len": 64, **spec}
    model = build("model", {"name": "decoder", **spec}).build(97, 40).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.3)
        want = model(tokens)
        save_pretrained(model, tmp_path / "out")
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        torch.testing.assert_close(theirs.eval()(tokens).logits, want, atol=1e-4, rtol=0)
        torch.testing.assert_close(from_pretrained(tmp_path / "out")(tokens), want, atol=1e-6, rtol=0)


def test_what_transformers_cannot_express_is_refused(tmp_path):
    config = build(
        "model", {"name": "decoder", "family": "mixtral", "size": "1m", "balance": "bias", "router_score": "softmax"}
    )
    with pytest.raises(ModelError, match="sigmoid"):
        save_pretrained(config.build(97, 8), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def folder(tmp_path):
    hf_model("llama").save_pretrained(tmp_path / "hf", max_shard_size="20kB")
    return tmp_path / "hf"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_bad_folders_are_named(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    with pytest.raises(ModelError, match="not a Hugging Face model folder"):
        from_pretrained(tmp_path)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2

    def broken(change, match):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        change(copy)
        with pytest.raises(ModelError, match=match):
            from_pretrained(copy)
        shutil.rmtree(copy)

    def rewrite(copy, change):
        tensors = load_file(copy / shards[0].name)
        change(tensors)
        save_file(tensors, copy / shards[0].name)
        index = json.loads((copy / "model.safetensors.index.json").read_text())
        kept = {k: v for k, v in index["weight_map"].items() if v != shards[0].name}
        index["weight_map"] = kept | dict.fromkeys(tensors, shards[0].name)
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))

    name = next(iter(load_file(shards[0])))
    broken(lambda c: (c / shards[1].name).unlink(), rf"misses 1 of .*{shards[1].name}")
    broken(lambda c: (c / shards[1].name).write_bytes(b"x" * 50), rf"{shards[1].name} is damaged")
    broken(lambda c: rewrite(c, lambda t: t.pop(name)), rf"misses 1 weights: {name}")
    broken(lambda c: rewrite(c, lambda t: t.update(odd=torch.zeros(2))), "does not account for: odd")
    broken(lambda c: rewrite(c, lambda t: t.update({name: torch.zeros(3, 5)})), rf"{name} has shape \[3, 5\]")
    broken(lambda c: edit(c, model_type="bert"), "bert.*name: hf")
    broken(lambda c: edit(c, hidden_act="gelu"), "hidden_act='gelu'")
    broken(lambda c: edit(c, rope_parameters={"rope_type": "longrope", "rope_theta": 1.0, "factor": 2.0}), "longrope")
    broken(lambda c: (c / "config.json").write_text("{"), "cannot be read")
    broken(lambda c: [p.unlink() for p in c.glob("model*")], "has neither")


def test_export_refuses_an_existing_target_and_leaves_nothing_half_written(folder, tmp_path, monkeypatch):
    model = from_pretrained(folder)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        save_pretrained(model, tmp_path / "there")
    import safetensors.torch

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="No space left"):
        save_pretrained(model, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_generation_config_and_chat_template_travel(folder, tmp_path):
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.3}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    model = from_pretrained(folder, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    save_pretrained(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.3}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    save_pretrained(model, tmp_path / "own", generation_config={"top_k": 1}, dtype=torch.float32)
    assert json.loads((tmp_path / "own" / "generation_config.json").read_text()) == {"top_k": 1}
    assert next(from_pretrained(tmp_path / "own").parameters()).dtype == torch.float32


def test_export_with_a_tokenizer_loads_as_one_folder(tmp_path):
    from trainwright.data.tokenizers.bytes import ByteTokenizer

    tokenizer = ByteTokenizer()
    model = build("model", {"name": "decoder", "size": "1m"}).build(tokenizer.vocab_size, 8)
    save_pretrained(model, tmp_path / "out", tokenizer=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode("día", add_special_tokens=False) == list(tokenizer.encode("día"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == tokenizer.eos_id


def test_vocabulary_and_length_must_fit(folder):
    config = build("model", {"name": "pretrained", "path": str(folder)})
    assert config.tokenizer_path() == str(folder)
    with pytest.raises(ModelError, match="knows 97 ids and the tokenizer has 98"):
        config.build(98, 8)
    with pytest.raises(ConfigError, match="seq_len=65"):
        config.build(97, 65)
    assert config.build(90, 64).vocab_size == 97


def test_balancing_of_a_folder_cannot_change_its_routing(tmp_path):
    hf_model("mixtral").save_pretrained(tmp_path / "hf")
    with pytest.raises(ConfigError, match="balanced by aux_loss"):
        build("model", {"name": "pretrained", "path": str(tmp_path / "hf"), "balance": "bias"}).build(97, 8)
    spec = {"name": "pretrained", "path": str(tmp_path / "hf"), "aux_loss_coefficient": 0.5, "dropout": 0.1}
    model = build("model", spec).build(97, 8)
    assert (model.arch.aux_loss_coefficient, model.arch.dropout) == (0.5, 0.1)


def test_weights_are_trained_in_float32_unless_told_otherwise(tmp_path):
    theirs = hf_model("qwen3").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf")
    assert next(from_pretrained(tmp_path / "hf").parameters()).dtype == torch.bfloat16
    model = build("model", {"name": "pretrained", "path": str(tmp_path / "hf")}).build(97, 8)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
