"""From tokenized documents to rows: who lies where, and the arrays of a row.

A row is a list of segments, stretches of documents. Position i of a segment has token i+1 of the same document as its
target, also when that one lies on the next row; the last token of a document has none and weight 0. So each token of the
corpus is a target exactly once an epoch, except the first of each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainwright.data.dataset import TokenDataset


@dataclass(frozen=True)
class Segment:
    """Tokens ``start:stop`` of document ``doc``."""

    doc: int
    start: int
    stop: int


class RowPlan(Protocol):
    """The rows of one epoch."""

    num_rows: int

    def segments(self, row: int) -> list[Segment]: ...


@dataclass
class Row:
    """One row's arrays ``[T]``: int64 tokens, targets, positions; float32 weights; int32 doc_ids."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    doc_ids: np.ndarray


class Pool(TokenDataset):
    """Several datasets as one; document numbers run on."""

    def __init__(self, datasets: Sequence[TokenDataset]):
        self.datasets = list(datasets)
        self.name = "+".join(d.name for d in datasets)
        self.lengths = np.concatenate([np.asarray(d.lengths) for d in datasets]) if datasets else np.zeros(0, np.int32)
        self.first = np.cumsum([0, *[d.num_docs for d in datasets]])
        self.fingerprint = "+".join(d.fingerprint for d in datasets)

    def _find(self, doc: int) -> tuple[TokenDataset, int]:
        i = int(np.searchsorted(self.first, doc, side="right")) - 1
        return self.datasets[i], doc - int(self.first[i])

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        dataset, local = self._find(doc)
        return dataset.tokens(local, start, stop)

    def loss_weights(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        dataset, local = self._find(doc)
        return dataset.loss_weights(local, start, stop)


def empty_row(seq_len: int, pad_id: int) -> Row:
    """A row of padding: weight 0, one document of its own."""
    return Row(
        np.full(seq_len, pad_id, np.int64),
        np.full(seq_len, pad_id, np.int64),
        np.zeros(seq_len, np.float32),
        np.arange(seq_len, dtype=np.int64),
        np.zeros(seq_len, np.int32),
    )


def assemble(dataset: TokenDataset, segments: Sequence[Segment], seq_len: int, pad_id: int) -> Row:
    """The arrays of a row. ``doc_ids`` count segments from 0; padding behind them is one more."""
    row = empty_row(seq_len, pad_id)
    at = 0
    for i, s in enumerate(segments):
        n = s.stop - s.start
        here = slice(at, at + n)
        has_next = s.stop < dataset.lengths[s.doc]
        ids = np.asarray(dataset.tokens(s.doc, s.start, s.stop + 1 if has_next else s.stop))
        row.tokens[here] = ids[:n]
        row.targets[at : at + len(ids) - 1] = ids[1:]
        weights = dataset.loss_weights(s.doc, s.start + 1, s.stop + 1 if has_next else s.stop)
        row.weights[at : at + len(ids) - 1] = 1.0 if weights is None else weights
        row.positions[here] = np.arange(n)
        row.doc_ids[here] = i
        at += n
    if at < seq_len:
        row.doc_ids[at:] = len(segments)
        row.positions[at:] = np.arange(seq_len - at)
    return row
