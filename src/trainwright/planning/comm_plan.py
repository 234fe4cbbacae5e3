"""What each way of sharing a model over ranks sends per step, exactly, and how long a step takes by a simple model.

Bytes are those that one rank sends in the forward and backward passes of a step, as parallel/comm/trace.py records
them; tests hold the two against each other. With n ranks in a group, P bytes of parameters, m micro-batches of b rows,
S = b T D bytes of residual stream and K the bytes of a rank's keys:

    DDP     all_reduce 2 (n-1)/n P of gradients, once
    FSDP2   all_gather of each block, forward and again backward, (n-1)/n P each, and reduce_scatter (n-1)/n P, m times
    HSDP    besides, all_reduce of the shards of the gradient over the replicas, once
    TP      2 (2 L + 1) all_gathers and as many reduce_scatters of (n-1)/n S, m times; the loss a few numbers a token;
            gradients of norms, and of whatever else is held whole, once
    ring    per layer 2 (r-1) K forward, 2 (r-1) K + 2 r K backward, m times
    Ulysses per layer 4 (u-1)/u (Q + K) in all, m times
    PP      S to the next stage and S back, m times; a tied head's gradient between first and last stage, once. FSDP2
            gathers and reduces once
    EP      per layer 4 (e-1)/e of the rows of k experts a token, m times, if experts are chosen alike

The time of a step is a simple one: what overlaps with computing (gradients, parameters, the ring) hides behind it, the
rest adds up, and a pipeline of p stages stands idle for (p-1)/(m+p-1) of the time. A transfer takes its messages times
the latency of the slowest link that its group spans, and its bytes over that link's bandwidth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from trainwright.core.errors import ConfigError
from trainwright.models.architecture import Architecture
from trainwright.parallel.comm.trace import bytes_sent
from trainwright.parallel.config import Degrees, ParallelConfig, context_method, micro_batch_rows
from trainwright.parallel.legal import check_cut
from trainwright.parallel.mesh import DIMENSIONS
from trainwright.parallel.pipeline.legal import check_pipeline
from trainwright.parallel.sppo.sppo import sppo_of
from trainwright.planning import comm_passes, comm_stages
from trainwright.planning.amsp_comm import chain_of, reduced_bytes_of
from trainwright.planning.amsp_comm import state_bytes as sharded_state_bytes
from trainwright.planning.amsp_comm import transfers as amsp_transfers


class Link(BaseModel):
    """A link as one rank sees it."""

    model_config = ConfigDict(extra="forbid")

    gb_per_s: PositiveFloat = Field(description="10^9 bytes a second that a rank sends.")
    latency_us: PositiveFloat = Field(description="Microseconds until the first byte is there.")


class Cluster(BaseModel):
    """Machines as the step-time model sees them. The defaults are about those of eight H100 a node on InfiniBand."""

    model_config = ConfigDict(extra="forbid")

    ranks_per_node: PositiveInt = 8
    inside: Link = Field(default_factory=lambda: Link(gb_per_s=300, latency_us=5))
    between: Link = Field(default_factory=lambda: Link(gb_per_s=45, latency_us=12))
    tflops: PositiveFloat = Field(990, description="Peak of a rank in the compute dtype, 10^12 per second.")
    efficiency: float = Field(0.45, gt=0, le=1, description="Share of the peak that matrix products reach.")
    memory_gb: PositiveFloat = Field(80, description="10^9 bytes of a rank.")

    @classmethod
    def load(cls, path: Path | None) -> Cluster:
        """From YAML; None: the defaults. Raises ConfigError naming the key."""
        import yaml

        if path is None:
            return cls()
        try:
            return cls.model_validate(yaml.safe_load(path.read_text("utf-8")) or {})
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as a cluster: {error}", key="--cluster") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{first['msg']}; keys are {', '.join(cls.model_fields)}", key=f"{path}: {key}") from None


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over one group: what a rank sends in a step."""

    kind: str
    over: tuple[str, ...]  # dimensions of the mesh
    ranks: int
    calls: int
    bytes: int
    what: str
    overlaps: bool = False  # with computing
    span: int | None = None  # neighbouring ranks among whom the groups lie; None: whole dimensions


@dataclass(frozen=True)
class Exchange:
    """Matrices of which an optimizer needs each whole (optim/whole.py), in one call."""

    names: tuple[str, ...]
    number_bytes: int  # as they are sent
    columns: int = 1  # tensors of each that go to the rank that computes with it; one comes back


@dataclass(frozen=True)
class Work:
    """A step, apart from how it is shared: shapes of the model's parameters by name, and what goes through it."""

    arch: Architecture
    shapes: dict[str, tuple[int, ...]]
    seq_len: int
    rows: int  # of the global batch
    micro_rows: int | None  # of a micro-batch on a rank; None: as many as a trainer takes
    flops_per_token: float
    activation_bytes: int = 2  # of a number that products are made of
    gathered_bytes: int = 2  # of a parameter as FSDP2 gathers it
    parameter_bytes: int = 4
    reduced_bytes: int = 4  # of a gradient as it is added up
    lengths: tuple[tuple[int, ...], ...] | None = None  # of the documents of each row; None: a row is one
    exits: int = 0  # early ones; their parameters are among the shapes
    exit_settings: Any = None  # of these (models/early_exit.py); stages of a pipeline go by them
    frozen: frozenset[str] = frozenset()  # parameters that are not trained
    recomputed: frozenset[int] = frozenset()  # layers whose activations are made again in the backward pass
    exchanges: tuple[Exchange, ...] = ()  # of the optimizer

    @property
    def tied(self) -> bool:
        return self.arch.tie_embeddings

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.shapes.items() if name not in self.frozen}

    def local_rows(self, degrees: Degrees) -> tuple[int, int]:
        """Rows of a step, and of a micro-batch, on each of the ranks that see different rows."""
        rows = math.ceil(self.rows / (degrees.dp_replicate * degrees.dp_shard))
        return rows, micro_batch_rows(rows, self.seq_len, degrees.pp, self.micro_rows)

    def stream_bytes(self, degrees: Degrees, config: ParallelConfig) -> int:
        """Of a number in the residual stream: what FSDP2 casts embeddings to, else these as they are held."""
        data = degrees.dp_replicate * degrees.dp_shard * degrees.cp > 1
        cast = _sharded(degrees) or (data and (degrees.tp > 1 or degrees.pp > 1 or sppo_of(config) is not None))
        return self.activation_bytes if cast else self.parameter_bytes


def _sharded(degrees: Degrees) -> bool:
    return degrees.dp_shard > 1 or degrees.ep > 1


@dataclass
class Prediction:
    """One layout: what a rank sends in a step, how long the step takes, and what a rank holds."""

    degrees: Degrees
    transfers: list[Transfer]
    compute_s: float
    exposed_s: float
    hidden_s: float
    bubble: float
    step_s: float
    state_gb: float  # parameters, gradients and AdamW's state
    note: str = ""
    links: dict[str, int] = field(default_factory=dict)  # bytes inside a node and between nodes

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.transfers)


def planned_transfers(work: Work, degrees: Degrees, config: ParallelConfig) -> list[Transfer]:
    """What one rank sends in the forward and backward passes of a step, and for ``work.exchanges`` in the optimizer's
    step. Weights of all tokens are above 0.

    Pipelines: the mean over the stages. What :func:`left_out` names is not counted.
    """
    return [t for t in _transfers(work, degrees, config) if t.ranks > 1 and t.bytes]


def left_out(work: Work, degrees: Degrees, config: ParallelConfig) -> str | None:
    """What of the passes themselves is not counted, and why."""
    if degrees.pp > 1 and config.pipeline.schedule == "zero_bubble" and work.recomputed:
        return (
            "what recomputation sends again: zero_bubble goes backward through a stage in many parts, and activations "
            "are made anew for each (1f1b and interleaved make them once)"
        )
    return None


def _transfers(work: Work, degrees: Degrees, config: ParallelConfig) -> Iterator[Transfer]:
    from trainwright.planning import comm_optimizer, comm_tensor

    if left_out(work, degrees, config) is not None:
        work = replace(work, recomputed=frozenset())
    world = degrees.world_size
    yield Transfer("all_reduce", DIMENSIONS, world, 1, bytes_sent("all_reduce", 8, world), "weight of the batch")
    rows, micro_rows = work.local_rows(degrees)
    sizes = [min(micro_rows, rows - i) for i in range(0, rows, micro_rows)]
    if degrees.pp > 1:  # all have one shape
        sizes = [math.ceil(rows / len(sizes))] * len(sizes)
    yield from comm_stages.mean(_data_parallel(work, degrees, config, len(sizes)), degrees.pp)
    if degrees.tp > 1:
        yield from comm_stages.mean(comm_tensor.tensor_parallel(work, degrees, config, sizes), degrees.pp)
    if degrees.ep > 1:
        yield from comm_stages.mean(comm_tensor.expert_parallel(work, degrees, sizes), degrees.pp)
    if degrees.cp > 1:
        yield from _context_parallel(work, degrees, config, sizes)
    if degrees.pp > 1:
        embed = tensor_shard("embed.weight", work.shapes["embed.weight"], degrees.tp)
        head = shard_numbers(embed, shards(degrees)) * work.parameter_bytes
        stream = work.stream_bytes(degrees, config)
        yield from comm_stages.passed_on(work, degrees, config, sizes, stream, head)
    yield from comm_optimizer.transfers(work, degrees, config)


def shards(degrees: Degrees) -> int:
    """Ranks that FSDP2 divides a gradient over."""
    return degrees.dp_shard * degrees.cp if _sharded(degrees) else 1


def _groups(work: Work, degrees: Degrees, config: ParallelConfig) -> list[comm_stages.Group]:
    """Parameters as FSDP2 takes them together, as this rank's tensor-parallel shards: the root, then block by block.

    Where experts are spread they are left out, and routers are with the root, which is kept as they are. In a pipeline
    those of all stages: in place of the root what each has besides blocks."""
    blocks: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in work.shapes.items():
        if degrees.ep > 1 and len(shape) == 3:
            continue
        block = name.split(".")[1] if name.startswith("blocks.") and (degrees.ep == 1 or "router" not in name) else ""
        blocks.setdefault(block, []).append((name, tensor_shard(name, shape, degrees.tp)))
    root, *rest = (blocks[key] for key in sorted(blocks, key=lambda k: int(k or -1)))
    return [*([root] if degrees.pp == 1 else comm_stages.groups(work, degrees, config, root)), *rest]


def tensor_shard(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Shape of a rank's part of a parameter."""
    if tp == 1 or len(shape) == 3 or "norm" in name or "router" in name:
        return shape
    dim = 1 if name.endswith((".o.weight", ".down.weight")) else 0
    if name.endswith(".o.bias"):
        return shape
    return tuple(math.ceil(n / tp) if i == dim else n for i, n in enumerate(shape))


def shard_numbers(shape: Sequence[int], n: int) -> int:
    """Numbers of a shard, padding included: FSDP2 cuts the first dimension and pads it up."""
    return math.ceil(shape[0] / n) * math.prod(shape[1:])


def _data_parallel(work: Work, degrees: Degrees, config: ParallelConfig, micro: int) -> Iterator[Transfer]:
    """Of all stages of a pipeline, which gather and reduce once a step."""
    groups = _groups(work, degrees, config)
    trained = [[p for p in group if p[0] not in work.frozen] for group in groups]
    if (chain := chain_of(config, degrees.world_size)) is not None:
        shapes, reduced_shapes = ([[shape for _, shape in group] for group in some] for some in (groups, trained))
        reduced = reduced_bytes_of(config, work.gathered_bytes, work.reduced_bytes)
        yield from amsp_transfers(
            shapes, chain, degrees.world_size, micro, work.gathered_bytes, reduced, reduced_shapes
        )
        return
    if degrees.dp_shard == 1 and degrees.ep == 1:
        n = degrees.dp_replicate * degrees.cp
        size = sum(math.prod(shape) for group in trained for _, shape in group) * work.reduced_bytes
        yield Transfer(
            "all_reduce", ("dp_replicate", "cp"), n, 1, bytes_sent("all_reduce", size, n), "gradients", overlaps=True
        )
        return
    n, over = degrees.dp_shard * degrees.cp, ("dp_shard", "cp")
    gathered, kept = (
        [sum(shard_numbers(shape, n) for _, shape in group) for group in some] for some in (groups, trained)
    )
    kept = [size for size in kept if size]  # of gradients
    times = micro if config.accumulate == "sharded" else 1
    reshard = config.reshard_after_forward
    if degrees.pp > 1:
        micro, times, reshard = 1, 1, False
    if reshard:  # blocks, behind the root
        again = comm_passes.gathered_again(work)
        gathered = [*gathered, *(size for size, here in zip(gathered[1:], again, strict=True) if here)]
    sent = micro * bytes_sent("all_gather", sum(gathered) * work.gathered_bytes, n)
    yield Transfer("all_gather", over, n, micro * len(gathered), sent, "parameters", True)
    sent = times * bytes_sent("reduce_scatter", sum(kept) * n * work.reduced_bytes, n)
    yield Transfer("reduce_scatter", over, n, times * len(kept), sent, "gradients", True)
    r = degrees.dp_replicate
    sent = bytes_sent("all_reduce", sum(kept) * work.reduced_bytes, r)
    yield Transfer("all_reduce", ("dp_replicate",), r, len(kept), sent, "shards of gradients", True)
    if degrees.ep > 1:
        yield from _expert_shards(work, degrees, micro, reshard, times)


def _expert_shards(work: Work, degrees: Degrees, micro: int, reshard: bool, times: int) -> Iterator[Transfer]:
    """What FSDP2 does with a rank's experts, over the ranks that hold the same ones."""
    n, over = degrees.dp_shard * degrees.cp // degrees.ep, ("dp_shard", "cp")
    sizes, trained = (_experts_by_layer(shapes, degrees.ep) for shapes in (work.shapes, work.trained))
    again = comm_passes.gathered_again(work)
    gathered = sum(size * (1 + (reshard and again[i])) for i, size in sizes.items())
    calls = micro * sum(1 + (reshard and again[i]) for i in sizes)
    sent = micro * bytes_sent("all_gather", gathered // n * work.gathered_bytes, n)
    yield Transfer("all_gather", over, n, calls, sent, "experts", True)
    sent = times * bytes_sent("reduce_scatter", sum(trained.values()) * work.reduced_bytes, n)
    yield Transfer("reduce_scatter", over, n, times * len(trained), sent, "gradients of experts", True)
    r = degrees.dp_replicate
    sent = bytes_sent("all_reduce", sum(trained.values()) // n * work.reduced_bytes, r)
    yield Transfer("all_reduce", ("dp_replicate",), r, len(trained), sent, "shards of gradients of experts", True)


def _experts_by_layer(shapes: dict[str, tuple[int, ...]], ep: int) -> dict[int, int]:
    """Numbers of the experts that a rank holds."""
    found: dict[int, int] = {}
    for name, shape in shapes.items():
        if len(shape) == 3:
            layer = int(name.split(".")[1])
            found[layer] = found.get(layer, 0) + math.prod(shape) // ep
    return found


def _context_parallel(work: Work, degrees: Degrees, config: ParallelConfig, sizes: Sequence[int]) -> Iterator[Transfer]:
    from trainwright.planning import comm_context, comm_tensor

    method: Any = context_method(config)
    count = comm_context.micro_batches(work, degrees, config, sizes) if work.arch.n_experts else 0
    balance = comm_tensor.balance(work, ("cp",), degrees.cp, count, back=work.arch.balance == "aux_loss")
    if method.name not in comm_context.FOLLOWING:
        yield from comm_stages.mean([*comm_context.rows_spread(work, degrees, config, sizes), *balance], degrees.pp)
        return
    yield from comm_stages.mean(balance, degrees.pp)
    yield from comm_context.transfers(work, degrees, config, sizes)


def predict(work: Work, degrees: Degrees, config: ParallelConfig, cluster: Cluster) -> Prediction:
    """The layout's transfers and step time on ``cluster``."""
    transfers = planned_transfers(work, degrees, config)
    exposed = hidden = 0.0
    links = {"inside": 0, "between": 0}
    for t in transfers:
        name = "inside" if (t.span or _extent(t.over, degrees)) <= cluster.ranks_per_node else "between"
        link: Link = getattr(cluster, name)
        links[name] += t.bytes
        messages = {"all_reduce": 2 * (t.ranks - 1), "send": 1}.get(t.kind, t.ranks - 1) * t.calls
        seconds = messages * link.latency_us * 1e-6 + t.bytes / (link.gb_per_s * 1e9)
        exposed, hidden = (exposed, hidden + seconds) if t.overlaps else (exposed + seconds, hidden)
    tokens = work.rows * work.seq_len
    compute = work.flops_per_token * tokens / degrees.world_size / (cluster.tflops * 1e12 * cluster.efficiency)
    rows, micro_rows = work.local_rows(degrees)
    micro = math.ceil(rows / micro_rows)
    chunks = getattr(context_method(config), "chunks", 1) if degrees.pp > 1 else 1  # SPPO's pass one behind the other
    micro *= chunks if isinstance(chunks, int) else 1
    waiting = (degrees.pp - 1) / config.pipeline.stages_per_rank
    bubble = waiting / (micro + waiting)
    step = (max(compute, hidden) + exposed) / (1 - bubble)
    parameters = sum(math.prod(s) for s in work.shapes.values()) / (degrees.tp * degrees.pp)
    trained = sum(math.prod(s) for s in work.trained.values()) / (degrees.tp * degrees.pp)
    state = parameters * work.parameter_bytes + trained * (work.parameter_bytes + 8)
    state /= degrees.dp_shard * degrees.cp if degrees.dp_shard > 1 else 1
    if (chain := chain_of(config, degrees.world_size)) is not None:
        reduced = reduced_bytes_of(config, work.gathered_bytes, work.reduced_bytes)
        state = sharded_state_bytes(parameters, chain, work.gathered_bytes, reduced, work.parameter_bytes)
    note = "" if state < cluster.memory_gb * 1e9 else f"does not fit into {cluster.memory_gb:g} GB"
    return Prediction(degrees, transfers, compute, exposed, hidden, bubble, step, state / 1e9, note, links)


def _extent(over: Sequence[str], degrees: Degrees) -> int:
    """Neighbouring ranks that a group over these dimensions spans; tp is innermost."""
    stride, extent = 1, 1
    for dim in reversed(DIMENSIONS):
        size = getattr(degrees, dim)
        if dim in over and size > 1:
            extent += stride * (size - 1)
        stride *= size
    return extent


def layouts(work: Work, config: ParallelConfig, world: int, cluster: Cluster, most: int = 10) -> list[Prediction]:
    """The fastest layouts of ``world`` ranks by powers of two that fit the model, the batch and the memory."""
    powers = [2**i for i in range(world.bit_length())]
    found = []
    for shard, cp, tp, pp in itertools.product(powers, repeat=4):
        inner = shard * cp * tp * pp
        if world % inner or tp > cluster.ranks_per_node or work.rows < world // (cp * tp * pp):
            continue
        degrees = Degrees(world // inner, shard, cp, tp, pp)
        try:
            check_cut(degrees, config, work.arch, work.seq_len)
            if pp > 1:
                rows, micro_rows = work.local_rows(degrees)
                check_pipeline(degrees, config, math.ceil(rows / micro_rows))
        except ConfigError:
            continue
        prediction = predict(work, degrees, replace_degrees(config, degrees), cluster)
        if not prediction.note:
            found.append(prediction)
    return sorted(found, key=lambda p: p.step_s)[:most]


def replace_degrees(config: ParallelConfig, degrees: Degrees) -> ParallelConfig:
    """``config`` with these degrees."""
    return config.model_copy(
        update={k: getattr(degrees, k) for k in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
    )
