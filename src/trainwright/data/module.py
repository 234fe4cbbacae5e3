"""The data of a run: from the recipe's section to tokenizer, loader and validation rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from trainwright.core.batch import Batch
from trainwright.core.distributed import barrier, rank
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.hardware import cache_dir as default_cache_dir
from trainwright.core.registry import MethodConfig, Slot
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.batchers.packed import PackedConfig
from trainwright.data.dataset import TokenDataset
from trainwright.data.loader import Loader, Stream, make_batch
from trainwright.data.packing import Pool, empty_row
from trainwright.data.sources.base import SourceConfig
from trainwright.data.tokenize import TrainingCorpus, tokenize_source
from trainwright.data.tokenizers.base import Tokenizer, TokenizerConfig


class DataConfig(BaseModel):
    """What to train on."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    sources: Annotated[list[SourceConfig], Slot("source", many=True)] = Field(
        default_factory=lambda: cast(list[SourceConfig], [{"name": "python_stdlib"}]),
        description="Where documents come from.",
    )
    batcher: Annotated[BatcherConfig, Slot("batcher", default="packed")] = Field(
        cast(BatcherConfig, {"name": "packed"}), description="How documents are laid out in rows."
    )
    validation_fraction: float = Field(
        0.02, ge=0, lt=0.5, description="Share of the documents held out for validation."
    )
    cache_dir: Path | None = Field(None, description="Folder of tokenized data; null: the user's cache.")
    shuffle: bool = Field(True, description="Shuffle documents anew each epoch.")
    prefetch: NonNegativeInt = Field(2, description="Batches made ahead by a background thread; 0: none.")

    def cache(self) -> Path:
        return self.cache_dir or default_cache_dir()


def build_tokenizer(config: DataConfig, spec: MethodConfig) -> Tokenizer:
    """The tokenizer of ``spec``; one that is trained sees the training split. Rank 0 goes first."""
    corpus = TrainingCorpus(config.sources, config.validation_fraction)
    return _main_first(lambda: cast(TokenizerConfig, spec).build(corpus, config.cache()))


def _main_first(work: Callable[[], Any]) -> Any:
    """Run ``work`` on rank 0 and then, with what it left in the cache, on the others."""
    result = None
    try:
        if rank() == 0:
            result = work()
    finally:
        barrier()
    return result if rank() == 0 else work()


class DataModule:
    """Tokenized training and validation documents of a run."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        train: list[TokenDataset],
        validation: list[TokenDataset],
        seq_len: int,
        seed: int,
        rank: int,
        world_size: int,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.train, self.validation = train, validation
        self.seq_len, self.seed, self.rank, self.world_size = seq_len, seed, rank, world_size
        weights = [s.weight for s in config.sources]
        if any(w is not None for w in weights) and not all(w is not None for w in weights):
            raise ConfigError("give a weight to every source or to none", key="data.sources")
        self.weights = None if None in weights else [float(cast(float, w)) for w in weights]
        if not sum(d.num_docs for d in train):
            raise DataError(
                "the training split holds no document; give more data or a smaller data.validation_fraction"
            )

    def streams(self) -> list[Stream]:
        pools: list[TokenDataset] = [Pool(self.train)] if self.weights is None else list(self.train)
        empty = [p.name for p in pools if not p.num_docs]
        if empty:
            raise DataError(f"source {empty[0]} has no training document; take it out or give it data")
        return [
            Stream(p, self.config.batcher, self.seq_len, self.tokenizer.pad_id, self.seed, self.config.shuffle)
            for p in pools
        ]

    def train_loader(self, global_rows: int) -> Loader:
        return Loader(self.streams(), self.weights, global_rows, self.rank, self.world_size, self.config.prefetch)

    @property
    def rows_per_epoch(self) -> int:
        return sum(s.plan(0).num_rows for s in self.streams())

    @property
    def train_tokens(self) -> int:
        return sum(d.num_tokens for d in self.train)

    @property
    def validation_tokens(self) -> int:
        return sum(d.num_tokens for d in self.validation)

    def validation_batches(self, batch_rows: int, max_tokens: int | None) -> Iterator[Batch]:
        """A fixed set of packed rows of about ``max_tokens`` tokens, split over the ranks.

        Every rank gets the same number of batches (filled up with rows of weight 0).
        ``extras["target_bytes"]`` int32 ``[B, T]`` counts the bytes of each trained target.
        """
        pool = Pool(self.validation)
        if not pool.num_docs:
            return
        # A fixed shuffle: a limited number of rows should not be the first documents only.
        stream = Stream(pool, PackedConfig(), self.seq_len, self.tokenizer.pad_id, seed=0)
        rows = stream.plan(0).num_rows
        if max_tokens is not None:
            rows = min(rows, max(1, max_tokens // self.seq_len))
        lengths = torch.from_numpy(np.asarray(self.tokenizer.token_byte_lengths(), dtype=np.int32))
        per_step = batch_rows * self.world_size
        for start in range(0, rows, per_step):
            wanted = range(start + self.rank * batch_rows, start + (self.rank + 1) * batch_rows)
            arrays = [
                stream.row(0, i) if i < rows else empty_row(self.seq_len, self.tokenizer.pad_id)
                for i in wanted
                if i < rows or self.world_size > 1
            ]
            if not arrays:
                return
            batch = make_batch(arrays)
            batch.extras["target_bytes"] = lengths[batch.targets] * (batch.weights > 0)
            yield batch

    def summary(self) -> dict[str, Any]:
        """Figures for a person: documents, tokens, rows, shares of padding and of trained tokens."""
        rows = self.rows_per_epoch
        slots = rows * self.seq_len
        docs = sum(d.num_docs for d in self.train)
        return {
            "documents": docs,
            "train_tokens": self.train_tokens,
            "validation_tokens": self.validation_tokens,
            "rows_per_epoch": rows,
            "padding_share": 1 - self.train_tokens / slots,
            "trained_share": (self.train_tokens - docs) / self.train_tokens,
        }


def build_data(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    progress: Callable[..., None] | None = None,
) -> DataModule:
    """Tokenize the sources (or map what is cached) and return the run's data. Raises DataError, ConfigError."""

    def tokenize() -> list[list[TokenDataset]]:
        return [
            [
                tokenize_source(
                    source,
                    tokenizer,
                    split,  # type: ignore[arg-type]
                    validation_fraction=config.validation_fraction,
                    cache_dir=config.cache(),
                    progress=progress,
                )
                for source in config.sources
            ]
            for split in ("train", "validation")
        ]

    if not config.sources:
        raise ConfigError("is empty; name at least one source", key="data.sources")
    train, validation = _main_first(tokenize)
    return DataModule(config, tokenizer, train, validation, seq_len, seed, rank, world_size)
