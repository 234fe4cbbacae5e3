"""A byte-level BPE trained on the run's own training split with the `tokenizers` library.

Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", arXiv:1508.07909, on bytes as in GPT-2.
Text is first cut by a regular expression, Qwen2's (GPT-4's with single digits): transformers 5 puts that in place of
the folder's own for every model of type qwen2, so another would give an exported model other ids there. Merges never
cross a cut. Every text can be encoded, and decoding is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainwright.core.registry import register
from trainwright.data.tokenizers._trained import PATTERN, ByteLevelConfig, byte_level


def train_bpe(texts: Iterable[str], vocab_size: int, pattern: str = PATTERN, special_tokens: Iterable[str] = ()) -> Any:
    """A trained ``tokenizers.Tokenizer`` of at most ``vocab_size`` ids; the special tokens come first.

    The result depends on the texts alone, not on threads or hash seeds.
    """
    from tokenizers import models, pre_tokenizers, trainers

    backend = byte_level(models.BPE(), pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return backend


@register("tokenizer", "bpe", paper="arXiv:1508.07909")
class BpeConfig(ByteLevelConfig):
    """A byte-level BPE trained on the training split, kept and re-used while data and settings stay the same."""

    def train(self, texts: list[str]) -> Any:
        return train_bpe(texts, self.vocab_size, self.pattern, self._special())
