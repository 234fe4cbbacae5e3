"""What the tokenizers that are trained on the run's own text have in common: settings, sample, cache."""

from __future__ import annotations

import hashlib
import heapq
import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from trainwright.core.errors import DataError
from trainwright.data.cache import DamagedCache, build_once
from trainwright.data.tokenizers._fast import FastTokenizer, hf_config
from trainwright.data.tokenizers.base import TokenizerConfig

EOS, BOS, PAD = "<|endoftext|>", "<|bos|>", "<|pad|>"
# Qwen2's, see bpe.py for why.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The sample is drawn from this many times its own size, so that a huge corpus is not read to its end.
SCAN = 32


def sample_texts(texts: Iterable[str], sample_bytes: int) -> list[str]:
    """About ``sample_bytes`` of whole texts, drawn evenly from the first ``32 * sample_bytes`` of ``texts``.

    The draw depends on the texts and their order alone. Memory: ``sample_bytes`` and one text.
    """
    # Bottom-k sampling: keep the texts with the lowest hashes; the heap's top is the highest kept.
    kept: list[tuple[int, int, str, int]] = []
    size = scanned = 0
    for index, text in enumerate(texts):
        data = text.encode()
        if len(data) > sample_bytes:
            text = data[:sample_bytes].decode(errors="ignore")
            data = text.encode()
        key = int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=index.to_bytes(8, "little")).digest(), "big")
        heapq.heappush(kept, (-key, -index, text, len(data)))
        size += len(data)
        scanned += len(data)
        while size > sample_bytes and len(kept) > 1:
            size -= heapq.heappop(kept)[3]
        if scanned >= SCAN * sample_bytes:
            break
    return [text for _, _, text, _ in sorted(kept, key=lambda entry: -entry[1])]


def byte_level(model: Any, pattern: str) -> Any:
    """A ``tokenizers.Tokenizer`` of ``model`` over the bytes of what ``pattern`` cuts; decoding is exact."""
    import tokenizers
    from tokenizers import Regex, decoders, pre_tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


class TrainedTokenizerConfig(TokenizerConfig):
    """Base of configs of tokenizers that are trained on the training split."""

    vocab_size: int = Field(4096, ge=260, description="Number of ids, special ones and the 256 bytes included.")
    sample_bytes: PositiveInt = Field(
        32 << 20, description="Train on an even sample of this many bytes; more hardly changes the result."
    )
    special_tokens: list[str] = Field(
        [], description="Further special tokens, for example the marks of a chat template."
    )
    chat_template: str | None = Field(None, description="Jinja template that turns messages into text.")

    @model_validator(mode="after")
    def _fits(self) -> TrainedTokenizerConfig:
        names = self._special()
        if len(set(names)) != len(names) or not all(names):
            raise ValueError(f"special_tokens should be distinct, not empty, and none of {EOS} {BOS} {PAD}")
        if self.vocab_size < 256 + len(names):
            raise ValueError(
                f"vocab_size={self.vocab_size} does not hold 256 bytes and {len(names)} special tokens; "
                f"set at least {256 + len(names)}"
            )
        return self

    def _special(self) -> list[str]:
        return [EOS, BOS, PAD, *self.special_tokens]

    @abstractmethod
    def train(self, texts: list[str]) -> Any:
        """A ``tokenizers.Tokenizer`` trained on ``texts``, with :meth:`_special` as its first ids."""

    def _cache_key(self) -> list[Any]:
        """What the trained tokenizer depends on, besides the corpus."""
        return [1, self.model_dump(mode="json")]

    def build(self, corpus: Callable[[], Iterable[str]], cache_dir: Path) -> FastTokenizer:
        """Train it, or load it from ``cache_dir``.

        A corpus with an attribute ``fingerprint`` (a string) is known by that; another is read to know it.
        Raises DataError for a corpus without text. Warns where the corpus is too small for ``vocab_size``.
        """
        known = getattr(corpus, "fingerprint", None)
        sample: list[str] = []
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps(self._cache_key(), sort_keys=True).encode())
        if isinstance(known, str):
            digest.update(known.encode())
        else:
            sample = sample_texts(corpus(), self.sample_bytes)
            for text in sample:
                digest.update(hashlib.blake2b(text.encode()).digest())

        def build(folder: Path) -> None:
            texts = sample or sample_texts(corpus(), self.sample_bytes)
            if not any(texts):
                raise DataError(f"tokenizer {self.name}: the training split holds no text to train on")
            FastTokenizer(self.train(texts), hf_config(EOS, BOS, PAD, self.chat_template)).save(folder)
            data = (folder / "tokenizer.json").read_bytes()
            (folder / "checksum").write_text(hashlib.blake2b(data).hexdigest())

        def load(folder: Path) -> FastTokenizer:
            import tokenizers

            try:
                data = (folder / "tokenizer.json").read_bytes()
                whole = (folder / "checksum").read_text() == hashlib.blake2b(data).hexdigest()
            except FileNotFoundError as error:
                raise DamagedCache(f"{error.filename} is missing") from error
            if not whole:
                raise DamagedCache("tokenizer.json has changed")
            backend = tokenizers.Tokenizer.from_str(data.decode())
            return FastTokenizer(backend, hf_config(EOS, BOS, PAD, self.chat_template))

        tokenizer = build_once(Path(cache_dir) / f"tokenizer-{self.name}-{digest.hexdigest()}", build, load)
        if tokenizer.vocab_size < self.vocab_size:
            warnings.warn(
                f"tokenizer.vocab_size={self.vocab_size}: the corpus is enough for {tokenizer.vocab_size} ids only",
                stacklevel=2,
            )
        return tokenizer


class ByteLevelConfig(TrainedTokenizerConfig):
    """Base of those that work on the bytes of what a regular expression cuts."""

    pattern: str = Field(PATTERN, min_length=1, description="Regular expression that cuts text first.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        import tokenizers

        try:
            tokenizers.Regex(pattern)
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"is not a regular expression ({error})") from None
        return pattern
