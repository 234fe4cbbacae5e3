"""What the strategies of context parallelism that follow the documents send in a step: their own plans, counted.

Their shards are made as on the ranks, of rows with the documents that ``Work.lengths`` names, so the bytes are those
that are recorded. Ranks send different amounts; given is the mean over the ranks of a context group. FlexSP also passes
its plan to the ranks, some hundred bytes, which is left out.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.parallel.comm.trace import bytes_sent
from trainwright.parallel.config import Degrees, ParallelConfig, context_method
from trainwright.parallel.context.base import Stages
from trainwright.parallel.context.flexsp import FlexSPContext, Span, documents, largest_share
from trainwright.parallel.mesh import DIMENSIONS
from trainwright.parallel.pipeline.legal import legal_micro_batches
from trainwright.planning import comm_passes, comm_stages
from trainwright.planning.comm_plan import Transfer, Work
from trainwright.planning.flexsp import Plan

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
    lengths = _lengths(work, degrees, method, sizes)
    if method.name == "basp":
        yield from comm_stages.mean(_basp(work, degrees, config, sizes, lengths), degrees.pp)
    else:
        yield from (_flexsp if method.name == "flexsp" else _pieces)(work, degrees, config, sizes, lengths)


def rows_spread(work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int]) -> Iterator[Transfer]:
    """Of ring, Ulysses and both: all layers."""
    arch, cp = work.arch, degrees.cp
    method: Any = context_method(config)
    spread = getattr(method, "ulysses_of", None)
    if spread is None:
        raise ConfigError("what it sends is not known to the plan; use ring, ulysses or usp", key="parallel.context")
    u = spread(cp, arch.n_heads // degrees.tp)
    r = cp // u
    heads, kv = arch.n_heads // degrees.tp, arch.n_kv_heads // degrees.tp
    kv = kv if kv % u == 0 else math.lcm(kv, u)
    tokens = sum(sizes) * work.seq_len // cp
    per_head = tokens * arch.head_dim * work.activation_bytes
    found = comm_passes.layers(work)
    if u > 1:
        moves = [one.heads_moved for one in found]
        calls = len(sizes) * sum(map(sum, moves))
        sent = sum(a * bytes_sent("all_to_all", heads * per_head, u) for a, _ in moves)
        sent += sum(b * bytes_sent("all_to_all", kv * per_head, u) for _, b in moves)
        yield Transfer("all_to_all", ("cp",), u, calls, sent, "heads for tokens")
    if r > 1:
        keys = kv // u * per_head * u  # of a group's tokens, this rank's heads
        back = sum(one.attention for one in found)
        passes = 2 * (r - 1) * (sum(one.forward for one in found) + back)
        wide = max(4, work.activation_bytes) // work.activation_bytes  # gradients, which are sums on their way
        yield Transfer(
            "send",
            ("cp",),
            r,
            (passes + 2 * r * back) * len(sizes),
            (passes + 2 * r * back * wide) * keys,
            "keys and values round the ring",
            True,
        )


def _lengths(work: Work, degrees: Degrees, method: Any, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Of the documents of a rank's rows; a pipeline fills up its last micro-batch where these are of rows."""
    rows = math.ceil(work.rows / (degrees.dp_replicate * degrees.dp_shard))
    found = (work.lengths or ((work.seq_len,),) * rows)[:rows]
    return found + found[-1:] * (sum(sizes) - rows if method.name == "flashcp" else 0)


def _rows(work: Work, degrees: Degrees, method: Any, sizes: Sequence[int]) -> int:
    """That a strategy is asked to take into a micro-batch."""
    return max(sizes) if method.name == "flashcp" else work.local_rows(degrees)[1]


def passed_on(work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int]) -> tuple[int, int]:
    """Micro-batches and tokens, padding included, that go through a pipeline in a step: of a column, in the mean."""
    method: Any = context_method(config)
    if degrees.cp == 1 or method.name not in ("flashcp", "bytescale", "flexsp"):
        return len(sizes), sum(sizes) * (work.seq_len // degrees.cp)
    batch = _batch(_lengths(work, degrees, method, sizes))
    if method.name == "flexsp":
        plan, documents = _flexsp_plan(work, degrees, config, sizes, batch)
        count = _legal(degrees, config)(len(plan.micro_batches))
        return count, count * largest_share(plan, documents)
    shapes = [
        tuple(micro.tokens.shape)
        for rank in range(degrees.cp)
        for micro in _context(degrees, config, rank).micro_batches(batch, _rows(work, degrees, method, sizes))
    ]
    return len(shapes) // degrees.cp, sum(map(math.prod, shapes)) // degrees.cp


def micro_batches(work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int]) -> int:
    """That a rank computes in a step."""
    method: Any = context_method(config)
    if degrees.pp > 1 or method.name not in ("bytescale", "flexsp"):
        return passed_on(work, degrees, config, sizes)[0]
    batch = _batch(_lengths(work, degrees, method, sizes))
    if method.name == "flexsp":
        return len(_flexsp_plan(work, degrees, config, sizes, batch)[0].micro_batches)
    return len(_context(degrees, config, 0).micro_batches(batch, _rows(work, degrees, method, sizes)))


def _legal(degrees: Degrees, config: ParallelConfig) -> Callable[[int], int]:
    return functools.partial(legal_micro_batches, config.pipeline, degrees.pp)


def _context(degrees: Degrees, config: ParallelConfig, rank: int) -> Any:
    """That of a rank, without its group."""
    method: Any = context_method(config)
    found = method.over(None).as_rank(rank, degrees.cp)
    if degrees.pp > 1:
        found.stages = Stages(None, degrees.pp, _legal(degrees, config))
    return found


def _windows(work: Work) -> list[int]:
    return [work.arch.window(i) for i in range(work.arch.n_layers)]


def _heads(work: Work, degrees: Degrees) -> tuple[int, int]:
    return work.arch.n_heads // degrees.tp, work.arch.n_kv_heads // degrees.tp


def _basp(
    work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int], lengths: Sequence[Sequence[int]]
) -> Iterator[Transfer]:
    from trainwright.parallel.context import basp

    method: Any = context_method(config)
    (heads, kv), arch, cp = _heads(work, degrees), work.arch, degrees.cp
    windows = comm_stages.windows(work, degrees, config)
    of_queries, of_keys = (sum(n) for n in zip(*(one.heads_moved for one in comm_passes.layers(work)), strict=True))
    padded = Counter(basp.padded_rows(rows, cp, method.padding) for rows in sizes)
    for rows, times in sorted(padded.items()):
        size = basp.group_size(rows, cp)
        # Of all eight, four of them as many heads as queries have.
        both, queries = (
            basp.bytes_sent(rows, work.seq_len, heads, n, arch.head_dim, cp, work.activation_bytes) for n in (kv, 0)
        )
        sent = times * (of_queries * queries + of_keys * (both - queries)) // 4
        calls = times * (of_queries + of_keys)
        yield Transfer("all_to_all", ("cp",), size, calls, sent, f"heads for tokens in groups of {size}")
        sent = bytes_sent("all_gather", rows * work.seq_len // cp * 4, size)
        yield Transfer("all_gather", ("cp",), size, times * windows, times * windows * sent, "document ids")


def _batch(lengths: Sequence[Sequence[int]]) -> Batch:
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]).int()
    zeros = torch.zeros(ids.shape, dtype=torch.int64)
    return Batch(zeros, zeros, torch.ones(ids.shape), zeros, ids)


def _pieces(
    work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int], lengths: Sequence[Sequence[int]]
) -> Iterator[Transfer]:
    method: Any = context_method(config)
    cp, pp, batch, windows = degrees.cp, degrees.pp, _batch(lengths), _windows(work)
    # Keys go forward, perhaps again backward, and their gradients back; once more where all is made again.
    ways = [one.forward + one.attention * (1 if method.keep_keys else 2) for one in comm_passes.layers(work)]
    messages = tokens = 0
    for rank in range(cp):
        context = _context(degrees, config, rank)
        for micro in context.micro_batches(batch, _rows(work, degrees, method, sizes)):
            for window in set(windows):
                plan = context.plan(micro.doc_ids, *micro.tokens.shape, window, torch.device("cpu"))
                times = sum(n for n, w in zip(ways, windows, strict=True) if w == window)
                messages += times * len(plan.send)
                tokens += times * sum(index.numel() for _, index in plan.send)
    sent = 2 * _heads(work, degrees)[1] * work.arch.head_dim * work.activation_bytes * tokens
    each = cp * pp
    yield Transfer("send", ("cp",), cp, messages // each, sent // each, "keys and values", True)
    for dim, ranks in (("cp", cp), ("pp", pp)):
        told = bytes_sent("all_gather", 8, ranks)
        yield Transfer("all_gather", (dim,), ranks, 1, told, "that plans are equal")
    if method.name == "bytescale":
        yield _agreed(degrees)


def _agreed(degrees: Degrees) -> Transfer:
    world = degrees.world_size
    return Transfer("all_reduce", DIMENSIONS, world, 1, bytes_sent("all_reduce", 8, world), "number of micro-batches")


def _flexsp(
    work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int], lengths: Sequence[Sequence[int]]
) -> Iterator[Transfer]:
    (heads, kv), arch, cp = _heads(work, degrees), work.arch, degrees.cp
    windows = comm_stages.windows(work, degrees, config) / degrees.pp
    of_queries, of_keys = (sum(n) for n in zip(*(one.heads_moved for one in comm_passes.layers(work)), strict=True))
    found: dict[int, list[int]] = {}  # by group size: tokens of a micro-batch on a rank, of all ranks
    plan, spans = _flexsp_plan(work, degrees, config, sizes, _batch(lengths))
    least = largest_share(plan, spans) if degrees.pp > 1 else 1
    for micro in plan.micro_batches:
        for group in micro.groups:
            tokens = sum(spans[i].stop - spans[i].start for i in group.sequences)
            share = max(least, math.ceil(tokens / group.degree))
            found.setdefault(group.degree, []).extend([share] * group.degree)
    for size, shares in sorted(found.items()):
        per_head = arch.head_dim * work.activation_bytes
        more = kv if kv % size == 0 else math.lcm(kv, size)  # repeated first
        moved = sum(
            times * bytes_sent("all_to_all", h * n * per_head, size)
            for times, h in ((of_queries, heads), (of_keys, more))
            for n in shares
        )
        calls = len(shares)
        yield Transfer(
            "all_to_all",
            ("cp",),
            size,
            (of_queries + of_keys) * calls // (cp * degrees.pp),
            moved // (cp * degrees.pp),
            f"heads for tokens in groups of {size}",
        )
        sent = windows * sum(bytes_sent("all_gather", 4 * n, size) for n in shares)
        yield Transfer("all_gather", ("cp",), size, math.ceil(windows * calls / cp), int(sent / cp), "document ids")
    if degrees.world_size > cp:
        yield _agreed(degrees)


def _flexsp_plan(
    work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int], batch: Batch
) -> tuple[Plan, list[Span]]:
    method: Any = context_method(config)
    spans = documents(batch)
    planner = FlexSPContext({}, 0, degrees.cp, method, _heads(work, degrees)[0]).planner_of(
        batch, _rows(work, degrees, method, sizes)
    )
    return planner.plan([s.stop - s.start for s in spans]), spans
