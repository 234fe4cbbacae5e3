"""What AMSP sends in a step, to the byte, for ``trainwright plan comm``: planning/amsp.py without padding is its model.

Parameters are cut along their first dimension into s_o chunks of whole rows, the last one padded; a layer's transfers
are those of parallel/amsp/engine.py. The root (embedding, head, last norm) is gathered once a micro-step, blocks twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainwright.parallel.amsp.chain import Chain
from trainwright.parallel.comm.trace import bytes_sent

if TYPE_CHECKING:
    from trainwright.planning.comm_plan import Transfer

OVER = ("dp_replicate", "cp")


def transfers(
    groups: Sequence[Sequence[tuple[int, ...]]],
    chain: Chain,
    ranks: int,
    micro_steps: int,
    gathered_bytes: int,
    reduced_bytes: int,
    trained: Sequence[Sequence[tuple[int, ...]]],
) -> Iterator[Transfer]:
    """``groups``: shapes of the root's parameters, then of each block's; ``trained``: of those that are trained."""
    from trainwright.planning.comm_plan import Transfer

    p, g, o = chain.parameters, chain.gradients, chain.states
    chunks, reduced = (
        [sum(math.ceil(s[0] / o) * math.prod(s[1:]) for s in shapes) for shapes in some] for some in (groups, trained)
    )
    reduced = [size for size in reduced if size]

    def transfer(
        kind: str, members: int, span: int, sizes: Sequence[int], times: int, calls: int, what: str
    ) -> Transfer:
        sent = times * sum(bytes_sent(kind, size, members) for size in sizes)
        return Transfer(kind, OVER, members, calls, sent, what, overlaps=True, span=span)

    layers = len(reduced)
    again = [*chunks, *chunks[1:]]
    yield transfer("all_gather", p, p, [o // p * c * gathered_bytes for c in again], micro_steps,
                   micro_steps * len(again), "parameters")  # fmt: skip
    yield transfer("reduce_scatter", g, g, [o * c * reduced_bytes for c in reduced], micro_steps,
                   micro_steps * layers, "gradients")  # fmt: skip
    yield transfer("reduce_scatter", o // g, o, [o // g * c * reduced_bytes for c in reduced], 1, layers,
                   "shards of gradients")  # fmt: skip
    yield transfer("all_reduce", ranks // o, ranks, [c * reduced_bytes for c in reduced], 1, layers,
                   "gradients of replicas")  # fmt: skip
    yield transfer("all_gather", o // p, o, [c * gathered_bytes for c in chunks], 1, len(chunks),
                   "updated values")  # fmt: skip


def state_bytes(numbers: float, chain: Chain, gathered_bytes: int, reduced_bytes: int, parameter_bytes: int) -> float:
    """Bytes of parameters, gradients and AdamW's states on a rank; a master copy where the model computes in others."""
    master = parameter_bytes if gathered_bytes != parameter_bytes else 0
    return numbers * (gathered_bytes / chain.parameters + reduced_bytes / chain.gradients + (master + 8) / chain.states)


def reduced_bytes_of(config: Any, gathered_bytes: int, reduced_bytes: int) -> int:
    """Of a gradient as it is added up."""
    return gathered_bytes if config.sharding.gradient_dtype == "compute" else reduced_bytes


def chain_of(config: Any, ranks: int) -> Chain | None:
    """The chain of a ParallelConfig with its factors; None: another way of sharding."""
    sharding = config.sharding
    return None if sharding is None or ranks == 1 else sharding.chain
