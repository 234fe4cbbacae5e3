"""Documents whose tokens say where they are: token t of document d is ``1 + START * d + t``."""

import numpy as np

from trainwright.data.dataset import ArrayDataset
from trainwright.data.rows import RowStream

START = 1000


def documents(lengths, name="docs", weights=None, first=0):
    docs = [1 + START * (first + d) + np.arange(n) for d, n in enumerate(lengths)]
    return ArrayDataset(docs, weights, name=name)


def single_ids(n, width=2, name="ids", first=0):
    """Documents that fill a row of ``width`` each: id, then a constant."""
    return ArrayDataset([[first + i, *[90_000] * (width - 1)] for i in range(n)], name=name)


def stream(dataset, batcher, seq_len, seed=0, shuffle=True):
    return RowStream(dataset, batcher, seq_len, seed, shuffle)


def inputs(batch):
    """Tokens of all segments that are not padding."""
    return batch.tokens[batch.tokens > 0].tolist()


def trained_targets(batch):
    return batch.targets[batch.weights > 0].tolist()
