"""A byte-level Unigram tokenizer trained on the run's own training split with the `tokenizers` library.

Every piece x of the vocabulary has a log-probability s(x); a text is cut so that the sum of s is largest (Viterbi).
Training starts from many frequent substrings, fits s by expectation-maximisation, and drops the pieces whose loss costs
the least likelihood until ``vocab_size`` are left.

Kudo, "Subword Regularization: Improving Neural Network Translation Models with Multiple Subword Candidates",
arXiv:1804.10959. We differ from SentencePiece's form of it in that pieces are strings of bytes, not of characters:
all 256 bytes are in the vocabulary, so every text can be encoded and decoding is exact, without an unknown token,
fallback or normalisation. Text is first cut by the same regular expression as for ``bpe``.

The folder it saves has a tokenizer.json of type Unigram. A folder whose config.json says model type ``qwen2`` is
rebuilt as a BPE by transformers 5, so a model of that type needs another tokenizer to be exported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import Field, PositiveInt

from trainwright.core.registry import register
from trainwright.data.tokenizers._trained import PATTERN, ByteLevelConfig, byte_level

# Scores are sums over threads in any order; so many decimals are the same whatever the order was.
DECIMALS = 6
BYTE_STEP = 1e-4  # of the library


def train_unigram(
    texts: Iterable[str],
    vocab_size: int,
    pattern: str = PATTERN,
    special_tokens: Iterable[str] = (),
    max_piece_length: int = 16,
    shrinking_factor: float = 0.75,
    sub_iterations: int = 2,
) -> Any:
    """A trained ``tokenizers.Tokenizer`` of at most ``vocab_size`` ids; the special tokens come last.

    They are no pieces of the model, or text that spells one would be cut as that token. ``max_piece_length`` is in
    bytes. Each round keeps the share ``shrinking_factor`` of the pieces, after ``sub_iterations`` of
    expectation-maximisation. Raises ValueError where ``vocab_size`` does not hold the special tokens and the 256 bytes.
    """
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    special = list(special_tokens)
    if vocab_size < 256 + len(special):
        raise ValueError(f"vocab_size={vocab_size} does not hold 256 bytes and {len(special)} special tokens")
    backend = byte_level(models.Unigram(), pattern)
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        shrinking_factor=shrinking_factor,
        max_piece_length=max_piece_length,
        n_sub_iterations=sub_iterations,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    backend = tokenizers.Tokenizer.from_str(json.dumps(_settled(json.loads(backend.to_str()))))
    backend.add_special_tokens(special)
    return backend


def _settled(spec: dict[str, Any]) -> dict[str, Any]:
    """``spec`` of tokenizer.json without what depends on threads and hash order.

    The library gives bytes that the text lacks rising scores from the lowest on, in any order; they get the lowest.
    """
    pieces = [(piece, round(score, DECIMALS)) for piece, score in spec["model"]["vocab"]]
    lowest = min(score for _, score in pieces)
    settled = [[p, lowest if len(p) == 1 and s <= lowest + 256 * BYTE_STEP else s] for p, s in pieces]
    settled.sort(key=lambda entry: (-entry[1], entry[0]))
    return {**spec, "model": {**spec["model"], "vocab": settled}}


@register("tokenizer", "unigram", paper="arXiv:1804.10959", seed_id="B022")
class UnigramConfig(ByteLevelConfig):
    """A byte-level Unigram tokenizer trained on the training split: the likeliest cut instead of merges."""

    max_piece_length: PositiveInt = Field(16, ge=2, description="Longest piece, in bytes.")
    shrinking_factor: float = Field(0.75, gt=0, lt=1, description="Share of the pieces that each round keeps.")
    sub_iterations: PositiveInt = Field(2, description="Rounds of expectation-maximisation before pieces are dropped.")

    def train(self, texts: list[str]) -> Any:
        return train_unigram(
            texts,
            self.vocab_size,
            self.pattern,
            self._special(),
            self.max_piece_length,
            self.shrinking_factor,
            self.sub_iterations,
        )
