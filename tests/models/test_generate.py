"""Generation: cached equals uncached, rows do not depend on their neighbours, sampling keeps to its sets, stops cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.models.generate import generate, generate_ids, keep_top_k, keep_top_p, penalise, sample, stream

torch.set_num_threads(1)
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2.5": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {},
    "qwen3_moe": {},
    "dynamic": {"family": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_seq_len": 64}},
}


def make(vocab=50, **over):
    spec = {
        "name": "decoder",
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 64,
        "max_seq_len": 64,
    }
    torch.manual_seed(0)
    model = build("model", {**spec, **over}).build(vocab, 16).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(std=0.3)
    return model


PROMPTS = [[5, 3, 9], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [4, 4, 4, 8]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_cache_equals_the_uncached_argmax(family):
    model = make(**{"family": family, **FAMILIES[family]})
    got = generate_ids(model, PROMPTS, max_new_tokens=20, temperature=0.0)
    assert len({tuple(g) for g in got}) == len(PROMPTS)
    for prompt, new in zip(PROMPTS, got, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(20):
                ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
        assert new == ids[len(prompt) :]
    assert got == generate_ids(model, PROMPTS, max_new_tokens=20, temperature=0.0, use_cache=False)


def test_ragged_prefill_logits_equal_the_uncached_ones():
    from trainwright.models.cache import PAD_DOCUMENT

    model = make(family="mistral", sliding_window=4)
    rows = torch.randint(50, (2, 9))
    doc_ids = torch.zeros(2, 9, dtype=torch.int32)
    doc_ids[1, :5] = PAD_DOCUMENT
    positions = torch.stack((torch.arange(9), (torch.arange(9) - 5).clamp(min=0)))
    cache = model.new_cache(20)
    with torch.no_grad():
        got = model(rows, positions=positions, doc_ids=doc_ids, cache=cache)
        torch.testing.assert_close(got[0], model(rows[:1])[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(got[1, 5:], model(rows[1:, 5:])[0], atol=1e-5, rtol=0)
        more = torch.randint(50, (2, 3))
        got = model(more, positions=torch.tensor([[9, 10, 11], [4, 5, 6]]), cache=cache)
        whole = torch.cat((rows, more), dim=1)
        torch.testing.assert_close(got[0], model(whole[:1])[0, -3:], atol=1e-5, rtol=0)
        torch.testing.assert_close(got[1], model(whole[1:, 5:])[0, -3:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hf_models_generate_as_transformers_does(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if kind == "gpt2":
        config = transformers.GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    else:
        config = transformers.LlamaConfig(
            **common,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            if p.ndim == 2:
                p.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "hf")
    model = build("model", {"name": "hf", "path": str(tmp_path / "hf")}).build(50, 16)
    got = generate_ids(model, PROMPTS, max_new_tokens=12, temperature=0.0)
    for prompt, new in zip(PROMPTS, got, strict=True):
        want = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert new == want[0, len(prompt) :].tolist()
    assert model.training  # as it was before


def logits_of(draw_values):
    return torch.tensor([draw_values])


floats = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12)


@settings(max_examples=100, deadline=None)
@given(floats, st.integers(1, 14))
def test_top_k_keeps_k_of_the_largest(values, k):
    logits = logits_of(values)
    kept = keep_top_k(logits, k)[0]
    n = min(k, len(values))
    finite = kept.isfinite()
    assert finite.sum() == n
    assert kept[finite].min() >= logits[0].sort(descending=True).values[n - 1]
    assert torch.equal(kept[finite], logits[0][finite])


@settings(max_examples=100, deadline=None)
@given(floats, st.floats(0.01, 1.0))
def test_top_p_keeps_the_smallest_sufficient_set(values, p):
    logits = logits_of(values).double()
    finite = keep_top_p(logits, p)[0].isfinite()
    probs = logits[0].softmax(0)
    kept = probs[finite]
    assert (finite.any() and finite[logits[0].argmax()]) or kept.max() == probs.max()
    assert kept.sum() >= p - 1e-9 or finite.all()
    assert kept.sum() - kept.min() < p + 1e-9 or finite.sum() == 1  # without its least likely member it would not do
    assert not (~finite).any() or probs[~finite].max() <= kept.min() + 1e-12


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20_000, 4)
    g = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, None), (0.5, None), (1.0, 2)):
        want = (logits[:1] / temperature)[:, : top_k or 4].softmax(-1)[0]
        got = torch.bincount(sample(logits, temperature=temperature, top_k=top_k, generator=g), minlength=4) / 20_000
        torch.testing.assert_close(got[: len(want)], want, atol=0.015, rtol=0)
        assert got[len(want) :].sum() == 0
    assert sample(logits, temperature=0.0).eq(0).all()


def test_seeds_make_draws_repeatable():
    model = make()

    def draw(seed):
        return generate_ids(model, PROMPTS, max_new_tokens=15, temperature=1.0, top_p=0.9, seed=seed)

    assert draw(1) == draw(1) != draw(2)
    state = torch.get_rng_state()
    draw(3)
    assert torch.equal(state, torch.get_rng_state())  # sampling in a training run does not change the training


def test_repetition_penalty():
    logits = torch.tensor([[2.0, -1.0, 3.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalise(logits, seen, 2.0).tolist() == [[1.0, -2.0, 3.0]]
    model = make()
    plain = generate_ids(model, [[1, 2]], max_new_tokens=30, temperature=0.0)[0]
    never = generate_ids(model, [[1, 2]], max_new_tokens=30, temperature=0.0, repetition_penalty=1e6)[0]
    assert len(set(never)) == 30 > len(set(plain))


def test_ends_of_a_row():
    model = make()
    free = generate_ids(model, PROMPTS, max_new_tokens=20, temperature=0.0)
    eos = free[0][6]
    ended = generate_ids(model, PROMPTS, max_new_tokens=20, temperature=0.0, eos_id=eos)
    for row, whole in zip(ended, free, strict=True):
        assert row == (whole[: whole.index(eos)] if eos in whole else whole)
    assert generate_ids(model, PROMPTS, max_new_tokens=0, temperature=0.0) == [[]] * 4
    long = generate_ids(model, [[1] * 60, [2]], max_new_tokens=20, temperature=0.0)
    assert [len(x) for x in long] == [4, 4]  # to the model's 64 tokens


def test_text_stop_strings_and_streaming():
    tokenizer = ByteTokenizer()
    model = make(tokenizer.vocab_size)
    prompts = ["def ", "x", "día: "]
    free = generate(model, tokenizer, prompts, max_new_tokens=40, temperature=0.8, seed=3)
    assert all(len(t) > 20 for t in free)
    ascii_rows = [t for t in free if any(c.isascii() for c in t[3:])]
    text = ascii_rows[0]
    at = next(i for i, c in enumerate(text[3:], 3) if c.isascii())
    stop = text[at]
    cut = generate(
        model, tokenizer, prompts, max_new_tokens=40, temperature=0.8, seed=3, stop=[stop, "not there at all"]
    )
    row = free.index(text)
    assert cut[row] == text[: text.index(stop)]
    assert all(stop not in t for t in cut)
    whole = generate(model, tokenizer, ["def "], max_new_tokens=60, temperature=0.8, seed=4)[0]
    pieces = list(stream(model, tokenizer, "def ", max_new_tokens=60, temperature=0.8, seed=4))
    assert "".join(pieces) == whole and len(pieces) > 10
    middle = whole[20:22]
    stopped = "".join(stream(model, tokenizer, "def ", max_new_tokens=60, temperature=0.8, seed=4, stop=[middle]))
    assert stopped == whole[: whole.index(middle)]


def test_bad_settings_are_named():
    tokenizer = ByteTokenizer()
    model = make(tokenizer.vocab_size)
    for key, value in {"temperature": -1.0, "top_k": 0, "top_p": 0.0, "max_new_tokens": -1, "stop": [""]}.items():
        with pytest.raises(ConfigError, match=key):
            generate(model, tokenizer, ["a"], **{key: value})
    with pytest.raises(ConfigError, match="empty"):
        generate_ids(model, [[1], []])
    with pytest.raises(ConfigError, match="64 tokens and leaves no room"):
        generate_ids(model, [[1] * 64])
    assert isinstance(generate(model, tokenizer, [""], max_new_tokens=3)[0], str)  # from nothing: after an eos
