"""What the stages of a pipeline hold of a model, and what they pass on: for planning/comm_plan.py, which takes the mean
over the ranks of a column."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.pipeline.fill import exits_by_stage, unembedding_stages
from trainwright.parallel.pipeline.layout import stage_layers, stage_ranks

if TYPE_CHECKING:
    from trainwright.planning.comm_plan import Transfer, Work

Group = list[tuple[str, tuple[int, ...]]]  # names and shapes of the parameters that FSDP2 takes together


def mean(found: Iterable[Transfer], pp: int) -> Iterator[Transfer]:
    """Of what the whole model sends, the share of a rank."""
    for t in found:
        yield t if pp == 1 else replace(t, calls=math.ceil(t.calls / pp), bytes=t.bytes // pp)


def windows(work: Work, degrees: Degrees, config: ParallelConfig) -> int:
    """Attention plans that a column makes of a micro-batch: one for each window of each stage."""
    found = [work.arch.window(i) for i in range(work.arch.n_layers)]
    stages = degrees.pp * (config.pipeline.stages_per_rank if degrees.pp > 1 else 1)
    cut = stage_layers(len(found), stages, config.pipeline.layers if degrees.pp > 1 else None)
    return sum(len({found[i] for i in layers}) for layers in cut)


def holders(work: Work, degrees: Degrees, config: ParallelConfig) -> list[int]:
    """Stages that hold the weight of the head: the last, the first where it is the embedding too, and those with an
    exit that uses it."""
    last, exits = degrees.pp * config.pipeline.stages_per_rank - 1, work.exit_settings
    if exits is not None:
        layers = stage_layers(work.arch.n_layers, last + 1, config.pipeline.layers)
        return unembedding_stages(exits, exits_by_stage(exits.positions, layers), work.tied)
    return [0, last] if work.tied else [last]


def groups(work: Work, degrees: Degrees, config: ParallelConfig, root: Group) -> list[Group]:
    """``root``, what is in no block, as the stages hold it: each but blocks of its own."""
    embed, head = [p for p in root if p[0] == "embed.weight"], [p for p in root if p[0] == "head.weight"]
    rest = [p for p in root if p not in embed and p not in head]
    more = len(holders(work, degrees, config)) - 1  # besides the last stage
    if work.tied:
        return [embed, rest + embed, *([embed] * (more - 1))]
    return [embed, rest + head, *([head] * more)]


def passed_on(
    work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int], stream_bytes: int, head_bytes: int
) -> Iterator[Transfer]:
    """Between stages: the stream of each micro-batch with what experts add to it, gradients, and those of a weight that
    several stages hold.

    head_bytes  of the gradient of the unembedding on a rank
    """
    from trainwright.planning import comm_context
    from trainwright.planning.comm_plan import Transfer

    arch, pp = work.arch, degrees.pp
    count, tokens = comm_context.passed_on(work, degrees, config, sizes)
    if degrees.tp > 1 and config.sequence_parallel:
        length = work.seq_len // degrees.cp
        whole = tokens == sum(sizes) * length  # rows, each filled up to a multiple of tp; else documents
        tokens = sum(sizes) * -(-length // degrees.tp) if whole else tokens // degrees.tp
    forward = backward = tokens * arch.dim * stream_bytes
    tensors = 2 * count
    layers = sum(arch.is_moe(i) for i in range(arch.n_layers))
    if layers:  # the balancing loss so far, and the counts of all layers
        wide = max(4, stream_bytes)
        forward += count * (wide + 8 * layers * arch.n_experts)
        backward += count * wide * (arch.balance == "aux_loss")
        tensors += count * (2 + (arch.balance == "aux_loss"))
    ranks = stage_ranks(pp, config.pipeline)
    hops = sum(a != b for a, b in itertools.pairwise(ranks))  # in a V, a rank has stages that follow each other
    yield from mean(
        [Transfer("send", ("pp",), pp, tensors * hops, (forward + backward) * hops, "activations and their gradients")],
        pp,
    )
    held = holders(work, degrees, config)
    frozen = ("embed.weight" if work.tied else "head.weight") in work.frozen
    frozen = frozen or (work.exit_settings is not None and work.exit_settings.frozen)
    if ranks[held[0]] != ranks[held[-1]] and not frozen:
        messages = 2 * (len(held) - 1)
        shared = Transfer("send", ("pp",), pp, messages, messages * head_bytes, "gradients of the tied head")
        yield from mean([shared], pp)
