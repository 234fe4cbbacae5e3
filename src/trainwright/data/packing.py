"""From tokenized documents to rows: who lies where, and the arrays of the rows.

A row is a list of segments, stretches of documents. Position i of a segment has token i+1 of the same document as its
target, also when that one lies on another row; the last token of a document has none and weight 0. So each token of the
corpus is an input exactly once an epoch, and a target exactly once except the first of each document.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from trainwright.core.batch import PADDING, Batch
from trainwright.core.errors import DataError
from trainwright.data.dataset import Columns, TokenDataset


class Segments(NamedTuple):
    """The content of a row: tokens ``starts[i]:stops[i]`` of document ``docs[i]``, int64 ``[n]`` each."""

    docs: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


NOTHING = Segments(*(np.zeros(0, np.int64) for _ in range(3)))  # a row of padding alone


class RowPlan(Protocol):
    """The rows of one epoch, each readable at any time."""

    num_rows: int

    def segments(self, row: int) -> Segments: ...


class Pool(TokenDataset):
    """Several datasets as one; document numbers run on. ``parts`` maps the name of each to it."""

    def __init__(self, parts: Mapping[str, TokenDataset], name: str = "pool"):
        self.parts, self.name = dict(parts), name
        self._datasets = list(parts.values())
        lengths = [np.asarray(d.lengths) for d in self._datasets]
        # One dataset keeps its own array, which may be a mapped file.
        self.lengths = lengths[0] if len(lengths) == 1 else np.concatenate([np.zeros(0, np.int32), *lengths])
        self._first = [0, *np.cumsum([d.num_docs for d in self._datasets]).tolist()]
        whole = "+".join(d.fingerprint for d in self._datasets)
        self.fingerprint = hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()

    def locate(self, doc: int) -> tuple[TokenDataset, int]:
        """The dataset that holds ``doc`` and its number there."""
        i = bisect_right(self._first, doc) - 1
        return self._datasets[i], doc - self._first[i]

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        dataset, local = self.locate(doc)
        return dataset.tokens(local, start, stop)

    def loss_weights(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        dataset, local = self.locate(doc)
        return dataset.loss_weights(local, start, stop)

    def columns_of(self, doc: int) -> tuple[Columns | None, int]:
        dataset, local = self.locate(doc)
        return dataset.columns_of(local)

    def column_shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        return {k: v for d in self._datasets for k, v in d.column_shapes().items()}


def unique_names(datasets: Sequence[TokenDataset]) -> dict[str, TokenDataset]:
    """``datasets`` by name; a name that is there already gets ``#2``, ``#3``, ..."""
    out: dict[str, TokenDataset] = {}
    for dataset in datasets:
        name, n = dataset.name, 1
        while name in out:
            n += 1
            name = f"{dataset.name}#{n}"
        out[name] = dataset
    return out


def assemble(rows: Sequence[tuple[TokenDataset, Segments]], seq_len: int, pad_id: int) -> Batch:
    """The arrays ``[len(rows), seq_len]`` of rows, on the CPU.

    ``doc_ids`` count a row's segments from 0, and ``positions`` the tokens of each from 0. What is left of a row is
    padding: one more document, -1, of ``pad_id`` and weight 0. Raises DataError when a dataset gives other tokens than
    its ``lengths`` say.
    """
    shape = (len(rows), seq_len)
    tokens = np.full(shape, pad_id, dtype=np.int64)
    targets = np.full(shape, pad_id, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    positions = np.empty(shape, dtype=np.int64)
    doc_ids = np.empty(shape, dtype=np.int32)
    ramp = np.arange(seq_len)
    kinds = {k: v for dataset, _ in rows for k, v in dataset.column_shapes().items()}
    extras = {name: np.zeros((*shape, *tail), dtype) for name, (tail, dtype) in kinds.items()}
    for r, (dataset, (docs, starts, stops)) in enumerate(rows):
        sizes = stops - starts
        used = int(sizes.sum())
        if used > seq_len:
            raise ValueError(f"a row plan puts {used} tokens into a row of {seq_len}")
        bounds = np.append(sizes, seq_len - used)
        doc_ids[r] = np.repeat(np.append(np.arange(len(sizes)), PADDING), bounds)
        positions[r] = ramp - np.repeat(np.cumsum(bounds) - bounds, bounds)
        ends = np.minimum(stops + 1, dataset.lengths[docs])  # with the token behind the segment, if there is one
        at = 0
        for doc, start, end, size in zip(docs.tolist(), starts.tolist(), ends.tolist(), sizes.tolist(), strict=True):
            ids = dataset.tokens(doc, start, end)
            if len(ids) != end - start:
                raise DataError(
                    f"source {dataset.name}: document {doc} has fewer tokens than its index says; "
                    "was the data changed while it is in use?"
                )
            tokens[r, at : at + size] = ids[:size]
            trained = end - start - 1
            if trained:
                targets[r, at : at + trained] = ids[1:]
                given = dataset.loss_weights(doc, start + 1, end)
                weights[r, at : at + trained] = 1.0 if given is None else given
            columns, own = dataset.columns_of(doc) if extras else (None, doc)
            if columns is not None:
                for name, values in columns.read(own, start, start + size).items():
                    extras[name][r, at : at + size] = values
            at += size
    make = torch.from_numpy
    more = {name: make(values) for name, values in extras.items()}
    return Batch(make(tokens), make(targets), make(weights), make(positions), make(doc_ids), more)
