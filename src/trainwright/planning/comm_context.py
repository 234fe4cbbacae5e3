"""What the strategies of context parallelism that follow the documents send in a step: their own plans, counted.

Their shards are made as on the ranks, of rows with the documents that ``Work.lengths`` names, so the bytes are those
that are recorded. Ranks send different amounts; given is the mean over the ranks of a context group. FlexSP also passes
its plan to the ranks, some hundred bytes, which is left out.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.parallel.comm.trace import bytes_sent
from trainwright.parallel.config import Degrees, ParallelConfig, context_method
from trainwright.parallel.mesh import DIMENSIONS
from trainwright.planning.comm_plan import Transfer, Work

FOLLOWING = ("basp", "flashcp", "bytescale", "flexsp")


def rows_of(lengths: Sequence[int], seq_len: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """``rows`` rows of ``seq_len`` tokens of documents of ``lengths`` end to end, from the first again where they end.

    Raises ConfigError for lengths below 1, or none."""
    if not lengths or min(lengths) < 1:
        raise ConfigError("should hold lengths of documents, 1 or more each", key="--lengths")
    found: list[tuple[int, ...]] = []
    row: list[int] = []
    for length in itertools.cycle(lengths):
        while length:
            here = min(length, seq_len - sum(row))
            row.append(here)
            length -= here
            if sum(row) == seq_len:
                found.append(tuple(row))
                row = []
            if len(found) == rows:
                return tuple(found)
    raise AssertionError


def transfers(work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int]) -> Iterator[Transfer]:
    """Of one of :data:`FOLLOWING`; ``sizes``: rows of the micro-batches of a rank."""
    method: Any = context_method(config)
    rows = sum(sizes)
    lengths = (work.lengths or ((work.seq_len,),) * rows)[:rows]
    yield from {"basp": _basp, "flashcp": _pieces, "bytescale": _pieces, "flexsp": _flexsp}[method.name](
        work, degrees, method, sizes, lengths
    )


def _windows(work: Work) -> list[int]:
    return [work.arch.window(i) for i in range(work.arch.n_layers)]


def _heads(work: Work, degrees: Degrees) -> tuple[int, int]:
    return work.arch.n_heads // degrees.tp, work.arch.n_kv_heads // degrees.tp


def _basp(
    work: Work, degrees: Degrees, method: Any, sizes: Sequence[int], lengths: Sequence[Sequence[int]]
) -> Iterator[Transfer]:
    from trainwright.parallel.context import basp

    (heads, kv), arch, cp = _heads(work, degrees), work.arch, degrees.cp
    windows = len(set(_windows(work)))
    padded = Counter(basp.padded_rows(rows, cp, method.padding) for rows in sizes)
    for rows, times in sorted(padded.items()):
        size = basp.group_size(rows, cp)
        sent = basp.bytes_sent(rows, work.seq_len, heads, kv, arch.head_dim, cp, work.activation_bytes)
        calls = times * arch.n_layers
        yield Transfer("all_to_all", ("cp",), size, 8 * calls, calls * sent, f"heads for tokens in groups of {size}")
        sent = bytes_sent("all_gather", rows * work.seq_len // cp * 4, size)
        yield Transfer("all_gather", ("cp",), size, times * windows, times * windows * sent, "document ids")


def _batch(lengths: Sequence[Sequence[int]]) -> Batch:
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]).int()
    zeros = torch.zeros(ids.shape, dtype=torch.int64)
    return Batch(zeros, zeros, torch.ones(ids.shape), zeros, ids)


def _pieces(
    work: Work, degrees: Degrees, method: Any, sizes: Sequence[int], lengths: Sequence[Sequence[int]]
) -> Iterator[Transfer]:
    cp, batch, windows = degrees.cp, _batch(lengths), _windows(work)
    messages = tokens = 0
    for rank in range(cp):
        context = method.over(None).as_rank(rank, cp)
        for micro in context.micro_batches(batch, max(sizes)):
            for window in set(windows):
                plan = context.plan(micro.doc_ids, *micro.tokens.shape, window, torch.device("cpu"))
                layers = windows.count(window)
                messages += layers * len(plan.send)
                tokens += layers * sum(index.numel() for _, index in plan.send)
    ways = 2 if method.keep_keys else 3  # keys forward, perhaps again, and their gradients back
    sent = 2 * _heads(work, degrees)[1] * work.arch.head_dim * work.activation_bytes * tokens
    yield Transfer("send", ("cp",), cp, ways * messages // cp, ways * sent // cp, "keys and values", True)
    checks = len(sizes) if method.name == "flashcp" else 1
    yield Transfer("all_gather", ("cp",), cp, checks, checks * bytes_sent("all_gather", 8, cp), "that plans are equal")
    if method.name == "bytescale":
        yield _agreed(degrees)


def _agreed(degrees: Degrees) -> Transfer:
    world = degrees.world_size
    return Transfer("all_reduce", DIMENSIONS, world, 1, bytes_sent("all_reduce", 8, world), "number of micro-batches")


def _flexsp(
    work: Work, degrees: Degrees, method: Any, sizes: Sequence[int], lengths: Sequence[Sequence[int]]
) -> Iterator[Transfer]:
    from trainwright.parallel.context.flexsp import FlexSPContext, documents

    (heads, kv), arch, cp = _heads(work, degrees), work.arch, degrees.cp
    windows = len(set(_windows(work)))
    found: dict[int, list[int]] = {}  # by group size: tokens of a micro-batch on a rank, of all ranks
    batch = _batch(lengths)
    of_documents = [s.stop - s.start for s in documents(batch)]
    plan = FlexSPContext({}, 0, cp, method, heads).planner_of(batch, max(sizes)).plan(of_documents)
    for micro in plan.micro_batches:
        for group in micro.groups:
            tokens = sum(of_documents[i] for i in group.sequences)
            found.setdefault(group.degree, []).extend([max(1, math.ceil(tokens / group.degree))] * group.degree)
    for size, shares in sorted(found.items()):
        per_head = arch.head_dim * work.activation_bytes
        more = kv if kv % size == 0 else math.lcm(kv, size)  # repeated first
        moved = sum(4 * bytes_sent("all_to_all", h * n * per_head, size) for h in (heads, more) for n in shares)
        calls = len(shares)
        yield Transfer(
            "all_to_all", ("cp",), size, 8 * arch.n_layers * calls // cp, arch.n_layers * moved // cp,
            f"heads for tokens in groups of {size}",
        )  # fmt: skip
        sent = windows * sum(bytes_sent("all_gather", 4 * n, size) for n in shares)
        yield Transfer("all_gather", ("cp",), size, -(-windows * calls // cp), sent // cp, "document ids")
    if degrees.world_size > cp:
        yield _agreed(degrees)
