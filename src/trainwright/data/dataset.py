"""Tokenized documents with random access: what tokenizing makes and packing reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from trainwright.data.tokenizers.base import Tokenizer


class Columns(Protocol):
    """Further values of every token of a dataset, such as a teacher's labels; can be pickled."""

    @property
    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        """Per name the shape of one token's values and their dtype."""

    def read(self, doc: int, start: int, stop: int) -> Mapping[str, np.ndarray]:
        """The values of tokens ``start:stop`` of a document, ``[stop - start, *shape]`` each."""


class TokenDataset(ABC):
    """Documents of one source and split, as token ids.

    Every document ends with the tokenizer's EOS; a conversation with what its template ends it with.
    """

    name: str
    lengths: np.ndarray  # int32 [num_docs], tokens per document, EOS included
    fingerprint: str  # hash of the content: same fingerprint, same tokens in the same order
    columns: Columns | None = None  # what batches carry as extras ``[B, T, ...]`` beside the tokens

    def attach(self, columns: Columns | None) -> None:
        """Let batches carry these values too; None: no more. Where batches are made by worker processes, before those
        start."""
        self.columns = columns

    def columns_of(self, doc: int) -> tuple[Columns | None, int]:
        """The columns that hold ``doc``, and its number there."""
        return self.columns, doc

    def column_shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        return {} if self.columns is None else self.columns.shapes

    @property
    def num_docs(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @abstractmethod
    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ids ``[start:stop]`` of document ``doc``, an integer array (a view where possible)."""

    def loss_weights(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        """float32 weight of each of these tokens *as a target*; None means 1 for all."""
        return None


class ArrayDataset(TokenDataset):
    """Documents held in memory."""

    def __init__(
        self,
        docs: Sequence[Sequence[int] | np.ndarray],
        weights: Sequence[Sequence[float] | np.ndarray] | None = None,
        name: str = "array",
    ):
        import xxhash

        self.name = name
        self._docs = [np.asarray(d, dtype=np.int32) for d in docs]
        self._weights = None if weights is None else [np.asarray(w, dtype=np.float32) for w in weights]
        self.lengths = np.array([len(d) for d in self._docs], dtype=np.int32)
        digest = xxhash.xxh3_128()
        for arrays in (self._docs, self._weights or []):
            for a in arrays:
                digest.update(len(a).to_bytes(8, "little") + np.ascontiguousarray(a).tobytes())
        self.fingerprint = digest.hexdigest()

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._docs[doc][start:stop]

    def loss_weights(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        return None if self._weights is None else self._weights[doc][start:stop]


@runtime_checkable
class TokenizedSource(Protocol):
    """A source that makes its tokens, and loss weights, itself; others give texts, which are encoded for them."""

    whole_documents: ClassVar[bool]  # rows that cut its documents would harm them

    def tokenized(
        self,
        tokenizer: Tokenizer,
        split: Literal["train", "validation"],
        *,
        seq_len: int,
        validation_fraction: float,
        cache_dir: Path,
        progress: Callable[[int], None] | None = None,
        num_proc: int = 1,
    ) -> TokenDataset: ...
