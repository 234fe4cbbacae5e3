"""What every tokenizer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from trainwright.core.registry import MethodConfig


class Tokenizer(ABC):
    """Text to ids and back. ``vocab_size`` counts all ids, special ones included."""

    vocab_size: int
    bos_id: int | None = None
    eos_id: int  # ends every document
    pad_id: int  # may equal eos_id; padding has weight 0 whatever its id
    chat_template: str | None = None  # Jinja, as in tokenizer_config.json

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, no special tokens added; special tokens written in the text are not recognised."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As :meth:`encode`, each an int32 array; the fast path."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    @abstractmethod
    def token_byte_lengths(self) -> np.ndarray:
        """int32 ``[vocab_size]``: UTF-8 bytes that each id stands for; 0 for special tokens. Gives bits per byte."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of everything that changes its output."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write it as a Hugging Face tokenizer folder (tokenizer.json, tokenizer_config.json, ...)."""


class TokenizerConfig(MethodConfig):
    """Base of tokenizer configs."""

    @abstractmethod
    def build(self, corpus: Callable[[], Iterable[str]], cache_dir: Path) -> Tokenizer:
        """Load or train it. ``corpus()`` streams the training split's documents, for those that are trained on it;
        a trained tokenizer is cached in ``cache_dir`` under a hash of corpus and settings."""
