"""The study's figures against hand counts, its cost model against counted FLOPs. Letters: the card's list."""

import argparse
import inspect
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import tokenizers
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.tokenizer_study import (
    Loss,
    ModelDims,
    bits_per_byte,
    embedding_parameters,
    flops_per_token,
    flops_per_word,
    loss_difference,
    measure,
    parity,
    renyi_efficiency,
    tokenizer_report,
    vocabulary_study,
)
from trainwright.data.tokenizers._fast import FastTokenizer, hf_config
from trainwright.data.tokenizers._trained import BOS, EOS, PAD, PATTERN
from trainwright.data.tokenizers.bpe import train_bpe
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.data.tokenizers.morph_bpe import byte_letters, count_words
from trainwright.data.tokenizers.segmentation import load_segmentation

LIBRARY = Path(inspect.getfile(argparse)).parent
SPECIAL = [EOS, BOS, PAD]


def english(num_files=12, skip=0):
    paths = sorted(LIBRARY.glob("*.py"))[skip : skip + num_files]
    return [p.read_text(encoding="utf-8", errors="ignore") for p in paths]


def trained(texts, size):
    return FastTokenizer(train_bpe(texts, size, special_tokens=SPECIAL), hf_config(EOS, BOS, PAD, None))


@pytest.fixture(scope="module")
def bpe():
    return trained(english(), 2000)


def characters():
    """A tokenizer with one token a character, white space dropped."""
    vocab = {"<eos>": 0, **{chr(c): c - 96 for c in range(97, 123)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<eos>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.WhitespaceSplit(),
            tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated"),
        ]
    )
    return FastTokenizer(backend, {"eos_token": "<eos>"})


# --- (a) exact round trip is tested in test_tokenizers.py; merges in rank order against brute force


def test_a_encoding_is_merging_in_rank_order(bpe):
    merges = [tuple(m) for m in json.loads(bpe.backend.to_str())["model"]["merges"]]
    ranks = {pair: i for i, pair in enumerate(merges)}
    words = list(count_words(english(60), PATTERN))
    random.Random(0).shuffle(words)
    assert len(words) > 10_000
    ids = bpe.backend.get_vocab()
    for word in words[:10_000]:
        pieces = list(byte_letters(word))
        while len(pieces) > 1:
            best = min(itertools.pairwise(pieces), key=lambda p: ranks.get(p, math.inf))
            if best not in ranks:
                break
            i = next(i for i in range(len(pieces)) if tuple(pieces[i : i + 2]) == best)
            pieces[i : i + 2] = ["".join(best)]
        assert bpe.encode(word) == [ids[p] for p in pieces], word


# --- (b) limiting cases of the figures


def test_b_character_tokenizer_has_the_mean_word_length_as_fertility():
    text = "one three fifteen"
    figures, counts = measure(characters(), [text])
    assert figures.fertility == (3 + 5 + 7) / 3 and figures.word_unit == "word"
    assert (figures.words, figures.tokens, figures.bytes, figures.characters) == (3, 15, 17, 17)
    assert counts.sum() == 15 and counts[0] == 0


def test_b_bytes_have_one_byte_a_token():
    figures, _ = measure(ByteTokenizer(), ["héllo wörld", "漢字"])
    assert figures.bytes_per_token == 1 and figures.tokens == figures.bytes == 13 + 6
    assert bits_per_byte(math.log(2), figures.tokens, figures.bytes) == pytest.approx(1)
    assert bits_per_byte(math.log(256), 100, 100) == pytest.approx(8)


def test_b_parity(bpe):
    a, b = ["The house is red.", "I see a dog."], ["Das Haus ist rot.", "Ich sehe einen Hund."]
    assert parity(bpe, a, a) == 1
    assert parity(bpe, a, b) * parity(bpe, b, a) == pytest.approx(1)
    assert parity(bpe, a, b) < 1  # an English tokenizer cuts German finer
    assert parity(ByteTokenizer(), a, b) == sum(map(len, a)) / sum(map(len, b))


# --- (c) the cost model against counted matrix products


class TinyGPT(nn.Module):
    """The textbook block: attention with every product written out, MLP of 4h."""

    def __init__(self, h, layers, heads, vocab, recompute):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, h), nn.Linear(h, vocab, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(h, 3 * h) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(h, h) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(h, 4 * h) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * h, h) for _ in range(layers))
        self.heads, self.recompute = heads, recompute

    def block(self, x, i):
        B, T, h = x.shape
        q, k, v = (p.view(B, T, self.heads, -1).transpose(1, 2) for p in self.qkv[i](x).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = x + self.out[i](mixed.transpose(1, 2).reshape(B, T, h))
        return x + self.down[i](torch.relu(self.up[i](x)))

    def forward(self, ids):
        x = self.embed(ids)
        for i in range(len(self.qkv)):
            x = checkpoint(self.block, x, i, use_reentrant=False) if self.recompute else self.block(x, i)
        return self.head(x)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("h", "layers", "seq", "vocab"), [(64, 2, 32, 512), (96, 3, 128, 300), (32, 1, 16, 4096)])
def test_c_cost_model_against_counted_flops(h, layers, seq, vocab, recompute):
    model = TinyGPT(h, layers, 4, vocab, recompute)
    ids = torch.randint(vocab, (2, seq))
    # torch would leave out the last product of each block, which the formula counts
    with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    predicted = flops_per_token(ModelDims(h, layers, seq, recompute), vocab) * ids.numel()
    assert predicted == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_c_cost_model_against_our_decoder():
    """SwiGLU of width 8h/3 has the weights of an MLP of 4h; causal attention is half of what the formula counts."""
    from trainwright.models.architecture import Architecture

    h, layers, seq, vocab = 96, 3, 64, 700
    arch = Architecture(
        dim=h,
        n_layers=layers,
        n_heads=4,
        n_kv_heads=4,
        head_dim=h // 4,
        ffn_dim=8 * h // 3,
        vocab_size=vocab,
        max_seq_len=seq,
    )
    full = flops_per_token(ModelDims(h, layers, seq), vocab)
    causal = full - 72 * layers * h**2 * seq / (6 * h) / 2
    assert arch.flops_per_token(seq) == pytest.approx(causal, rel=0.02)


def test_c_formula_as_published():
    B, s, layers, h, V, F = 7, 2048, 32, 2560, 50_000, 1.4
    kept = 72 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (12 * layers * h))
    recomputed = 96 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    assert flops_per_token(ModelDims(h, layers, s), V) * B * s == pytest.approx(kept)
    assert flops_per_token(ModelDims(h, layers, s, recompute=True), V) * B * s == pytest.approx(recomputed)
    assert flops_per_word(ModelDims(h, layers, s), V, F) == pytest.approx(kept / (B * s) * F)
    assert embedding_parameters(ModelDims(h), 100) == 100 * h
    assert embedding_parameters(ModelDims(h, tied=False), 100) == 200 * h


# --- (d) bits per byte does not depend on the cut


def test_d_bits_per_byte_is_invariant_when_tokens_are_split(bpe):
    text = english(1)[0][:2000]
    rng = np.random.default_rng(0)
    nats = rng.exponential(2.0, len(bpe.encode(text)))
    # every token cut in parts whose log-probabilities add up to its own
    cut = [n * rng.dirichlet(np.ones(rng.integers(1, 4))) for n in nats]
    parts = np.concatenate(cut)
    size = len(text.encode())
    a = Loss(nats.mean(), len(nats), size, "a")
    b = Loss(parts.mean(), len(parts), size, "b")
    assert len(parts) > 1.5 * len(nats) and b.nats_per_token < 0.7 * a.nats_per_token
    assert a.bits_per_byte == pytest.approx(b.bits_per_byte, rel=1e-12)
    assert loss_difference(a, b) == pytest.approx(0, abs=1e-12)


# --- the effect


MULTI = {
    "de": (
        "Die Sonne scheint über der alten Stadt, und die Menschen gehen langsam durch die schmalen Straßen. "
        "Am Abend sitzen wir zusammen vor dem Haus und sprechen über die Ereignisse des vergangenen Tages. "
        "Niemand weiß genau, wann der Regen kommen wird, aber alle hoffen auf ein gutes Jahr. "
    ),
    "fr": (
        "Le soleil brille sur la vieille ville et les gens marchent lentement dans les rues étroites. "
        "Le soir, nous sommes assis ensemble devant la maison et nous parlons des événements de la journée. "
        "Personne ne sait exactement quand la pluie viendra, mais tout le monde espère une bonne année. "
    ),
    "zh": (
        "太阳照在老城上，人们慢慢地走过狭窄的街道。晚上我们一起坐在房子前面，"
        "谈论一天的事情。没有人知道什么时候会下雨，但是大家都希望有一个好年。"
    ),
}


def test_effect_an_english_tokenizer_costs_other_languages_more(tmp_path):
    """In small: what each tokenizer learned of a language is what it was shown of it."""
    words = {k: (t.split() if k != "zh" else list(t)) for k, t in MULTI.items()}
    rng = random.Random(0)

    def drawn(language, n):
        return [("" if language == "zh" else " ").join(rng.choices(words[language], k=60)) for _ in range(n)]

    train = {"en": english(20), **{k: drawn(k, 150) for k in MULTI}}
    held_out = {"en": english(5, skip=30), **{k: drawn(k, 20) for k in MULTI}}
    dims = ModelDims(256, 4, 256)
    report = vocabulary_study(
        train, held_out, [{"name": "bpe"}], [1500, 3000], tmp_path, dims, mixes={"mono": ["en"], "multi": list(train)}
    )
    assert [r.name for r in report.rows] == ["mono-bpe-1500", "mono-bpe-3000", "multi-bpe-1500", "multi-bpe-3000"]
    mono, multi = report.rows[0], report.rows[3]
    for language in MULTI:
        assert mono.languages[language].fertility >= 1.3 * multi.languages[language].fertility
        # before the V term the ratio of costs is that of the fertilities
        costs = [flops_per_word(dims, 0, r.languages[language].fertility) for r in (mono, multi)]
        ratio = mono.languages[language].fertility / multi.languages[language].fertility
        assert costs[0] / costs[1] == pytest.approx(ratio, rel=0.01)
    assert report.best is None


# --- the report


def test_report(bpe):
    texts = {"en": english(2, skip=40), "bytes": ["漢字 kana"]}
    report = tokenizer_report(
        {"bpe": bpe, "bytes": ByteTokenizer()},
        texts,
        ModelDims(128, 2, 64),
        parallel={"en": ["the house"], "de": ["das Haus"]},
        segmentation=load_segmentation("en"),
    )
    first, second = report.rows
    assert first.relative_compute == 1
    want = flops_per_token(report.dims, 259) * second.tokens / (flops_per_token(report.dims, 2000) * first.tokens)
    assert second.relative_compute == pytest.approx(want) and want > 2
    assert second.tokens == sum(len(t.encode()) for own in texts.values() for t in own)
    assert first.bytes_per_token == pytest.approx(second.tokens / first.tokens)
    used = {byte for own in texts.values() for t in own for byte in t.encode()}
    assert second.unused_share == pytest.approx(1 - len(used) / 259)
    assert first.parity["en"] == 1 and second.parity == {"en": 1, "de": 8 / 9}
    assert set(first.morphology) == {"edit_distance", "consistency", "crossing_rate"}
    assert second.morphology["crossing_rate"] == 0
    found = report.as_dict()
    assert found["best"] is None and found["rows"][0]["languages"]["en"]["fertility"] > 1


def test_no_best_by_fertility_but_by_the_proxy(bpe):
    asked = []

    def proxy(name, tokenizer):
        asked.append((name, tokenizer.vocab_size))
        return {"bpe": 1.2, "bytes": 1.1}[name]

    both = {"bpe": bpe, "bytes": ByteTokenizer()}
    report = tokenizer_report(both, {"en": ["some text"]}, proxy=proxy)
    assert report.best == "bytes" and asked == [("bpe", 2000), ("bytes", 259)]
    assert report.rows[0].languages["en"].fertility < report.rows[1].languages["en"].fertility
    assert tokenizer_report(both, {"en": ["some text"]}).best is None


def test_words_of_scripts_without_spaces_are_characters():
    figures, _ = measure(ByteTokenizer(), ["太阳照在 老城上，abc"])
    assert figures.word_unit == "character" and figures.words == 11
    for text in ("ภาษาไทย", "こんにちは世界"):
        assert measure(ByteTokenizer(), [text])[0].words == len(text)
    for text in ("한국어 글", "Привет мир", "مرحبا بالعالم", "123 456"):
        figures, _ = measure(ByteTokenizer(), [text])
        assert figures.word_unit == "word" and figures.words == 2


def test_renyi_efficiency():
    assert renyi_efficiency(np.array([5, 5, 5, 5]), 4) == pytest.approx(1)
    assert renyi_efficiency(np.array([7, 0, 0, 0]), 4) == 0
    p = np.array([0.5, 0.25, 0.25])
    want = math.log((p**2.5).sum()) / (1 - 2.5) / math.log(8)
    assert renyi_efficiency(np.array([2, 1, 1, 0, 0, 0, 0, 0]), 8) == pytest.approx(want)


def test_study_over_algorithms(tmp_path):
    texts = english(16)
    specs = [{"name": "bpe"}, {"name": "unigram"}, {"name": "morph_bpe"}, {"name": "bpe", "pattern": r"\S+|\s+"}]
    report = vocabulary_study({"en": texts[:12]}, {"en": texts[12:]}, specs, [500, 800], tmp_path)
    assert [r.name for r in report.rows] == [
        f"{a}-{v}{mark}"
        for a, mark in (("bpe", ""), ("unigram", ""), ("morph_bpe", ""), ("bpe", "'"))
        for v in (500, 800)
    ]
    assert [r.vocab_size for r in report.rows] == [500, 800] * 4
    tokens = [r.tokens for r in report.rows]
    assert all(large < small for small, large in zip(tokens[::2], tokens[1::2], strict=True))


# --- bad input


def test_losses_of_two_tokenizers_are_not_compared_by_token():
    a, b = Loss(3.0, 100, 400, "a"), Loss(2.0, 150, 400, "b")
    with pytest.raises(ValueError, match="compare bits_per_byte"):
        loss_difference(a, b, "nats_per_token")
    assert loss_difference(a, Loss(2.5, 100, 400, "a"), "nats_per_token") == 0.5
    with pytest.raises(ValueError, match="same text"):
        loss_difference(a, Loss(2.0, 100, 300, "a"))
    with pytest.raises(ValueError, match="undefined"):
        bits_per_byte(1.0, 0, 0)


def test_parity_of_texts_that_are_not_parallel(bpe):
    with pytest.raises(ValueError, match="there are 1 and 2"):
        parity(bpe, ["a"], ["b", "c"])
    with pytest.raises(ValueError, match="there are 0 and 0"):
        parity(bpe, [], [])
    with pytest.raises(ValueError, match="sentence 1 is empty in one language only"):
        parity(bpe, ["a", ""], ["b", "c"])
    a = ["word " * n for n in range(1, 61)]
    b = ["wort " * (n * 37 % 61) for n in range(1, 61)]
    with pytest.warns(UserWarning, match="are they translations"):
        parity(bpe, a, b)
    assert parity(bpe, a, [x.replace("word", "wort") for x in a]) > 0  # no warning: pytest would show it


def test_study_refuses(tmp_path, bpe):
    with pytest.raises(DataError, match="en holds no word"):
        tokenizer_report({"bpe": bpe}, {"en": ["  ", "\n"]})
    with pytest.raises(ValueError, match="read only once"):
        tokenizer_report({"bpe": bpe}, {"en": iter(["text"])})
    with pytest.raises(ValueError, match="at least one tokenizer"):
        tokenizer_report({}, {"en": ["text"]})
    texts = ["some text to train on", "another text"]
    with pytest.raises(DataError, match="held-out text is among the training texts of en"):
        vocabulary_study({"en": texts}, {"en": texts[1:]}, [{"name": "bpe"}], [300], tmp_path)
    with pytest.raises(ConfigError, match="vocab_size=200"):
        vocabulary_study({"en": texts}, {"en": ["new"]}, [{"name": "bpe"}], [200], tmp_path)
    with pytest.raises(ConfigError, match=r"mixes\.one: names \['de'\]; known: en"):
        vocabulary_study({"en": texts}, {"en": ["x"]}, [{"name": "bpe"}], [300], tmp_path, mixes={"one": ["de"]})
    with pytest.raises(DataError, match="no text to train on"):
        vocabulary_study({"en": []}, {"en": ["x"]}, [{"name": "bpe"}], [300], tmp_path)
    with pytest.warns(UserWarning, match=r"vocab_size=5000: the corpus is enough for"):
        vocabulary_study({"en": texts}, {"en": ["x"]}, [{"name": "bpe"}], [5000], tmp_path)
    with pytest.raises(ConfigError, match="hidden=0"):
        ModelDims(hidden=0)
