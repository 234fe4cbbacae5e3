"""What ranks of tensor and expert parallelism send in a step: for planning/comm_plan.py.

A half of a layer gathers the stream before it and scatters its sum behind it; backward the other way round. Where a
block is recomputed, that is sent once more, but for the sum behind its feed-forward, which nobody needs then unless
dropout follows. The same holds for rows that come back from their experts: the weights' gradients need them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainwright.parallel.comm.trace import bytes_sent
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.planning import comm_passes
from trainwright.planning.comm_plan import Transfer, Work, shard_numbers, shards


def expert_parallel(work: Work, degrees: Degrees, sizes: Sequence[int]) -> Iterator[Transfer]:
    """Tokens to their experts and back, forward and backward, if experts are chosen alike; and how many go where."""
    arch, n, over = work.arch, degrees.ep, ("dp_shard", "cp")
    spread = [one for i, one in enumerate(comm_passes.layers(work)) if arch.is_moe(i)]
    forward, backward = sum(one.forward for one in spread), sum(one.backward for one in spread)
    tokens = sum(sizes) * math.ceil(work.seq_len / degrees.cp / degrees.tp)
    rows = 2 * bytes_sent("all_to_all", tokens * arch.n_experts_per_token * arch.dim * work.activation_bytes, n)
    counts = len(sizes) * bytes_sent("all_to_all", 8 * arch.n_experts, n)
    calls, sent = len(sizes) * (3 * forward + 2 * backward), (forward + backward) * rows + forward * counts
    yield Transfer("all_to_all", over, n, calls, sent, "tokens to experts and back")


def tensor_parallel(work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int]) -> Iterator[Transfer]:
    arch, n, over = work.arch, degrees.tp, ("tp",)
    length = work.seq_len // degrees.cp
    padded = math.ceil(length / n) * n if config.sequence_parallel else length
    row, column = getattr(config.tensor, "row", 1), getattr(config.tensor, "column", 1)
    stream, narrow = work.stream_bytes(degrees, config), work.activation_bytes
    before, behind = _halves(work, config)
    # Of early exits: the way to the head, and the feed-forwards of their own.
    own = sum(name.startswith("exits.") and name.endswith(".mlp.down.weight") for name in work.shapes)
    exits = work.exits + 2 * own
    embedded, reached = "embed.weight" not in work.frozen, comm_passes.layers(work)[-1].backward
    # What embeddings are added up in is the stream's type; all else is cast to that of products.
    if config.sequence_parallel:
        widths = {
            "all_gather": (before.forward + behind.backward + 1 + exits) * narrow + embedded * stream,
            "reduce_scatter": (behind.forward + before.backward + reached + exits) * narrow + stream,
        }
    else:
        widths = {"all_reduce": (behind.forward + before.backward + reached + exits) * narrow + stream}
    halves = behind.forward * column + before.backward  # Domino adds slices up one by one, while others are computed
    for kind, width in widths.items():
        total = 0
        for b in sizes:
            size = b * padded * arch.dim * width
            total += bytes_sent(kind, size // n if kind == "all_gather" else size, n)
        calls = len(sizes) * (halves * row + 2 * row + exits)
        yield Transfer(kind, over, n, calls, total, "the residual stream", overlaps=row * column > 1)
    held = sum(_held_shard(n, shape, degrees) for n, shape in work.trained.items() if _whole(n, shape, config))
    size = bytes_sent("all_reduce", held * work.parameter_bytes, n)
    yield Transfer("all_reduce", over, n, degrees.pp, size, "gradients of what is held whole")  # once a step
    yield from balance(work, over, n, len(sizes), back=False)
    tokens, losses, wide = sum(sizes) * length, 1 + work.exits, max(4, work.activation_bytes)
    sent = losses * bytes_sent("all_reduce", tokens * (3 * wide + 8), n)
    yield Transfer("all_reduce", over, n, 3 * losses * len(sizes), sent, "the loss")


class _Times:
    """Of a collective, over all halves of all layers."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def add(self, forward: int, backward: bool) -> None:
        self.forward += forward
        self.backward += backward


def _halves(work: Work, config: ParallelConfig) -> tuple[_Times, _Times]:
    """Collectives before the halves of the layers, and behind: attention, and the dense feed-forward."""
    before, behind = _Times(), _Times()
    noise = work.arch.dropout > 0 and config.tensor is None  # Domino keeps the noise apart from the sum
    for i, one in enumerate(comm_passes.layers(work)):
        before.add(one.forward, one.backward)
        behind.add(one.forward, one.backward)
        if not work.arch.is_moe(i):
            before.add(one.forward, one.backward)
            behind.add(one.forward if noise else 1, one.backward)
    return before, behind


def _whole(name: str, shape: tuple[int, ...], config: ParallelConfig) -> bool:
    """Whether tensor-parallel ranks hold it whole and each use it on other tokens or heads."""
    if "norm" in name:
        return config.sequence_parallel or ".attn.q_norm" in name or ".attn.k_norm" in name
    return len(shape) == 3 or "router" in name or (name.endswith(".o.bias") and config.sequence_parallel)


def _held_shard(name: str, shape: tuple[int, ...], degrees: Degrees) -> int:
    """Numbers of its gradient on a rank."""
    n = shards(degrees)
    if len(shape) == 3 and degrees.ep > 1:
        return math.prod(shape) // n
    return shard_numbers(shape, n)


def balance(work: Work, over: tuple[str, ...], n: int, micro: int, *, back: bool) -> Iterator[Transfer]:
    """Shares and counts of the experts, and the number of tokens: at each forward pass and, with ``back``, backward."""
    arch = work.arch
    if arch.balance == "bias":
        return
    spread = [one for i, one in enumerate(comm_passes.layers(work)) if arch.is_moe(i)]
    calls = micro * sum(one.forward + (back and one.backward) for one in spread)
    sent = bytes_sent("all_reduce", max(4, work.activation_bytes) * (2 * arch.n_experts + 1), n)
    yield Transfer("all_reduce", over, n, calls, calls * sent, "balance of the experts")
