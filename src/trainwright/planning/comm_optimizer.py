"""What an optimizer sends in its step: for planning/comm_plan.py.

Methods that need whole matrices (optim/whole.py) have each of them sent to the rank that owns it for the step, and the
result back: of P numbers over n ranks about 2 (n-1)/n P in all, shared out over the ranks; given is the mean over
these. A matrix that is sharded in two ways, by tp and by dp_shard, is gathered on every rank. Methods that neither do
so nor step number by number are named by :func:`left_out`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from trainwright.core.params import NamedParam
from trainwright.optim.matrix import MATRICES
from trainwright.optim.whole import _rounds, owners
from trainwright.parallel.comm.trace import bytes_sent
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.expert import shard_dim
from trainwright.parallel.pipeline.layout import stage_layers, stage_ranks
from trainwright.planning.amsp_comm import OVER, chain_of
from trainwright.planning.comm_plan import Exchange, Transfer, Work, shard_numbers, tensor_shard

# What a step of each number needs is where the number is.
_BY_NUMBER = ("adamw", "adamw8bit", "lion", "sgd", "signum", "schedule_free")


def exchanges_of(
    config: Any, params: Sequence[NamedParam], number_bytes: int, narrow_bytes: int
) -> tuple[Exchange, ...]:
    """Of an optimizer's config over the trained ``params``.

    number_bytes  of a parameter; narrow_bytes of what Muon's iteration computes in
    """
    sent = _sent_bytes(config, number_bytes, min(narrow_bytes, number_bytes))
    if sent is None:
        return ()
    by_splits: dict[tuple[int, ...], list[str]] = {}
    for one in params:
        if one.role in MATRICES:
            by_splits.setdefault(tuple(one.splits), []).append(one.name)
    return tuple(Exchange(tuple(names), sent) for names in by_splits.values())


def _sent_bytes(config: Any, number_bytes: int, narrow_bytes: int) -> int | None:
    """Of a number of a whole matrix; None: it needs none, or is left out."""
    name = config.name
    if name == "muon" or (name == "numuon" and config.rank >= 1):
        return narrow_bytes
    if name in ("numuon", "swan") or (name == "sinkgd" and "spectral" in config.norms):
        return number_bytes
    return None


def _by_number(config: Any) -> bool:
    return config.name in _BY_NUMBER or (config.name == "spam" and config.density == 1)


def left_out(config: Any) -> str | None:
    """What of an optimizer's traffic is not counted, and why; None: nothing."""
    found = []
    spec = config
    while spec is not None:
        if spec.name == "numuon" and spec.schedule != "fixed":
            found.append("numuon until its rank is at its end: whole matrices are then sent in fewer bytes")
        elif not _by_number(spec) and _sent_bytes(spec, 4, 4) is None:
            found.append(f"{spec.name}, whose exchange of norms, factors or projections has no closed form here")
        spec = getattr(spec, "inner", None)
    return "; ".join(found) or None


def transfers(work: Work, degrees: Degrees, config: ParallelConfig) -> Iterator[Transfer]:
    for exchange in work.exchanges:
        stages = _by_rank(work, degrees, config, exchange)
        found = [t for names in stages for t in _of_rank(work, degrees, config, names, exchange)]
        for (kind, over, ranks, span), same in itertools.groupby(
            sorted(found, key=lambda t: (t.kind, t.over, t.ranks, t.span or 0)),
            key=lambda t: (t.kind, t.over, t.ranks, t.span),
        ):
            some = list(same)
            calls, sent = (math.ceil(sum(getattr(t, what) for t in some) / len(stages)) for what in ("calls", "bytes"))
            yield Transfer(kind, over, ranks, calls, sent, "matrices that the optimizer needs whole", span=span)


def _by_rank(work: Work, degrees: Degrees, config: ParallelConfig, exchange: Exchange) -> list[list[str]]:
    """Names of the matrices on each rank of a pipeline."""
    if degrees.pp == 1:
        return [list(exchange.names)]
    ranks = stage_ranks(degrees.pp, config.pipeline)
    held: list[list[str]] = [[] for _ in range(degrees.pp)]
    for rank, layers in zip(ranks, stage_layers(work.arch.n_layers, len(ranks), config.pipeline.layers), strict=True):
        held[rank] += [n for i in layers for n in exchange.names if n.startswith((f"blocks.{i}.", f"exits.{i}."))]
    return held


def _of_rank(
    work: Work, degrees: Degrees, config: ParallelConfig, names: Sequence[str], exchange: Exchange
) -> Iterator[Transfer]:
    chain = chain_of(config, degrees.world_size)
    data = degrees.dp_shard * degrees.cp if degrees.dp_shard > 1 or degrees.ep > 1 else 1
    over, n, span, replicas = ("dp_shard", "cp"), data, None, degrees.dp_replicate
    if chain is not None:
        over, n, span, replicas = OVER, chain.states, chain.states, degrees.world_size // chain.states
    plain = [name for name in names if len(work.shapes[name]) == 2]
    stacks = [name for name in names if len(work.shapes[name]) == 3]
    if degrees.ep > 1:
        ranks = data // degrees.ep
        shapes = [work.shapes[name] for name in stacks]
        apart = [s for s in shapes if shard_dim(torch.empty(s, device="meta"), degrees.ep, ranks) != 0]
        yield from _gathered([math.prod(s) // data for s in apart], over, data, work, exchange)
    if n > 1 and degrees.tp > 1:
        local = [shard_numbers(tensor_shard(name, work.shapes[name], degrees.tp), n) for name in plain]
        yield from _gathered(local, (*over, "tp"), n * degrees.tp, work, exchange)
    elif n > 1:
        yield from _shared_out(plain, [0] * len(plain), over, n, n * replicas, span, work, exchange)
    elif degrees.tp > 1:
        dims = [1 if name.endswith((".o.weight", ".down.weight")) else 0 for name in plain]
        replicas *= degrees.cp
        yield from _shared_out(plain, dims, ("tp",), degrees.tp, degrees.tp * replicas, None, work, exchange)


def _gathered(
    local: Sequence[int], over: tuple[str, ...], n: int, work: Work, exchange: Exchange
) -> Iterator[Transfer]:
    """Matrices of which a rank has ``local`` numbers, on every one of ``n`` ranks."""
    sent = sum(bytes_sent("all_gather", size * work.parameter_bytes, n) for size in local)
    calls = exchange.columns * len(local)
    if local:
        yield Transfer("all_gather", over, n, calls, exchange.columns * sent, "matrices")


def _shared_out(
    names: Sequence[str],
    dims: Sequence[int],
    over: tuple[str, ...],
    n: int,
    mesh_size: int,
    span: int | None,
    work: Work,
    exchange: Exchange,
) -> Iterator[Transfer]:
    """Matrices that are sharded over ``n`` ranks along ``dims``: to their owners and back, a round at a time."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[work.parameter_bytes]
    tensors = [torch.empty(work.shapes[name], dtype=dtype, device="meta") for name in names]
    rounds = _rounds(tensors, list(range(len(names))), ranks=mesh_size)
    numbers = 0  # that change ranks, to the owner or back
    for some in rounds:
        for i, owner in zip(some, owners([tensors[i].shape for i in some], n), strict=True):
            length = tensors[i].shape[dims[i]]
            kept = Shard.local_shard_size_and_offset(length, n, owner)[0]
            numbers += tensors[i].numel() // length * (length - kept)
    sent = (exchange.columns + 1) * numbers * exchange.number_bytes // n
    yield Transfer("all_to_all", over, n, 2 * len(rounds), sent, "matrices", span=span)
