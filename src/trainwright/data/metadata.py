"""Metadata as a context before (or behind) each document: URL, domain, quality, topic, format.

    prepend   <boc> context <eoc> document <eos>      the document attends to its context
    append    document <boc> context <eoc> <eos>      the context is predicted from the document

Targets from ``<boc>`` to ``<eoc>`` have weight 0, unless ``loss_on_metadata``: the loss is that of the document's own
tokens, each given the context. A share ``rate`` of the documents gets its context, the same ones in every epoch (by a
hash of the document's id); the others, and those without the column, are free of it: ``<boc> <eoc> document`` or the
bare document. So the model can be asked with a context and without, and a sampler can move from one towards the other
(:mod:`trainwright.models.guidance`).

A document that does not fit a row is cut into pieces, each with the context, as in the paper. Behind a cut a piece
begins with the last token before it, of weight 0, so that every document token is a target once, after its own past.
``<boc>`` and ``<eoc>`` are special tokens, which no text can produce: neither a document nor a URL that spells them.

URLs Help, Topics Guide, arXiv:2505.16570 (90 % with context; guided sampling); MeCo, arXiv:2501.01956 (``rate`` 1 and a
``cooldown`` of the last 10 % of the steps on plain documents); Beyond URLs, arXiv:2511.21613 (metadata behind the
document, with loss). URLs lose query, fragment and user name, which carry personal data, and long ones are cut. The
papers' exact texts for scores and combinations were not at hand: a single kind stands alone, of several each has a
line with its name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.cache import build_once
from trainwright.data.chat.shards import WeightedDataset, WeightedShardWriter
from trainwright.data.context_tokens import BOC, EOC, ContextTokens, context_tokens
from trainwright.data.dataset import TokenDataset
from trainwright.data.shards import FORMAT
from trainwright.data.sources._split import hash_fraction
from trainwright.data.sources.base import Document, SourceConfig, Split
from trainwright.data.tokenize import Progress, _batches, _encode, _utf8_size, tokenize_source
from trainwright.data.tokenizers.base import Tokenizer

log = logging.getLogger("trainwright")
CONTEXT_FORMAT = 1
Kind = Literal["url", "domain", "quality", "topic", "format", "id"]


class MetadataConfig(BaseModel):
    """Context of documents from their metadata."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    kinds: list[Kind] = Field(
        ["url"], min_length=1, description="What the context is made of: url, domain, quality, topic, format, id."
    )
    columns: dict[Kind, str] = Field(
        default_factory=dict,
        description="Columns or fields that hold them, where they are not called so; metadata.topic is a field of an "
        "object (or of JSON text). domain comes from the URL's.",
    )
    rate: float = Field(0.9, ge=0, le=1, description="Share of the documents with their context; 0: plain documents.")
    max_tokens: PositiveInt = Field(64, description="Tokens of a context; longer ones are cut.")
    position: Literal["prepend", "append"] = Field("prepend", description="Before or behind the document.")
    loss_on_metadata: bool = Field(False, description="Train on the context too; append needs it.")
    empty: Literal["markers", "none"] = Field(
        "markers", description="Documents free of context: with an empty pair of marks, or bare."
    )
    cooldown: float = Field(
        0.0, ge=0, lt=1, description="Share of the steps, the last ones, on documents free of context (MeCo: 0.1)."
    )
    validation: Literal["free", "context"] = Field(
        "free", description="Validation documents: free of context, or each with its own."
    )
    tokens: tuple[str, str] = Field(
        (BOC, EOC),
        description="Names of the two marks. Special tokens of the vocabulary are used as they are, others are added.",
    )
    seed: int = Field(0, ge=0, description="Which documents go without.")

    @field_validator("kinds")
    @classmethod
    def _once(cls, kinds: list[Kind]) -> list[Kind]:
        if len(set(kinds)) != len(kinds):
            raise ValueError("names a kind twice")
        return kinds

    @model_validator(mode="after")
    def _worth_it(self) -> MetadataConfig:
        if self.position == "append" and not self.loss_on_metadata:
            raise ValueError(
                "position=append without loss_on_metadata changes nothing: no document token sees the context, and "
                "no context token is trained on; set loss_on_metadata: true, or prepend"
            )
        if self.tokens[0] == self.tokens[1]:
            raise ValueError("tokens are one and the same; give two names")
        return self

    @property
    def on(self) -> bool:
        return self.rate > 0

    def column(self, kind: Kind) -> str:
        return self.columns.get(kind) or ("url" if kind == "domain" else kind)

    def check_room(self, seq_len: int) -> None:
        """Raises ConfigError where a row would hold nothing but context."""
        if self.max_tokens + 5 > seq_len:  # two marks, the token before a cut, one more, and EOS
            raise ConfigError(
                f"leaves no room for the document in a row of {seq_len} tokens; lower it to {max(seq_len // 4, 1)} or "
                "raise train.seq_len",
                key="data.metadata.max_tokens",
                value=self.max_tokens,
            )


# -- the text of a context ------------------------------------------------------------------------------------------


def clean_url(url: str) -> str | None:
    """Scheme, host and path of ``url``; None where it is none. Query, fragment, user and port go."""
    try:
        parts = urlsplit(url.strip() if "//" in url else f"//{url.strip()}")
        host = parts.hostname
    except ValueError:  # a bracket that is not closed, ...
        return None
    if not host or any(c.isspace() for c in host) or not ("." in host or parts.scheme):
        return None
    return urlunsplit((parts.scheme, host, parts.path, "", "")).removeprefix("//")


def domain(url: str) -> str | None:
    """Host of ``url`` without ``www.``; None where it is none."""
    cleaned = clean_url(url)
    if cleaned is None:
        return None
    return (cleaned.split("//", 1)[-1].split("/", 1)[0]).removeprefix("www.") or None


def _lookup(meta: Mapping[str, Any], column: str) -> Any:
    if column in meta:
        return meta[column]
    outer, _, inner = column.partition(".")
    value = meta.get(outer)
    if not inner or value is None:
        return None
    if isinstance(value, str):  # built corpora in parquet hold it as JSON
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return _lookup(value, inner) if isinstance(value, Mapping) else None


def _value(kind: Kind, raw: Any) -> str | None:
    if raw is None or isinstance(raw, bool | Mapping | list):
        return None
    if isinstance(raw, float) and not math.isfinite(raw):
        return None
    if kind in ("url", "domain"):
        return None if not isinstance(raw, str) else (clean_url if kind == "url" else domain)(raw)
    return (f"{raw:.2f}" if isinstance(raw, float) else " ".join(str(raw).split())) or None


def context_text(config: MetadataConfig, doc: Document) -> str | None:
    """The context of ``doc``; None where none of the kinds is known of it."""
    found = {}
    for kind in config.kinds:
        value = _value(kind, doc.id if kind == "id" else _lookup(doc.meta, config.column(kind)))
        if value is not None:
            found[kind] = value
    if not found:
        return None
    if len(config.kinds) == 1:
        return next(iter(found.values()))
    return "\n".join(f"{kind}: {value}" for kind, value in found.items())


# -- documents with a context ---------------------------------------------------------------------------------------


@dataclass
class ContextReport:
    """What became of the documents of a split."""

    documents: int = 0
    with_context: int = 0
    free: int = 0  # by the rate
    missing: int = 0  # free because they have none
    shortened: int = 0  # contexts cut to max_tokens
    pieces: int = 0  # rows' worth that documents were cut into, 1 for most
    document_tokens: int = 0  # of text and EOS, each once
    context_tokens: int = 0  # marks included
    repeated_tokens: int = 0  # the token before a cut, shown again

    def __str__(self) -> str:
        share = self.with_context / self.documents if self.documents else 0.0
        text = (
            f"{self.with_context} of {self.documents} documents with context ({share:.1%}), {self.missing} without a "
            f"known one; {self.document_tokens} document tokens, {self.context_tokens} of context"
        )
        return text + (f"; {self.shortened} contexts cut" if self.shortened else "")


@dataclass(frozen=True)
class Piece:
    """Ids int32 ``[n]`` and the loss weight float32 ``[n]`` of each as a target."""

    ids: np.ndarray
    weights: np.ndarray


def with_context(
    body: np.ndarray,
    context: np.ndarray | None,
    marks: ContextTokens,
    eos_id: int,
    seq_len: int,
    config: MetadataConfig,
) -> list[Piece]:
    """A document's ids (without EOS) and the context's (None: free of it) as pieces of at most ``seq_len`` tokens.

    A bare document is one piece of any length, for a batcher to cut.
    """
    body = np.asarray(body, dtype=np.int32)
    end = np.array([eos_id], dtype=np.int32)
    if context is None and config.empty == "none":
        whole = np.concatenate([body, end])
        return [Piece(whole, np.ones(len(whole), np.float32))]
    inner = np.zeros(0, np.int32) if context is None else np.asarray(context[: config.max_tokens], dtype=np.int32)
    block = np.concatenate([[marks.boc], inner, [marks.eoc]]).astype(np.int32)
    head, tail = (block, end[:0]) if config.position == "prepend" else (end[:0], block)
    weight = np.float32(config.loss_on_metadata)
    room = seq_len - len(block) - 1  # EOS goes behind the last piece
    pieces = []
    start = 0
    while True:
        lead = body[start - 1 : start] if start else body[:0]  # the token before the cut
        stop = min(start + room - len(lead), len(body))
        last = stop == len(body)
        parts = [
            (head, weight),
            (lead, np.float32(0)),
            (body[start:stop], np.float32(1)),
            (tail, weight),
            (end if last else end[:0], np.float32(1)),
        ]
        pieces.append(
            Piece(
                np.concatenate([ids for ids, _ in parts]),
                np.concatenate([np.full(len(ids), w, np.float32) for ids, w in parts]),
            )
        )
        if last:
            return pieces
        start = stop


def tokenize_with_context(
    source: SourceConfig,
    tokenizer: Tokenizer,
    split: Split,
    config: MetadataConfig,
    *,
    seq_len: int,
    validation_fraction: float,
    cache_dir: Path,
    progress: Progress | None = None,
    num_proc: int = 1,
    free: bool = False,
) -> TokenDataset:
    """As :func:`~trainwright.data.tokenize.tokenize_source`, each document with its context, or with ``free`` none.

    Cached like that; what became of the documents is logged and kept in ``meta["report"]``. Raises ConfigError for a
    context that fills a row and a tokenizer without the marks.
    """
    shared: dict[str, Any] = {
        "validation_fraction": validation_fraction, "cache_dir": cache_dir, "progress": progress, "num_proc": num_proc,
    }  # fmt: skip
    if free and config.empty == "none":
        return tokenize_source(source, tokenizer, split, **shared)
    config.check_room(seq_len)
    marks = context_tokens(tokenizer, config.tokens)
    wanted = [config.column(k) for k in config.kinds if k != "id"]
    if hasattr(source, "meta_keys"):
        outer = [c.split(".", 1)[0] for c in wanted]
        source = source.model_copy(update={"meta_keys": list(dict.fromkeys([*source.meta_keys, *wanted, *outer]))})
    label = getattr(source, "label", source.name)
    before = source.fingerprint()
    settings = config.model_dump(mode="json", exclude={"cooldown", "validation"})
    key = [FORMAT, CONTEXT_FORMAT, before, tokenizer.fingerprint(), split, validation_fraction, seq_len, settings, free]
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=12).hexdigest()

    def build(folder: Path) -> None:
        writer = WeightedShardWriter(folder, tokenizer.vocab_size)
        try:
            docs = source.documents(split, validation_fraction)
            report = _write(docs, tokenizer, marks, config, seq_len, writer, progress, num_proc, free)
            if source.fingerprint() != before:
                raise DataError(
                    f"source {label}: its files changed while they were read; run again when they are complete"
                )
            if split == "train" and not writer.num_docs:
                raise DataError(
                    f"source {label}: no text is left for training (validation_fraction={validation_fraction}); "
                    f"add documents"
                )
            writer.close(name=label, split=split, report=asdict(report))
        except BaseException:
            writer.abandon()
            raise

    data = build_once(Path(cache_dir) / f"{source.name}-{split}-context-{digest}", build, WeightedDataset)
    data.name = label
    report = ContextReport(**data.report)
    if not free and report.documents:
        say = log.warning if report.missing else log.info
        say("source %s, %s: %s", label, split, report)
    return data


def _write(
    docs: Iterator[Document],
    tokenizer: Tokenizer,
    marks: ContextTokens,
    config: MetadataConfig,
    seq_len: int,
    writer: WeightedShardWriter,
    progress: Progress | None,
    num_proc: int,
    free: bool,
) -> ContextReport:
    report, done = ContextReport(), 0
    for batch, encoded in _encode(_batches(docs), tokenizer, num_proc):
        contexts = _contexts(batch, tokenizer, config, report, free)
        columns: tuple[list[Any], ...] = ([], [], [], [])
        for doc, ids, context in zip(batch, encoded, contexts, strict=True):
            size = _utf8_size(doc.text)
            done += size
            if not len(ids):
                continue
            report.documents += 1
            report.document_tokens += len(ids) + 1
            pieces = with_context(ids, context, marks, tokenizer.eos_id, seq_len, config)
            report.pieces += len(pieces)
            report.repeated_tokens += len(pieces) - 1
            report.context_tokens += sum(len(p.ids) for p in pieces) - len(ids) - len(pieces)
            for i, piece in enumerate(pieces):
                values = (piece.ids, piece.weights, f"{doc.id}#{i}" if i else doc.id, 0 if i else size)
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
        writer.write_weighted(*columns)
        if progress is not None:
            progress(done)
    return report


def _contexts(
    batch: Sequence[Document], tokenizer: Tokenizer, config: MetadataConfig, report: ContextReport, free: bool
) -> list[np.ndarray | None]:
    """Ids of each document's context, None for those free of it; counts them."""
    texts: list[str | None] = []
    for doc in batch:
        text = None if free else context_text(config, doc)
        if not doc.text:
            text = None
        elif text is None:
            report.missing += not free
            report.free += free
        elif hash_fraction(f"context/{config.seed}/{doc.id}") >= config.rate:
            report.free += 1
            text = None
        else:
            report.with_context += 1
        texts.append(text)
    given = [t for t in texts if t is not None]
    ids = iter(tokenizer.encode_batch(given) if given else [])
    out: list[np.ndarray | None] = [None if t is None else next(ids) for t in texts]
    report.shortened += sum(c is not None and len(c) > config.max_tokens for c in out)
    return out


# -- what a batcher must not do -------------------------------------------------------------------------------------


def check_batcher(plan: Callable[[np.ndarray, int, int | None], Any], name: str, seq_len: int) -> None:
    """Raises ConfigError for a batcher that cuts documents which fit a row: what is cut off would lose its context."""
    lengths = np.full(3, seq_len - 1, dtype=np.int32)
    rows = plan(lengths, seq_len, None)
    for r in range(rows.num_rows):
        docs, starts, stops = rows.segments(r)
        if (stops - starts != lengths[docs]).any():
            raise ConfigError(
                "cuts documents, and the part in the next row would not see its context; use best_fit or multipack "
                "(data.metadata is on), or leave it out",
                key="data.batcher",
                value=name,
            )
