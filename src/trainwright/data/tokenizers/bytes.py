"""Bytes as tokens: no training, no unknown text, a vocabulary of 259."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from trainwright.core.registry import register
from trainwright.data.tokenizers._fast import FastTokenizer, byte_alphabet, hf_config
from trainwright.data.tokenizers.base import Tokenizer, TokenizerConfig

EOS, BOS, PAD = "<eos>", "<bos>", "<pad>"


def byte_spec() -> dict[str, Any]:
    """The tokenizer as the content of tokenizer.json: a byte-level BPE without merges, id = byte."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.BPE(vocab={c: b for b, c in byte_alphabet().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, BOS, PAD])
    return json.loads(backend.to_str())


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, then ``<eos>`` 256, ``<bos>`` 257, ``<pad>`` 258. Decoding is exact."""

    vocab_size = 259
    eos_id, bos_id, pad_id = 256, 257, 258

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode(), dtype=np.uint8).astype(np.int32) for t in texts]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 (a text cut within a character) become U+FFFD."""
        names = {256: EOS.encode(), 257: BOS.encode(), 258: PAD.encode()}
        parts = (bytes([i]) if i < 256 else b"" if skip_special else names.get(int(i), b"") for i in ids)
        return b"".join(parts).decode(errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        lengths = np.ones(self.vocab_size, dtype=np.int32)
        lengths[256:] = 0
        return lengths

    def fingerprint(self) -> str:
        return FastTokenizer.fingerprint(self._as_fast())

    def _as_fast(self) -> FastTokenizer:
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(json.dumps(byte_spec()))
        return FastTokenizer(backend, hf_config(EOS, BOS, PAD, self.chat_template))

    def save(self, folder: Path) -> None:
        self._as_fast().save(folder)


@register("tokenizer", "bytes")
class BytesConfig(TokenizerConfig):
    """UTF-8 bytes as tokens: ids 0..255 and <eos> 256, <bos> 257, <pad> 258."""

    chat_template: str | None = Field(None, description="Jinja template that turns messages into text.")

    def build(self, corpus: Callable[[], Iterable[str]], cache_dir: Path) -> ByteTokenizer:
        return ByteTokenizer(self.chat_template)
