"""``parallel: auto``: degrees for the processes that there are, by one rule that can be said in four lines.

1. Data parallelism first: every process trains other rows, ``dp_replicate`` = all of them, while the model's state fits
   into 90% of a device's memory.
2. Where it does not: ``dp_shard``, the smallest number of shards that fits.
3. Where all shards together do not suffice, or there are fewer rows in a step than processes: ``tp`` within a machine,
   up to 8, and ``cp``; the smallest product of the two that fits, of equal ones that with less ``cp``.
4. Where nothing fits: what needs least, with a warning.

``pp`` and ``ep`` stay as the recipe has them. Only degrees that :func:`trainwright.parallel.legal.check_cut` accepts
are taken. What counts is in :func:`device_bytes`: 16 bytes a parameter (weight, gradient and Adam's two moments in
float32), the blocks that FSDP2 holds whole, and activations by the count of arXiv:2205.05198 without attention scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.core.errors import ConfigError
from trainwright.models.architecture import Architecture
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.legal import check_cut

SHARE = 0.9  # of a device's memory; the rest is for buffers of communication and fragments
STATE_BYTES = 16
NUMBER_BYTES = 4
ACTIVATIONS = 17  # numbers of width ``dim`` that a block keeps for the backward pass, per token (34 bytes at 16 bit)
MOST_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class Work:
    """What has to fit: ``tokens`` of a micro-batch in rows of ``seq_len``, ``rows`` in a step over all ranks."""

    arch: Architecture | None  # None: a model whose size is not known before it is built
    seq_len: int
    rows: int
    tokens: int
    recompute: bool = False  # only the input of each block is kept for the backward pass


@dataclass(frozen=True)
class Machine:
    """``memory`` bytes of each device, ``devices`` in one machine."""

    memory: int
    devices: int


@dataclass(frozen=True)
class Choice:
    degrees: Degrees
    needed: int | None  # bytes on each device; None: not known
    memory: int

    @property
    def fits(self) -> bool:
        return self.needed is None or self.needed <= SHARE * self.memory

    def sentence(self) -> str:
        d = self.degrees
        named = [("dp_replicate", d.dp_replicate), ("dp_shard", d.dp_shard), ("cp", d.cp), ("tp", d.tp)]
        chosen = " ".join(f"{key}={value}" for key, value in named if value > 1 or key == "dp_replicate")
        if self.needed is None:
            return f"parallel: auto chose {chosen} (the size of this model is not known beforehand)"
        return (
            f"parallel: auto chose {chosen} (about {self.needed / 2**30:.2f} of {self.memory / 2**30:.0f} GiB a device"
            f"{'' if self.fits else '; nothing that is legal here fits'})"
        )


def choose(world_size: int, config: ParallelConfig, work: Work, machine: Machine) -> Choice:
    """Degrees by the rule above. Raises ConfigError where none are legal."""
    options = list(_legal(world_size, config, work, machine))
    if not options:
        raise ConfigError(_why_not(world_size, config, work, machine), key="parallel", value="auto")
    if work.arch is None:
        degrees = max(options, key=lambda d: d.dp_shard)  # whatever its size, this holds the most
        return Choice(degrees, None, machine.memory)
    choices = [Choice(d, device_bytes(d, config, work), machine.memory) for d in options]
    return next((c for c in choices if c.fits), min(choices, key=lambda c: c.needed or 0))


def _legal(world_size: int, config: ParallelConfig, work: Work, machine: Machine) -> Iterator[Degrees]:
    """All legal degrees, those that talk least first."""
    if world_size % config.pp:
        return
    inner = world_size // config.pp
    splits = [
        (tp, cp)
        for tp in _divisors(inner)
        for cp in _divisors(inner // tp)
        if tp <= MOST_TENSOR_PARALLEL and machine.devices % tp == 0 and inner // (tp * cp) <= work.rows
    ]
    for tp, cp in sorted(splits, key=lambda s: (s[0] * s[1], s[1])):
        dp = inner // (tp * cp)
        for dp_shard in _divisors(dp):
            degrees = Degrees(dp // dp_shard, dp_shard, cp, tp, config.pp, config.ep)
            if (dp_shard * cp) % config.ep:
                continue
            try:
                check_cut(degrees, config, work.arch, work.seq_len)
            except ConfigError:
                continue
            yield degrees


def _why_not(world_size: int, config: ParallelConfig, work: Work, machine: Machine) -> str:
    fewer = next(
        (n for n in range(world_size - 1, 0, -1) if next(_legal(n, config, work, machine), None) is not None), None
    )
    start = f"start {fewer} (--nproc {fewer}), or " if fewer else ""
    fixed = "".join(f", {k}={getattr(config, k)}" for k in ("pp", "ep") if getattr(config, k) > 1)
    return (
        f"there are no legal degrees for {world_size} processes with {work.rows} rows a step{fixed}; {start}"
        "raise train.global_batch_tokens"
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# -- bytes ------------------------------------------------------------------------------------------------------------


def block_params(arch: Architecture, layer: int) -> tuple[int, int]:
    """Parameters of a block: all, and of these the experts' (which ``tp`` leaves whole)."""
    head = arch.head_dim
    attention = 2 * arch.dim * head * (arch.n_heads + arch.n_kv_heads)
    attention += head * (arch.n_heads + 2 * arch.n_kv_heads) * arch.qkv_bias
    attention += arch.dim * arch.out_bias + 2 * head * arch.qk_norm
    norms = 2 * arch.dim
    if arch.is_moe(layer):
        experts = 3 * arch.n_experts * arch.dim * arch.moe_ffn_dim
        return attention + norms + arch.dim * arch.n_experts + experts, experts
    return attention + norms + 3 * arch.dim * arch.ffn_dim, 0


def root_params(arch: Architecture) -> int:
    """Parameters outside of the blocks: embedding, head, last norm."""
    return arch.vocab_size * arch.dim * (1 if arch.tie_embeddings else 2) + arch.dim


def device_bytes(degrees: Degrees, config: ParallelConfig, work: Work) -> int:
    """Bytes that a device has to hold at once, for ``work.arch``."""
    arch, d = work.arch, degrees
    if arch is None:
        raise ValueError("the size of this model is not known")
    counts = [block_params(arch, layer) for layer in range(arch.n_layers)]
    cut = [(whole - experts) / d.tp + experts for whole, experts in counts]  # of each block, on a rank of a tp group
    root = root_params(arch) / d.tp
    state = STATE_BYTES * (sum(cut) / d.pp + root)
    gathered = 0.0
    if d.dp_shard > 1:
        state /= d.dp_shard * d.cp
        # The block at work and the next one, the gradient of one, and the root with its gradient, all whole.
        gathered = NUMBER_BYTES * (3 * max(cut) + 2 * root)
    kept = arch.n_layers / d.pp * (1 if work.recompute else ACTIVATIONS) + (ACTIVATIONS if work.recompute else 0)
    tokens = work.tokens / d.cp / (d.tp if config.sequence_parallel else 1)
    return int(state + gathered + NUMBER_BYTES * kept * tokens * arch.dim)
