"""Prompt and target tokenized as one text, with the boundary found by where the tokens lie in it.

    ids = encode(prompt + target)          weight 0 for every token that begins in the prompt, 1 for all others

The ids are those of the whole text, so a pair is what pretraining on the same text would have seen. Counting the tokens
of the prompt alone, as is often done, is off by one where prompt and target merge at the joint. A token that does reach
over it counts as prompt, and is reported: the model is never trained on what it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainwright.core.errors import DataError
from trainwright.data.chat.conversation import Example, TextPair
from trainwright.data.chat.masks import Encoded, Masker, _encoded
from trainwright.data.tokenizers.base import Tokenizer

IGNORE = -100  # label of what is not trained on, as transformers has it


class Joint(NamedTuple):
    ids: list[int]
    prompt_tokens: int  # of the ids, those that begin in the prompt
    crossing: bool  # the last of these ends in the target


def encode_joint(tokenizer: Tokenizer, prompt: str, target: str) -> Joint:
    """Ids of ``prompt + target`` and how many of them begin in the prompt; no special tokens are added.

    Where the bytes of all tokens add up to those of the text the boundary is counted in bytes, which is exact also for
    characters that lie over several tokens; else (a tokenizer that normalises, or drops spaces) it is found by the
    character offsets of the `tokenizers` library. Raises DataError for a tokenizer that has neither, as some that only
    exist as Python code.
    """
    text = prompt + target
    ids = list(tokenizer.encode(text))
    lengths = _byte_lengths(tokenizer)
    backend = getattr(tokenizer, "backend", None)
    if not ids:
        return Joint(ids, 0, False)
    if max(ids) < len(lengths) and bool((lengths[ids] > 0).all()):
        ends = np.cumsum(lengths[ids], dtype=np.int64)
        spare = int(ends[-1]) - len(text.encode())
        # Some put a space before every text.
        added = spare == 1 and text[:1] != " " and backend is not None and _marked(backend.id_to_token(ids[0]))
        if spare == 0 or added:
            bound = len(prompt.encode())
            inside = int(np.searchsorted(ends - lengths[ids] - (1 if added else 0), bound))
            return Joint(ids, inside, inside > 0 and int(ends[inside - 1]) - int(added) > bound)
    if backend is None:
        raise DataError(
            "the tokenizer does not say where its tokens lie in a text, so prompt and target cannot be told apart; use "
            "one with a tokenizer.json"
        )
    found = backend.encode(text, add_special_tokens=False)
    return Joint(ids, *_by_offsets(found.offsets, found.tokens, len(prompt), text))


def _marked(token: str | None) -> bool:
    """Whether the token begins with the mark of a space, GPT-2's or SentencePiece's."""
    return bool(token) and token[0] in "\u0120\u2581"  # type: ignore[index]


def _by_offsets(offsets: list[tuple[int, int]], tokens: list[str], bound: int, text: str) -> tuple[int, bool]:
    """Tokens that begin before ``bound``, and whether the last of them ends behind it."""
    inside, crossing = 0, False
    for n, ((start, end), token) in enumerate(zip(offsets, tokens, strict=True)):
        if _marked(token) and start > 0 and text[start - 1] == " " and text[start : start + 1] != " ":
            start -= 1  # offsets may leave out the space that a token begins with
        if end <= bound or start < bound:
            inside, crossing = n + 1, end > bound
    return inside, crossing


_lengths: dict[int, tuple[Tokenizer, np.ndarray]] = {}


def _byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Kept for the last tokenizer asked for: it takes a pass over the vocabulary."""
    found = _lengths.get(id(tokenizer))
    if found is None or found[0] is not tokenizer:
        _lengths.clear()
        found = _lengths[id(tokenizer)] = tokenizer, tokenizer.token_byte_lengths()
    return found[1]


def labels_of(encoded: Encoded) -> np.ndarray:
    """int64 ``[n]``: the ids, with -100 where the weight is 0."""
    return np.where(encoded.weights > 0, encoded.ids, IGNORE).astype(np.int64)


class JointMasker(Masker):
    """Text pairs to ids and weights, jointly; EOS behind the target is trained on. An empty prompt trains on all."""

    def __call__(self, example: Example) -> Encoded:
        if not isinstance(example, TextPair):
            raise DataError("is not a prompt and its target as plain text")
        bos = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        ids, inside, crossing = encode_joint(self.tokenizer, example.prompt, example.completion)
        weights = [0.0] * (len(bos) + inside) + [1.0] * (len(ids) - inside + 1)
        out = _encoded([*bos, *ids, self.tokenizer.eos_id], weights)
        out.crossing = crossing
        return out
