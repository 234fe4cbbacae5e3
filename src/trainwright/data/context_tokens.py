"""The two special tokens around a document's metadata, found in a tokenizer or added to it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.tokenizers._fast import FastTokenizer
from trainwright.data.tokenizers.base import Tokenizer
from trainwright.data.tokenizers.bytes import ByteTokenizer

BOC, EOC = "<boc>", "<eoc>"
# A saved tokenizer is written anew from its backend, so that these would no longer tell the truth.
_STALE = ("tokenizer.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class ContextTokens:
    """Ids of the marks before and behind a context."""

    boc: int
    eoc: int


def context_tokens(tokenizer: Tokenizer, names: Sequence[str] = (BOC, EOC)) -> ContextTokens:
    """The ids of the marks. Raises ConfigError where the vocabulary lacks one, or text could produce it."""
    known = _special(tokenizer)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"the tokenizer has no special token {name!r}; a recipe with data.metadata adds it, and gives a new "
                "model an embedding for it; for a pretrained one name two that it has, such as reserved ones",
                key="data.metadata.tokens",
            )
    return ContextTokens(*(known[n] for n in names))


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    inner: Any = tokenizer._as_fast() if isinstance(tokenizer, ByteTokenizer) else tokenizer
    backend = getattr(inner, "backend", None)
    if backend is None:
        return {}
    return {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}


def with_context_tokens(tokenizer: Tokenizer, names: Sequence[str] = (BOC, EOC)) -> Tokenizer:
    """``tokenizer`` itself where it has the marks, else a copy with them behind its last id.

    Text that spells a mark stays text. Raises ConfigError where a name is an ordinary token of the vocabulary, which
    text produces, and for tokenizers that only exist as Python code of transformers.
    """
    inner: Any = tokenizer._as_fast() if isinstance(tokenizer, ByteTokenizer) else tokenizer
    if not isinstance(inner, FastTokenizer):
        raise ConfigError(
            "needs a tokenizer with a tokenizer.json, and this is one of transformers' slow ones; use another",
            key="data.metadata",
        )
    known = _special(inner)
    vocab = inner.backend.get_vocab(with_added_tokens=True)
    for name in names:
        if name in vocab and name not in known:
            raise ConfigError(
                f"{name!r} is an ordinary token of the vocabulary, so text produces it; choose another name",
                key="data.metadata.tokens",
            )
    missing = [n for n in names if n not in known]
    if not missing:
        return tokenizer
    copy: FastTokenizer = pickle.loads(pickle.dumps(inner))
    # Behind vocab_size, also where the ids below have gaps: the library would number by the count of tokens.
    copy.backend.add_special_tokens(missing)
    ids = {n: copy.backend.token_to_id(n) for n in missing}
    if min(ids.values()) < inner.vocab_size and set(ids.values()) & set(vocab.values()):
        raise ConfigError(
            f"the tokenizer's ids have gaps, and new tokens would get {ids}, which are taken; name two special tokens "
            "that it has",
            key="data.metadata.tokens",
        )
    files = {k: v for k, v in inner._files.items() if k not in _STALE}
    return FastTokenizer(copy.backend, json.loads(json.dumps(inner._config)), files)
