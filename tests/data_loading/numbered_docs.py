"""Documents whose token ids say where they come from: id = document * STEP + position."""

from __future__ import annotations

import numpy as np

from trainwright.core.registry import build
from trainwright.data.dataset import ArrayDataset
from trainwright.data.loader import Loader
from trainwright.data.rows import RowStream

STEP = 100_000
PAD = 2_000_000_000


def numbered(lengths, name="array", first=0, weights=None):
    """Documents ``first``, ``first + 1``, ... of these lengths."""
    docs = [(first + d) * STEP + np.arange(n) for d, n in enumerate(lengths)]
    return ArrayDataset(docs, weights, name)


def stream(dataset, batcher="packed", seq_len=4, seed=3, shuffle=True):
    return RowStream(dataset, build("batcher", batcher), seq_len, seed, shuffle)


def loader(lengths, batch=4, batcher="packed", seq_len=4, seed=3, shuffle=True, **settings):
    """A loader over one numbered source."""
    settings = {"pad_id": PAD, "prefetch": 0} | settings
    return Loader(
        {"pool": stream(numbered(lengths), batcher, seq_len, seed, shuffle)}, global_batch_rows=batch, **settings
    )


def mixture_loader(sources, weights, batch=4, seq_len=4, seed=3, shuffle=True, batcher="packed", **settings):
    """A loader over numbered sources ``{name: lengths}``: documents 0.. of the one called a..., 1000.. of b..., etc."""
    settings = {"pad_id": PAD, "prefetch": 0} | settings
    streams = {
        name: stream(numbered(lengths, name, 1000 * (ord(name[0]) - ord("a"))), batcher, seq_len, seed, shuffle)
        for name, lengths in sources.items()
    }
    return Loader(streams, weights, global_batch_rows=batch, **settings)


def pairs(tokens):
    """(document, position) of each token that is not padding."""
    ids = np.asarray(tokens).reshape(-1)
    ids = ids[ids != PAD]
    return list(zip((ids // STEP).tolist(), (ids % STEP).tolist(), strict=True))


def contents(batch):
    """Each row that is not padding alone, as the tuple of its ids."""
    rows = (tuple(row[row != PAD].tolist()) for row in batch.tokens)
    return [row for row in rows if row]


def global_steps(loaders, steps):
    """Rows of each global step: those of the ranks, one after the other."""
    out = []
    for _ in range(steps):
        out.append([row for one in loaders for row in contents(one.next_batch())])
    return out


def ranks(make, world_size):
    """``make(rank=..., world_size=...)`` for each rank."""
    return [make(rank=r, world_size=world_size) for r in range(world_size)]


def all_rows(plan):
    """What lies in each row of a plan: ``[(document, start, stop), ...]``."""
    return [list(zip(*(a.tolist() for a in plan.segments(r)), strict=True)) for r in range(plan.num_rows)]
