"""What every registered model must do. A new model is tested the moment it registers."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainwright.core.errors import ConfigError, ModelError
from trainwright.core.params import named_params
from trainwright.core.registry import build, methods
from trainwright.models.base import Hidden
from trainwright.models.decoder import head_logits

torch.set_num_threads(1)
VOCAB, LENGTH = 61, 24
DIMS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "max_seq_len": 64}
# Models that need more than a name; one that is not here is built from its defaults.
SPECS = {
    "decoder": [
        {**DIMS, "family": "llama"},
        {**DIMS, "family": "llama2", "tie_embeddings": False},
        {**DIMS, "family": "mistral", "sliding_window": 5},
        {**DIMS, "family": "qwen2.5"},
        {**DIMS, "family": "qwen3", "head_dim": 16},
        {**DIMS, "family": "mixtral"},
        {**DIMS, "family": "qwen3_moe", "balance": "bias"},
    ],
    "hf": [{"path": "gpt2"}, {"path": "llama"}, {"path": "gemma2"}],
}


def specs():
    for method in methods("model"):
        for spec in SPECS.get(method.name, [{"path": "llama"} if "path" in method.config.model_fields else {}]):
            label = "-".join(str(v) for v in (method.name, spec.get("family", spec.get("path", ""))) if v)
            yield pytest.param({"name": method.name, **spec}, id=label)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("hf")
    common = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    dims = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "head_dim": 8,
    }
    configs = {
        "llama": transformers.LlamaConfig(**common, **dims),
        "gpt2": transformers.GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "gemma2": transformers.Gemma2Config(
            **common, **dims, sliding_window=5, query_pre_attn_scalar=8, final_logit_softcapping=5.0
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for n, p in model.named_parameters():
                if p.ndim >= 2:
                    p.normal_(std=0.15)
                elif "bias" in n:
                    p.normal_(std=0.1)
        model.save_pretrained(root / name)
    return root


@pytest.fixture(params=list(specs()))
def config(request):
    spec = dict(request.param)
    if "path" in spec:
        spec["path"] = str(request.getfixturevalue("folders") / spec["path"])
    return build("model", spec)


@pytest.fixture
def model(config):
    torch.manual_seed(0)
    model = config.build(VOCAB, LENGTH).eval()
    with torch.no_grad():  # a fresh model's 0.02 hides differences
        if config.name == "decoder":
            for p in model.parameters():
                if p.ndim >= 2:
                    p.normal_(std=0.15)
    return model


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def packed():
    """Two rows: documents of 6, 8 and 10 tokens; one document."""
    doc_ids = torch.tensor([[0] * 6 + [1] * 8 + [2] * 10, [0] * LENGTH], dtype=torch.int32)
    positions = torch.stack((torch.cat((torch.arange(6), torch.arange(8), torch.arange(10))), torch.arange(LENGTH)))
    return positions, doc_ids


def test_logits_and_attributes(model, tokens):
    with torch.no_grad():
        logits = model(tokens)
        assert logits.shape == (2, LENGTH, model.vocab_size) and logits.isfinite().all()
        assert model.vocab_size >= VOCAB and model.max_seq_len >= LENGTH
        assert isinstance(model.blocks, nn.ModuleList) and len(model.blocks) == 2
        # Causal: a later token changes nothing before it.
        changed = tokens.clone()
        changed[:, 15] = (changed[:, 15] + 1) % VOCAB
        again = model(changed)
    torch.testing.assert_close(again[:, :15], logits[:, :15], atol=1e-6, rtol=0)
    assert (again[:, 15:] - logits[:, 15:]).abs().amax(dim=(0, 2))[0] > 1e-4
    assert model.num_params() == sum(p.numel() for p in model.parameters())


def test_head_fn_gives_the_same_logits(model, tokens):
    seen = []

    def head_fn(hidden):
        assert isinstance(hidden, Hidden) and hidden.states.shape[:2] == tokens.shape
        assert hidden.head.weight.shape == (model.vocab_size, hidden.states.shape[-1])
        seen.append(hidden)
        return head_logits(hidden)

    with torch.no_grad():
        torch.testing.assert_close(model(tokens, head_fn=head_fn), model(tokens), atol=1e-5, rtol=0)
    assert len(seen) == 1


def test_packed_documents_do_not_see_each_other(model, tokens):
    positions, doc_ids = packed()
    with torch.no_grad():
        logits = model(tokens, positions=positions, doc_ids=doc_ids)
        for first, stop in ((0, 6), (6, 14), (14, 24)):
            alone = model(tokens[:1, first:stop])
            torch.testing.assert_close(logits[:1, first:stop], alone, atol=1e-4, rtol=0)
        torch.testing.assert_close(logits[1:], model(tokens[1:]), atol=1e-4, rtol=0)
        # Editing one document leaves the others as they are.
        edited = tokens.clone()
        edited[0, 6:14] = (edited[0, 6:14] + 7) % VOCAB
        again = model(edited, positions=positions, doc_ids=doc_ids)
    assert (again[0, 6:14] - logits[0, 6:14]).abs().max() > 1e-3
    for rows, slots in ((0, slice(0, 6)), (0, slice(14, 24)), (1, slice(None))):
        torch.testing.assert_close(again[rows, slots], logits[rows, slots], atol=1e-6, rtol=0)


def test_gradients_reach_every_parameter_and_do_not_cross_documents(model, tokens):
    positions, doc_ids = packed()
    hidden = model(tokens, positions=positions, doc_ids=doc_ids, head_fn=lambda h: h)
    loss = head_logits(hidden).float().logsumexp(-1).mean()
    if hidden.aux_loss is not None:
        loss = loss + hidden.aux_loss
    loss.backward()
    used = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not used
    # Position tables have rows that were not looked up; every matrix has some gradient.
    zero = [n for n, p in model.named_parameters() if p.grad.abs().sum() == 0]
    assert not [n for n in zero if not n.endswith("k.bias")]  # a key bias shifts all scores of a query alike


def test_roles_are_complete(model):
    roles = model.param_roles()
    assert set(roles) == {n for n, _ in model.named_parameters()}
    by_role = {r: [n for n in roles if roles[n] == r] for r in set(roles.values())}
    params = dict(model.named_parameters())
    assert "embedding" in by_role and "matrix" in by_role
    assert all(params[n].ndim == 2 for r in ("matrix", "embedding", "head", "router") for n in by_role.get(r, ()))
    assert all(params[n].ndim == 3 for n in by_role.get("expert", ()))
    assert all(params[n].ndim == 1 for r in ("norm", "bias") for n in by_role.get(r, ()))
    assert len(named_params(model)) == len(roles)


def test_flops_equal_the_counted_matrix_products(model, config, tokens):
    if config.name == "hf" and "gpt2" in config.path:
        pytest.skip("an estimate: Conv1D and eager attention")
    model.train()

    def grouped(x, w, counts, *args, out_shape=None, **kwargs):
        return 2 * x[0] * w[1] * w[2]  # every row meets one expert's matrix

    def grouped_backward(grad, x, w, counts, *args, out_shape=None, **kwargs):
        return 2 * grouped(x, w, counts)

    ops = torch.ops.trainwright
    custom = {ops.grouped_linear: grouped, ops.grouped_linear_backward: grouped_backward}
    with FlopCounterMode(display=False, custom_mapping=custom) as counter:
        model(tokens).float().logsumexp(-1).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    kinds = ("aten.mm", "aten.addmm", "trainwright.grouped_linear", "trainwright.grouped_linear_backward")
    products = sum(n for op, n in counts.items() if str(op) in kinds)
    attention = model.flops_per_token(LENGTH) * tokens.numel() - products
    layers = getattr(model, "arch", None)
    if layers is not None:
        width = layers.n_heads * layers.head_dim
        windows = [layers.window(i) for i in range(layers.n_layers)]
        pairs = sum(min(i + 1, w or LENGTH) for w in windows for i in range(LENGTH))
        assert attention == pytest.approx(3 * 2 * 2 * width * pairs * tokens.shape[0], rel=1e-9)
    else:
        assert 0 < attention < 0.2 * products


def test_runs_are_repeatable(config, tokens):
    def run():
        torch.manual_seed(11)
        model = config.build(VOCAB, LENGTH)
        model(tokens).float().logsumexp(-1).mean().backward()
        return [p.detach().clone() for p in model.parameters()], [p.grad for p in model.parameters()]

    first, second = run(), run()
    for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(a, b)


def test_what_does_not_fit_is_refused(config):
    with pytest.raises((ConfigError, ModelError), match="65"):
        config.build(VOCAB, 65)
    if config.tokenizer_path() is not None:
        with pytest.raises(ModelError, match="62"):
            config.build(VOCAB + 1, LENGTH)


def test_cached_steps_equal_the_whole_pass(model, tokens):
    cache = model.new_cache(LENGTH)
    with torch.no_grad():
        want = model(tokens)
        got = [model(tokens[:, :9], cache=cache), model(tokens[:, 9:12], cache=cache)]
        got += [model(tokens[:, i : i + 1], cache=cache) for i in range(12, LENGTH)]
    torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-4, rtol=0)
