"""The data of a run: from the recipe's section to tokenizer, loader and validation rows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trainwright.core.batch import Batch
from trainwright.core.distributed import broadcast_object, rank, world_size
from trainwright.core.errors import ConfigError, DataError, TrainwrightError, nearest
from trainwright.core.hardware import cache_dir as default_cache_dir
from trainwright.core.registry import MethodConfig, Slot, build
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.context_tokens import with_context_tokens
from trainwright.data.dataset import TokenDataset, TokenizedSource
from trainwright.data.licence_gate import data_card
from trainwright.data.loader import Loader, OnChange
from trainwright.data.metadata import MetadataConfig, check_batcher, tokenize_with_context
from trainwright.data.mixers.base import MixerConfig, UpdatingMixerConfig
from trainwright.data.packing import Pool, unique_names
from trainwright.data.rows import RowStream
from trainwright.data.selectors.base import SelectorConfig
from trainwright.data.sources.base import SourceConfig, Split
from trainwright.data.stages import FirstStageConfig, first_stage, rows_of_stages, stage_plan
from trainwright.data.tokenize import TrainingCorpus, tokenize_source
from trainwright.data.tokenizers.base import Tokenizer, TokenizerConfig
from trainwright.data.trained_tokens import trained_tokens
from trainwright.data.upsample import up_sampled
from trainwright.data.validation import validation_batches
from trainwright.data.watch import Watch
from trainwright.data.weighters.base import WeighterConfig

T = TypeVar("T")
log = logging.getLogger("trainwright")


class DataConfig(BaseModel):
    """What to train on."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    sources: Annotated[list[SourceConfig], Slot("source", many=True)] = Field(
        default_factory=lambda: cast(list[SourceConfig], [{"name": "python_stdlib"}]),
        description="Where documents come from.",
    )
    batcher: Annotated[BatcherConfig, Slot("batcher", default="packed")] = Field(
        cast(BatcherConfig, {"name": "packed"}),
        description="How documents are laid out in rows; where a source is of conversations best_fit, unless set.",
    )
    mixer: Annotated[MixerConfig, Slot("mixer", default="static")] = Field(
        cast(MixerConfig, {"name": "static"}), description="Shares of the sources in the course of the run."
    )
    selector: Annotated[SelectorConfig, Slot("selector", default="none")] = Field(
        cast(SelectorConfig, {"name": "none"}), description="Which rows are trained on."
    )
    weighter: Annotated[WeighterConfig, Slot("weighter", default="uniform")] = Field(
        cast(WeighterConfig, {"name": "uniform"}), description="How much each row of a step counts."
    )
    validation_fraction: float = Field(
        0.02, ge=0, lt=0.5, description="Share of the documents held out for validation; 0: no validation."
    )
    cache_dir: Path | None = Field(None, description="Folder of tokenized data; null: the user's cache.")
    shuffle: bool = Field(True, description="Shuffle documents and rows anew each epoch.")
    prefetch: NonNegativeInt = Field(2, description="Steps made ahead in the background; 0: made when asked for.")
    workers: NonNegativeInt = Field(
        0, description="Processes that assemble rows, for data that is slow to read; 0: a thread of the trainer's."
    )
    num_proc: PositiveInt = Field(1, description="Processes that tokenize.")
    on_change: OnChange = Field(
        "refuse",
        description="Resuming when the data or the order of its rows changed: refuse, or new_epoch to begin one in it.",
    )

    licences: list[str] | None = Field(
        None,
        description="Licences that documents may be under, such as [CC0, CC-BY, MIT]; a run whose data holds another, "
        "or data that names none, is refused. null: any.",
    )

    metadata: MetadataConfig | None = Field(
        None, description="Metadata of each document (its URL, ...) as a context before it; null: none."
    )
    first_stage: FirstStageConfig | None = Field(
        None, description="Train on the documents of the highest scores first; null: on all from the beginning."
    )

    @field_validator("sources")
    @classmethod
    def _some(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        if not sources:
            raise ValueError("is empty; name at least one source, or leave it out for python_stdlib")
        return sources

    @model_validator(mode="after")
    def _whole_documents(self) -> DataConfig:
        """Unless the recipe names a batcher: one that cuts no document, where a source asks for that."""
        if "batcher" not in self.model_fields_set and _whole(self):
            self.__dict__["batcher"] = build("batcher", "best_fit")
        return self

    @model_validator(mode="after")
    def _all_or_no_weights(self) -> DataConfig:
        weights = [s.weight for s in self.sources]
        if None in weights and any(w is not None for w in weights):
            missing = weights.index(None)
            raise ValueError(f"sources.{missing} has no weight but others have; give one to every source or to none")
        return self

    @model_validator(mode="after")
    def _one_chooses(self) -> DataConfig:
        if self.mixer.changes and self.selector.selects:
            raise ValueError(
                f"mixer={self.mixer.name} and selector={self.selector.name} both decide which rows come next; keep one"
            )
        return self

    @model_validator(mode="after")
    def _one_plan(self) -> DataConfig:
        staged = "first_stage" if self.first_stage else "metadata.cooldown" if self._cools_down else None
        method = self.mixer if self.mixer.changes else self.selector if self.selector.selects else None
        if staged and method is not None:
            raise ValueError(f"{staged} and {method.name} both decide which rows come next; keep one")
        return self

    @property
    def _cools_down(self) -> bool:
        return self.metadata is not None and self.metadata.on and self.metadata.cooldown > 0

    def cache(self) -> Path:
        return self.cache_dir or default_cache_dir()


def build_tokenizer(config: DataConfig, spec: MethodConfig, watch: Watch | None = None) -> Tokenizer:
    """The tokenizer of ``spec``; one that is trained sees the training split. Rank 0 goes first."""
    corpus = TrainingCorpus(config.sources, config.validation_fraction, watch)
    tokenizer = _main_first(lambda: cast(TokenizerConfig, spec).build(corpus, config.cache()))
    if config.metadata is not None and config.metadata.on:
        return with_context_tokens(tokenizer, config.metadata.tokens)
    return tokenizer


def build_card(config: DataConfig) -> dict[str, Any]:
    """What the sources are made of. Raises ConfigError where ``data.licences`` forbids it. Rank 0 goes first."""
    return _main_first(lambda: data_card(config.sources, config.licences, config.cache()))


def _main_first(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and then, with what it left in the cache, on the others. If rank 0 fails, all do."""
    if world_size() == 1:
        return work()
    result: T | None = None
    failed: BaseException | None = None
    if rank() == 0:
        try:
            result = work()
        except BaseException as error:  # told to the other ranks, which would else wait, and raised again below
            failed = error
        told = failed if failed is None or isinstance(failed, TrainwrightError) else RuntimeError(f"rank 0: {failed!r}")
        broadcast_object(told)
        if failed is not None:
            raise failed
        return cast(T, result)
    told = broadcast_object(None)
    if told is not None:
        raise told
    return work()


class DataModule:
    """Tokenized training and validation documents of a run, and what is made of them.

    ``train`` and ``validation`` map source names to their documents. Without weights all training documents form one
    pool, each seen once an epoch; with them rows are drawn per source in those shares.
    Raises DataError when there is nothing to train on, ConfigError for settings that do not fit.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        train: list[TokenDataset],
        validation: list[TokenDataset],
        *,
        seq_len: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        global_batch_rows: int | None = None,
        cooldown: list[TokenDataset] | None = None,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.total_steps: int | None = None
        self.train, self.validation = unique_names(train), unique_names(validation)
        self.seq_len, self.seed, self.rank, self.world_size = seq_len, seed, rank, world_size
        if not sum(d.num_tokens for d in train):
            raise DataError(
                "the training split holds no document; give more data or a smaller data.validation_fraction"
            )
        weights = [s.weight for s in config.sources]
        self.weights: dict[str, float] | None = None
        if None not in weights:
            self.weights = {n: float(cast(float, w)) for n, w in zip(self.train, weights, strict=True)}
        elif config.mixer.changes:
            self.weights = dict.fromkeys(self.train, 1.0)
        # Rows and their order are functions of these, so loader and figures may share them.
        self.streams = {
            name: RowStream(dataset, config.batcher, seq_len, seed, config.shuffle)
            for name, dataset in self._training_sets(self.train).items()
        }
        # Stages before and behind the one on all documents; of the same shares.
        early = first_stage(config.first_stage, self.train, self.weights is None) if config.first_stage else {}
        self._first = self._stage(early, "first stage")
        self._last = self._stage(unique_names(cooldown or []), "cooldown")
        if None in weights and config.mixer.changes and config.mixer.by_size:
            self.weights = {name: float(stream.num_rows(0)) for name, stream in self.streams.items()}
        for stream in self.streams.values() if global_batch_rows else ():
            stream.set_step_rows(cast(int, global_batch_rows))
            if stream.note:
                log.info("%s", stream.note)
        if not any(tokens for tokens, _ in self._trained.values()):
            raise DataError(
                "no token of the training data is trained on: every loss weight is 0. Check the mask (a chat template "
                "needs generation markers) or train on all tokens"
            )

    def _training_sets(self, train: dict[str, TokenDataset]) -> dict[str, TokenDataset]:
        if self.weights is not None:
            return train
        parts = list(train.items())
        if self.config.shuffle:
            parts.sort(key=lambda item: item[1].fingerprint)  # the order in the recipe should not matter
        return {"pool": Pool(dict(parts))}

    def _stage(self, train: dict[str, TokenDataset], label: str) -> dict[str, tuple[str, RowStream]]:
        """Of a further stage: name of the stream -> the training stream that it stands in for, and its rows."""
        if not train:
            return {}
        config, sets = self.config, self._training_sets(train)
        made = {n: RowStream(d, config.batcher, self.seq_len, self.seed, config.shuffle) for n, d in sets.items()}
        return {f"{n} ({label})": (n, stream) for n, stream in made.items()}

    def train_loader(
        self, global_batch_rows: int, max_rows: int | None = None, total_steps: int | None = None
    ) -> Loader:
        """This rank's loader; it ends after ``max_rows`` rows over all ranks (None: never).

        ``total_steps`` is the run's length, by which stages are laid out; None: as in the last call."""
        self.total_steps = total_steps or self.total_steps
        if self._first or self._last:
            return self._staged_loader(global_batch_rows, max_rows)
        return self._loader(self.streams, self.weights, global_batch_rows, max_rows)

    def _staged_loader(self, global_batch_rows: int, max_rows: int | None) -> Loader:
        own = self.weights or dict.fromkeys(self.streams, 1.0)
        cooldown = self.config.metadata.cooldown if self._last and self.config.metadata else None
        rows = rows_of_stages(self.config.first_stage, cooldown, self.total_steps, global_batch_rows, max_rows)
        early, late = ({n: own[k] for n, (k, _) in stage.items()} for stage in (self._first, self._last))
        plan, weights = stage_plan(rows, (early, own, late))
        streams = self.streams | {n: s for n, (_, s) in (self._first | self._last).items()}
        loader = self._loader(streams, weights, global_batch_rows, max_rows)
        loader.change(lambda mixture: mixture.follow(plan))
        return loader

    def _loader(
        self,
        streams: Mapping[str, RowStream],
        weights: Mapping[str, float] | None,
        global_batch_rows: int,
        max_rows: int | None,
    ) -> Loader:
        return Loader(
            streams,
            weights,
            global_batch_rows=global_batch_rows,
            rank=self.rank,
            world_size=self.world_size,
            pad_id=self.tokenizer.pad_id,
            prefetch=self.config.prefetch,
            workers=self.config.workers,
            max_rows=max_rows,
            on_change=self.config.on_change,
            name_sources=isinstance(self.config.mixer, UpdatingMixerConfig),
        )

    def validation_batches(
        self, batch_rows: int, max_tokens: int | None = None, source: str | None = None
    ) -> Iterator[Batch]:
        """This rank's part of a fixed set of packed rows; see :func:`trainwright.data.validation.validation_batches`.

        ``source`` limits it to one of the sources. There is no batch when ``validation_tokens`` is 0.
        """
        if source is not None and source not in self.validation:
            raise ConfigError(f"no such source; {nearest(source, self.validation)}", key="source", value=source)
        parts = self.validation if source is None else {source: self.validation[source]}
        return validation_batches(
            Pool(dict(sorted(parts.items(), key=lambda item: item[1].fingerprint))),
            seq_len=self.seq_len,
            pad_id=self.tokenizer.pad_id,
            batch_rows=batch_rows,
            rank=self.rank,
            world_size=self.world_size,
            max_tokens=max_tokens,
            token_bytes=self.tokenizer.token_byte_lengths(),
            batcher=self.config.batcher if _whole(self.config) else None,
        )

    # -- figures ------------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Hash of all documents of both splits."""
        parts = sorted(d.fingerprint for d in (*self.train.values(), *self.validation.values()))
        return hashlib.blake2b("+".join(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def rows_per_epoch(self) -> int:
        return sum(s.num_rows(0) for s in self.streams.values())

    @property
    def train_tokens(self) -> int:
        return sum(d.num_tokens for d in self.train.values())

    @property
    def validation_tokens(self) -> int:
        return sum(d.num_tokens for d in self.validation.values())

    @cached_property
    def _trained(self) -> dict[str, tuple[float, bool]]:
        return {name: trained_tokens(d) for name, d in self.train.items()}

    def _per_row(self, tokens: Mapping[str, float]) -> float:
        """Mean over the rows as they are drawn, of what each source has ``tokens`` of in an epoch."""
        if self.weights is None:
            return sum(tokens.values()) / self.rows_per_epoch
        parts = (w * tokens[n] / self.streams[n].num_rows(0) for n, w in self.weights.items())
        return sum(parts) / sum(self.weights.values())

    def _filled(self) -> float:
        """Mean number of tokens in a row."""
        if self.weights is None:
            return sum(s.num_tokens(0) for s in self.streams.values()) / self.rows_per_epoch
        return self._per_row({n: s.num_tokens(0) for n, s in self.streams.items()})

    @cached_property
    def trained_share(self) -> float:
        """Share of the tokens drawn for training that are targets with a weight above 0.

        Exact but where ``summary()["trained_share_sampled"]``: of a source with loss weights and more than 4096
        documents that many are read.
        """
        trained = self._per_row({name: tokens for name, (tokens, _) in self._trained.items()})
        return trained / self._per_row({name: d.num_tokens for name, d in self.train.items()})

    def summary(self) -> dict[str, Any]:
        """Figures for a person: documents, tokens, bytes (None where the data does not say), rows, and what each source
        has. ``padding_share`` is of all positions, ``trained_share`` of the tokens; both of rows as they are drawn,
        so by the weights of a mixture."""
        sizes = [getattr(d, "num_bytes", None) for d in self.train.values()]
        return {
            "documents": sum(d.num_docs for d in self.train.values()),
            "train_tokens": self.train_tokens,
            "train_bytes": None if None in sizes else sum(cast(list[int], sizes)),
            "validation_documents": sum(d.num_docs for d in self.validation.values()),
            "validation_tokens": self.validation_tokens,
            "rows_per_epoch": self.rows_per_epoch,
            "padding_share": 1 - self._filled() / self.seq_len,
            "trained_share": self.trained_share,
            "trained_share_sampled": any(sampled for _, sampled in self._trained.values()),
            "contexts": {n: r for n, d in self.train.items() if "with_context" in (r := getattr(d, "report", {}))},
            "sources": {
                name: {
                    "documents": d.num_docs,
                    "tokens": d.num_tokens,
                    "weight": None if self.weights is None else self.weights[name],
                }
                for name, d in self.train.items()
            },
        }


def build_data(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    global_batch_rows: int | None = None,
    watch: Watch | None = None,
) -> DataModule:
    """Tokenize the sources (or map what is cached) and return the run's data. Rank 0 of all goes first.

    ``rank`` and ``world_size`` are those of data parallelism: ranks that share rows (tensor parallelism) pass the
    same. ``global_batch_rows`` are the rows of a step, for batchers that lay out whole steps.
    ``watch`` is told of each source and how far it is. Raises DataError and ConfigError.
    """

    context = config.metadata if config.metadata is not None and config.metadata.on else None
    if context is not None:
        context.check_room(seq_len)
        check_batcher(config.batcher.plan, config.batcher.name, seq_len)

    def tokenize_one(source: SourceConfig, split: Split, free: bool = False) -> TokenDataset:
        shared: dict[str, Any] = {
            "validation_fraction": config.validation_fraction,
            "cache_dir": config.cache(),
            "progress": watch and watch.advance,
            "num_proc": config.num_proc,
        }
        if watch is not None:
            disk = source.on_disk() if split == "train" else None
            watch.begin(f"tokenizing {getattr(source, 'label', source.name)} ({split})", disk and disk[1])
        if isinstance(source, TokenizedSource):
            return source.tokenized(tokenizer, split, seq_len=seq_len, **shared)
        if context is not None:
            setting = context
            if split == "validation" and not free:
                free, setting = context.validation == "free", context.model_copy(update={"rate": 1.0})
            return tokenize_with_context(source, tokenizer, split, setting, seq_len=seq_len, free=free, **shared)
        return tokenize_source(source, tokenizer, split, **shared)

    def tokenize() -> Mapping[str, list[TokenDataset]]:
        splits: tuple[Split, ...] = ("train", "validation")
        made: dict[str, list[TokenDataset]] = {s: [tokenize_one(x, s) for x in config.sources] for s in splits}
        _check_contexts(context, made["train"])
        made["cooldown"] = [tokenize_one(x, "train", True) for x in config.sources] if config._cools_down else []
        for part in ("train", "cooldown"):
            made[part] = [up_sampled(d, s.up_sample) for d, s in zip(made[part], config.sources, strict=False)]
        return made

    data = _main_first(tokenize)
    if watch is not None:
        watch.begin("laying out rows")
    module = DataModule(
        config, tokenizer, data["train"], data["validation"],
        seq_len=seq_len, seed=seed, rank=rank, world_size=world_size, global_batch_rows=global_batch_rows,
        cooldown=data["cooldown"],
    )  # fmt: skip
    if _whole(config):
        if not config.batcher.keeps_all:
            raise ConfigError(
                "cuts documents up and leaves their ends out, and these should stay whole; use best_fit or multipack",
                key="data.batcher",
                value=config.batcher.name,
            )
        if config.batcher.name == "packed":
            log.warning(
                "data.batcher=packed cuts conversations at row ends, and what is behind the cut does not see its "
                "question; best_fit or multipack keep them whole"
            )
        log.info("%.1f%% of the training tokens are trained on", 100 * module.trained_share)
    return module


def _whole(config: DataConfig) -> bool:
    """Whether a source's documents should not be cut."""
    if config.metadata is not None and config.metadata.on:
        return True
    return any(getattr(s, "whole_documents", False) for s in config.sources)


def _check_contexts(config: MetadataConfig | None, train: list[TokenDataset]) -> None:
    """Raises ConfigError where metadata are asked for and no document has any."""
    reports = [r for d in train if "with_context" in (r := getattr(d, "report", {}))]
    if config is None or any(r["with_context"] or r["free"] for r in reports):
        return
    wanted = ", ".join(f"{k} (column {config.column(k)!r})" for k in config.kinds)
    raise ConfigError(
        f"no training document has {wanted}; name the columns by data.metadata.columns, or leave metadata out",
        key="data.metadata.kinds",
        value=list(config.kinds),
    )
