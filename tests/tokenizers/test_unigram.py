"""Unigram: its cuts against brute force, exactness, and that the result does not depend on the process."""

import argparse
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizers
from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.tokenizers import load_tokenizer
from trainwright.data.tokenizers._fast import byte_alphabet
from trainwright.data.tokenizers._trained import BOS, EOS, PAD
from trainwright.data.tokenizers.unigram import train_unigram

LIBRARY = Path(inspect.getfile(argparse)).parent
SPECIAL = [EOS, BOS, PAD]


@pytest.fixture(scope="module")
def texts():
    return [(LIBRARY / n).read_text(encoding="utf-8") for n in ("argparse.py", "typing.py", "pathlib.py", "ast.py")]


@pytest.fixture(scope="module")
def unigram(texts, tmp_path_factory):
    config = registry.build("tokenizer", {"name": "unigram", "vocab_size": 1000})
    return config.build(lambda: iter(texts), tmp_path_factory.mktemp("cache"))


def vocabulary(backend):
    return json.loads(backend.to_str())["model"]["vocab"]


def test_all_bytes_and_special_tokens_are_there(unigram):
    pieces = [piece for piece, _ in vocabulary(unigram.backend)]
    assert len(pieces) == len(set(pieces)) == 997 and unigram.vocab_size == 1000
    assert [unigram.backend.id_to_token(i) for i in (997, 998, 999)] == SPECIAL and unigram.eos_id == 997
    assert set(byte_alphabet().values()) <= set(pieces)
    scores = [score for _, score in vocabulary(unigram.backend)]
    assert scores == sorted(scores, reverse=True) and scores[0] < 0


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_round_trip_is_exact(unigram, text):
    assert unigram.decode(unigram.encode(text)) == text
    assert unigram.token_byte_lengths()[unigram.encode(text)].sum() == len(text.encode())


def test_cuts_are_the_likeliest(unigram, texts):
    """Viterbi against the best of all 2^(n-1) ways to cut a word."""
    scores = dict(vocabulary(unigram.backend))
    words = sorted(set(re.findall(r"[a-z]{2,11}", texts[0])))[:150]
    for word in words:
        best = -1e9
        for bits in itertools.product((False, True), repeat=len(word) - 1):
            cuts = [0, *(i + 1 for i, b in enumerate(bits) if b), len(word)]
            pieces = [word[a:b] for a, b in itertools.pairwise(cuts)]
            if all(p in scores for p in pieces):
                best = max(best, sum(scores[p] for p in pieces))
        got = unigram.backend.encode(word, add_special_tokens=False).tokens
        assert sum(scores[p] for p in got) == pytest.approx(best, abs=1e-9), (word, got)


def test_text_that_spells_a_special_token_is_text_whatever_the_pattern(texts, tmp_path):
    config = registry.build("tokenizer", {"name": "unigram", "vocab_size": 500, "pattern": r"\S+|\s+"})
    tokenizer = config.build(lambda: iter(texts[:1]), tmp_path)
    ids = tokenizer.encode(f"a {EOS} b")
    assert not {tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id} & set(ids)
    assert tokenizer.decode(ids) == f"a {EOS} b"


def test_longer_pieces_than_allowed_are_not_made(texts):
    backend = train_unigram(texts[:1], 500, max_piece_length=3)
    assert max(len(piece) for piece, _ in vocabulary(backend)) == 3


def test_result_does_not_depend_on_the_process(tmp_path):
    script = (
        "import argparse, inspect, sys\nfrom trainwright.data.tokenizers.unigram import train_unigram\n"
        "text = inspect.getsource(argparse)\n"
        "print(train_unigram([text[i:i + 300] for i in range(0, 60000, 300)], 600).to_str())"
    )
    outs = set()
    for seed in range(3):
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(1 + seed)}
        env["TOKENIZERS_PARALLELISM"] = str(seed > 0).lower()
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
        outs.add(done.stdout)
    assert len(outs) == 1 and len(json.loads(outs.pop())["model"]["vocab"]) == 600


def test_transformers_and_tokenizers_load_the_export(unigram, texts, tmp_path):
    transformers = pytest.importorskip("transformers")
    unigram.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    for text in [*texts, "Çağ 漢字 🎉\n\t x", "a" * 400 + "\x00"]:
        ids = unigram.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert library.encode(text, add_special_tokens=False).ids == ids
        assert load_tokenizer(tmp_path / "saved").encode(text) == ids
        assert theirs.decode(ids) == text


def test_a_folder_of_a_qwen2_model_gets_a_warning(unigram, texts, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.warns(UserWarning, match="this is a Unigram: AutoTokenizer will give other ids"):
        unigram.save(tmp_path)
    ids = unigram.encode(texts[0])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(texts[0]).input_ids != ids
    assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)(texts[0]).input_ids == ids


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=258 does not hold 256 bytes and 3 special tokens"):
        train_unigram(["text"], 258, special_tokens=SPECIAL)
    with pytest.raises(ConfigError, match="vocab_size=258"):
        registry.build("tokenizer", {"name": "unigram", "vocab_size": 258})
    for texts in ([], [""]):
        with pytest.raises(DataError, match="tokenizer unigram: the training split holds no text"):
            registry.build("tokenizer", {"name": "unigram"}).build(lambda own=texts: iter(own), tmp_path)
    config = registry.build("tokenizer", {"name": "unigram", "vocab_size": 5000})
    with pytest.warns(UserWarning, match=r"vocab_size=5000: the corpus is enough for \d+ ids only"):
        config.build(lambda: iter(["a short text, too short for so many pieces " * 3]), tmp_path)
