"""Tokenizers that have no tokenizer.json: converted or run by transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.core.errors import DataError
from trainwright.data.tokenizers._fast import SPECIAL_KEYS, FastTokenizer
from trainwright.data.tokenizers.base import Tokenizer


def load_slow(folder: Path, overrides: Mapping[str, Any]) -> Tokenizer:
    """Load ``folder`` with transformers; a tokenizer that it can convert runs through the `tokenizers` library."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise DataError(
            f"tokenizer: {folder} has no tokenizer.json; slow files need: pip install 'trainwright[hf]' sentencepiece"
        ) from None
    try:
        loaded: Any = transformers.AutoTokenizer.from_pretrained(str(folder), **overrides)
    except Exception as error:  # every tokenizer class raises what it likes
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"tokenizer: {folder} cannot be loaded by transformers ({first})") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        return TransformersTokenizer(loaded)
    config = {key: getattr(loaded, key) for key in SPECIAL_KEYS}
    config = {k: str(v) for k, v in config.items() if v is not None}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["clean_up_tokenization_spaces"] = False
    if isinstance(loaded.chat_template, str):
        config["chat_template"] = loaded.chat_template
    return FastTokenizer(backend, config)


class TransformersTokenizer(Tokenizer):
    """A tokenizer that only exists as Python code in transformers. Slow."""

    def __init__(self, tokenizer: Any):
        if tokenizer.eos_token_id is None:
            raise DataError(
                "tokenizer: has no eos_token, which must end every document; name one with tokenizer.eos_token"
            )
        self._tokenizer = tokenizer
        self.vocab_size = max(max(tokenizer.get_vocab().values()) + 1, tokenizer.vocab_size)
        self.eos_id = tokenizer.eos_token_id
        self.bos_id = tokenizer.bos_token_id
        self.pad_id = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.chat_template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.encode(t), dtype=np.int32) for t in texts]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def token_byte_lengths(self) -> np.ndarray:
        """int32 ``[vocab_size]`` by the SentencePiece rule: the space mark is one byte, ``<0xNN>`` is one byte.

        Where every token is one character below U+0100 (ByT5) the characters are bytes.
        """
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        special = set(self._tokenizer.all_special_ids)
        tokens = {t: i for t, i in self._tokenizer.get_vocab().items() if i not in special}
        bytes_only = all(len(t) == 1 and ord(t) < 256 for t in tokens)
        for token, index in tokens.items():
            is_byte = bytes_only or (len(token) == 6 and token.startswith("<0x") and token.endswith(">"))
            lengths[index] = 1 if is_byte else len(token.replace("\u2581", " ").encode())
        return lengths

    def fingerprint(self) -> str:
        parts: list[Any] = [
            type(self._tokenizer).__name__,
            sorted(self._tokenizer.get_vocab().items(), key=lambda e: e[1]),
        ]
        parts += [self.eos_id, self.bos_id, self.pad_id, self.chat_template, str(self._tokenizer.init_kwargs)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))
