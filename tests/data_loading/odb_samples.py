"""Samples that say who they are, and ranks in one process: threads with an exchange over a barrier."""

import threading

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.odb import OnlineDynamicBatches


def sample(ident, length):
    return {"id": ident, "input_ids": [ident] * length}


def samples(lengths, first=0):
    return [sample(first + i, n) for i, n in enumerate(lengths)]


def keep(group):
    """A collate function that collates nothing."""
    return group


class Samples(Dataset):
    """Map-style, counts what is read."""

    def __init__(self, lengths, first=0):
        self.lengths, self.first, self.reads = list(lengths), first, []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        self.reads.append(i)
        return sample(self.first + i, self.lengths[i])


class Barrier:
    """The exchange of one of several threads."""

    def __init__(self, rank, world_size, shared):
        self.rank, self.world_size, self.shared, self.calls = rank, world_size, shared, 0

    def __call__(self, row):
        self.calls += 1
        barrier, rows = self.shared
        rows[self.rank] = row
        barrier.wait()
        out = np.stack(rows)
        barrier.wait()
        return out


def in_ranks(world_size, work, timeout=20):
    """``work(exchange)`` of each rank, in threads. Returns what each gave or raised; a deadlock breaks the barrier."""
    shared = (threading.Barrier(world_size, timeout=timeout), [None] * world_size)
    results = [None] * world_size

    def run(rank):
        try:
            results[rank] = work(Barrier(rank, world_size, shared))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world_size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def passes(sources, budget, **settings):
    """One pass of each rank over ``sources[rank]``: lists of DynamicBatch."""

    def work(exchange):
        batches = OnlineDynamicBatches(sources[exchange.rank], budget, exchange=exchange, collate=keep, **settings)
        return list(batches)

    return in_ranks(len(sources), work)


def ids(steps):
    """Of the samples that were really given."""
    return [s["id"] for step in steps if not step.idle for s in step.batch]


def padded_tokens(steps):
    return sum(len(s.batch) * max(len(x["input_ids"]) for x in s.batch) for s in steps if not s.idle)
