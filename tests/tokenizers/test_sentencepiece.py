"""SentencePiece side by side: the exported tokenizer gives its ids, and our byte-level Unigram keeps up with it."""

import argparse
import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.tokenizers import load_tokenizer
from trainwright.data.tokenizers.sentencepiece import as_backend, train_sentencepiece
from trainwright.data.tokenizers.unigram import train_unigram

LIBRARY = Path(inspect.getfile(argparse)).parent
EXTRA = ["<|im_start|>"]


def test_without_the_extra_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    config = registry.build("tokenizer", "sentencepiece")
    with pytest.raises(ConfigError, match=r"trainwright\[sentencepiece\]"):
        config.build(lambda: iter(["text"]), tmp_path)


@pytest.fixture(scope="module")
def texts():
    pytest.importorskip("sentencepiece")
    paths = sorted(LIBRARY.glob("*.py"))[:40]
    return [p.read_text(encoding="utf-8", errors="ignore") for p in paths]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def pair(request, texts):
    processor = train_sentencepiece([*texts[:15], "année 漢字 " * 50], 1200, request.param, special_tokens=EXTRA)
    return processor, as_backend(processor)


def ids_of(backend, text):
    return backend.encode(text, add_special_tokens=False).ids


def test_ids_are_those_of_sentencepiece(pair, texts):
    processor, backend = pair
    assert backend.get_vocab_size() == processor.get_piece_size() == 1200
    assert backend.token_to_id("<|endoftext|>") == 0 and backend.token_to_id("<|im_start|>") is not None
    for line in {line for text in texts[15:25] for line in text.splitlines()}:
        assert ids_of(backend, line) == processor.encode(line), line
    for text in ["", " ", "   two  spaces ", "漢字 é 🎉 \t", "a\nb\n\n c", *texts[15:18]]:
        assert ids_of(backend, text) == processor.encode(text), text


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\u2581\0"), max_size=40))
def test_round_trip_and_ids_of_any_text(pair, text):
    processor, backend = pair
    assert ids_of(backend, text) == processor.encode(text)
    assert backend.decode(ids_of(backend, text)) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_recipe_line_and_export(kind, texts, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = registry.build("tokenizer", {"name": "sentencepiece", "kind": kind, "vocab_size": 700})
    tokenizer = config.build(lambda: iter(texts[:8]), tmp_path / "cache")
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in [*texts[8:10], "Çağ 漢字 🎉\n\t x"]:
        ids = tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert load_tokenizer(tmp_path / "saved").encode(text) == ids
        assert theirs.decode(ids) == tokenizer.decode(ids) == text
        assert tokenizer.token_byte_lengths()[ids].sum() == len(text.encode())
    # trained anew it is the same
    assert config.build(lambda: iter(texts[:8]), tmp_path / "other").fingerprint() == tokenizer.fingerprint()


def test_our_unigram_needs_about_as_many_tokens(texts):
    """Same algorithm, other pieces (bytes, cut by a regular expression first): within a tenth on held-out text."""
    theirs = train_sentencepiece(texts[:30], 2000)
    ours = train_unigram(texts[:30], 2000, special_tokens=["<e>"])
    # White space is another matter: runs of it are pieces of ours only. Compare the words of each line.
    words = [" ".join(line.split()) for text in texts[30:] for line in text.splitlines()]
    counts = [sum(len(ids_of(ours, w)) for w in words), sum(len(theirs.encode(w)) for w in words)]
    assert counts[0] / counts[1] == pytest.approx(1, abs=0.1)


def test_bad_input(texts, tmp_path):
    with pytest.raises(DataError, match="vocab_size=265 cannot be trained"):
        train_sentencepiece(texts[:2], 265)
    with pytest.raises(ConfigError, match="kind"):
        registry.build("tokenizer", {"name": "sentencepiece", "kind": "word"})
