"""FlexSP: every micro-batch of a step has its own mix of sequence-parallel groups (planning/flexsp.py).

The documents of a step, whichever rows they came in, are planned into micro-batches. In each of these a rank is in
exactly one group, an aligned run of d = 1, 2, 4, ... neighbours, which holds some documents end to end as one row and
runs Ulysses attention of degree d on it. The groups are made once: of n ranks 2n - 1, of which n are single ranks.

No deadlock: all ranks compute as many micro-batches in the same order, in each a rank talks to one group only (and, of
the balance of experts, to all ranks, layer by layer), and a group's members issue the same collectives in it. So who
waits, waits for ranks in an earlier or the same micro-batch, and of these the earliest can always go on. The gradient
is the plain one: the loss sums over documents.

In a pipeline the first stage's plan is every stage's, all micro-batches of a step are filled up to one length, and what
stands above for micro-batches holds for the actions of a schedule (base.py, ``Stages``).

Which degree a micro-batch has travels in ``doc_ids``, with the number of the document; with its own rank that names the
group. Numbers below 0 are padding. Documents of weight 0 are left out, but for tokens that experts count. FlexSP,
arXiv:2412.01523.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_gather_single, max_over_ranks
from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.models.attention import AttentionPlan, attention, document_starts, plan_attention
from trainwright.parallel.context.base import ContextConfig, ContextParallel
from trainwright.parallel.context.host import on_host
from trainwright.parallel.context.unified import heads_to_tokens, tokens_to_heads
from trainwright.parallel.mesh import Mesh, subgroup
from trainwright.planning.flexsp import (
    BANDWIDTH,
    CostModel,
    FlexSPPlanner,
    Group,
    MicroPlan,
    Plan,
    greedy_plan,
    powers_of_two,
)
from trainwright.planning.flexsp_ahead import PlanAhead

_NUMBERS = 1 << 24  # documents of a row; the exponent of the degree stands above
_PADDING = 64  # slots of a document of padding


@dataclass(frozen=True)
class Span:
    """A document: slots ``start .. stop - 1`` of ``row``."""

    row: int
    start: int
    stop: int


def documents(batch: Batch, experts: bool = False) -> list[Span]:
    """Documents that train something, in order; where experts count tokens, all that are no padding. Waits for the
    device that ``batch`` is on."""
    length = batch.tokens.shape[1]
    starts = document_starts(batch.doc_ids)
    ends = F.pad(starts[1:], (0, 1), value=batch.tokens.numel())
    used = F.pad((batch.weights != 0).flatten().cumsum(0), (1, 0))
    kept = used[ends] > used[starts]
    if experts:
        kept |= batch.doc_ids.flatten()[starts] >= 0
    return [
        Span(a // length, a % length, (b - 1) % length + 1)
        for a, b in torch.stack([starts[kept], ends[kept]], 1).tolist()
    ]


def part(batch: Batch, spans: list[Span], degree: int, place: int, least: int = 1) -> Batch:
    """Of ``spans`` end to end, filled up to a multiple of ``degree``, the ``place``-th of ``degree`` equal
    shares of ``least`` slots or more: ``[1, L / degree]``. Raises ConfigError for extras that are not per token."""
    shape = batch.tokens.shape
    for name, extra in batch.extras.items():
        if extra.shape[:2] != shape:
            raise ConfigError(
                f"takes rows apart, and {name} belongs to whole rows; use name: ring or ulysses",
                key="parallel.context",
                value="flexsp",
            )
    total = sum(s.stop - s.start for s in spans)
    share = max(least, math.ceil(total / degree))
    first, last = place * share, (place + 1) * share
    at = 0
    slots: list[Tensor] = []
    numbers: list[Tensor] = []
    for number, s in enumerate(spans):
        a, b = max(first - at, 0), min(last - at, s.stop - s.start)
        if a < b:
            slots.append(torch.arange(s.row * shape[1] + s.start + a, s.row * shape[1] + s.start + b))
            numbers.append(torch.full((b - a,), number, dtype=torch.int32))
        at += s.stop - s.start
    device = batch.tokens.device
    index = torch.cat([*slots, torch.empty(0, dtype=torch.int64)]).to(device)
    missing = share - index.numel()

    def take(t: Tensor) -> Tensor:
        return F.pad(t.flatten(0, 1)[index].movedim(0, -1), (0, missing)).movedim(-1, 0).unsqueeze(0)

    out = batch._map(take)
    code = (degree.bit_length() - 1) * _NUMBERS
    # Padding is in short documents, lest it attend as if it were a long one.
    padding = torch.arange(max(first, total), max(last, total), dtype=torch.int32)[:missing] - total
    ids = torch.cat([torch.empty(0, dtype=torch.int32), *numbers])
    ids = torch.cat([ids + code, -1 - (len(spans) + padding // _PADDING + code)])
    out.doc_ids = ids.to(device).unsqueeze(0)
    return out


def largest_share(plan: Plan, spans: list[Span]) -> int:
    """Slots of a rank in the fullest group of any micro-batch."""
    groups = [g for m in plan.micro_batches for g in m.groups]
    return max([1, *(-(-sum(spans[i].stop - spans[i].start for i in g.sequences) // g.degree) for g in groups)])


@dataclass
class FlexPlan:
    """How a forward pass attends: in which group, and how in it."""

    group: Any  # None: alone
    degree: int
    local: AttentionPlan


class FlexSPContext(ContextParallel):
    """Over ``size`` ranks, this one the ``rank``-th. ``groups`` holds by degree the group that this rank is in.

    The planner's cap counts when it is given; else a rank takes as many tokens as an even cut of the rows leaves it.
    """

    together: ClassVar[bool] = False

    def __init__(self, groups: dict[int, Any], rank: int, size: int, settings: FlexSPConfig, n_heads: int):
        self.groups, self.rank, self.size, self.settings, self.heads = groups, rank, size, settings, n_heads
        self.degrees = settings.degrees(size, n_heads)
        self.ahead: PlanAhead | None = None
        self.last: Plan | None = None  # of the newest step, for logs and tests
        self.waited = 0.0  # seconds that the newest step waited for its plan

    # -- plans --

    def planner_of(self, batch: Batch, rows: int) -> FlexSPPlanner:
        """For a step of ``batch`` in micro-batches of ``rows`` rows."""
        length, largest = batch.tokens.shape[1], self.degrees[-1]
        cap = self.settings.tokens_per_rank
        if cap is None:
            cap = max(math.ceil(rows * length / self.size), math.ceil(length / largest))
        return self.settings.planner(self.size, cap, self.degrees)

    @property
    def plans(self) -> bool:
        """Whether this rank plans for the others: the first of the group, in a pipeline of the first stage's."""
        return self.rank == 0 and (self.stages is None or dist.get_rank(self.stages.group) == 0)

    @property
    def plans_ahead(self) -> bool:
        """Whether :meth:`plan_ahead` should be told of the next batch while a step runs; the same on all ranks."""
        wanted = self.settings.plan_ahead
        return self.settings.method == "milp" if wanted is None else wanted

    def figures(self) -> dict[str, float]:
        return {"plan_wait": self.waited}

    def plan_ahead(self, batch: Batch, rows: int) -> None:
        """Start planning a batch that comes later, on another process; :meth:`micro_batches` takes what it finds."""
        if not self.plans:
            return
        if self.ahead is None:
            self.ahead = PlanAhead(self.planner_of(batch, rows))
        self.ahead.submit([s.stop - s.start for s in documents(batch, self.experts)])

    def close(self) -> None:
        """End the process that plans ahead."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    def _plan(self, batch: Batch, rows: int, lengths: list[int]) -> Plan:
        """Of the first rank, for all: a solver that ran out of time need not find the same twice."""
        found: list[Any] = [None]
        started = time.perf_counter()
        if self.plans:
            try:
                planner = self.planner_of(batch, rows)
                if self.ahead is not None and self.ahead.planner == planner:
                    found = [self.ahead.result(lengths)]
                else:
                    found = [planner.plan(lengths)]
            except ValueError as error:  # the others wait for an answer
                found = [error]
        if self.stages is not None and self.rank == 0:
            dist.broadcast_object_list(found, group_src=0, group=self.stages.group)
        if self.size > 1:
            group = self.groups[self.size]
            dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
        self.waited = time.perf_counter() - started
        if isinstance(found[0], ValueError):
            raise ConfigError(str(found[0]), key="parallel.context", value="flexsp") from found[0]
        return cast(Plan, found[0])

    def micro_batches(self, batch: Batch, rows: int) -> list[Batch]:
        spans = documents(batch, self.experts)
        plan = self._plan(batch, rows, [s.stop - s.start for s in spans])
        self.last = plan
        mine = [m.group_of(self.rank) for m in plan.micro_batches]
        wanted = len(mine)
        if dist.is_initialized() and dist.get_world_size() > self.size:  # other rows, perhaps more micro-batches
            wanted = max_over_ranks(wanted, batch.tokens.device)
        least = 1
        if self.stages is not None:
            wanted, least = self.stages.legal(wanted), largest_share(plan, spans)
        mine += [Group(1, self.rank, ())] * (max(wanted, 1) - len(mine))
        return [self._of_group(batch, spans, group, least) for group in mine]

    def _of_group(self, batch: Batch, spans: list[Span], group: Group, least: int = 1) -> Batch:
        return part(batch, [spans[i] for i in group.sequences], group.degree, self.rank - group.first, least)

    def shard(self, batch: Batch) -> Batch:
        """All of ``batch`` at once, in groups of the largest degree: for evaluation, whose batches are small."""
        spans = documents(batch, self.experts)
        largest = self.degrees[-1]
        plan: MicroPlan = greedy_plan([s.stop - s.start for s in spans], (largest,) * (self.size // largest))
        return self._of_group(batch, spans, plan.group_of(self.rank))

    # -- attention --

    def plan(self, doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> FlexPlan:
        if doc_ids is None:
            raise ValueError("the batches of FlexSP carry doc_ids; give the model those of shard() or micro_batches()")
        number = int(on_host(doc_ids)[0, 0])
        degree = 1 << ((number if number >= 0 else -1 - number) // _NUMBERS)
        if degree == 1:
            return FlexPlan(None, 1, plan_attention(doc_ids, batch, length, window, device))
        group = self.groups[degree]
        gathered = doc_ids.new_empty(degree, length)
        all_gather_single(gathered, doc_ids.contiguous(), group)
        local = plan_attention(gathered.view(1, -1), batch, degree * length, window, device)
        return FlexPlan(group, degree, local)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: FlexPlan) -> Tensor:
        if plan.degree == 1:
            return attention(q, k, v, plan.local)
        q, k = q.to(v.dtype), k.to(v.dtype)
        k, v = (_enough_heads(x, plan.degree) for x in (k, v))
        q, k, v = (tokens_to_heads(x, plan.group) for x in (q, k, v))
        return heads_to_tokens(attention(q, k, v, plan.local), plan.group)


def _enough_heads(x: Tensor, ranks: int) -> Tensor:
    heads = x.shape[2]
    return x if heads % ranks == 0 else x.repeat_interleave(math.lcm(heads, ranks) // heads, dim=2)


def aligned_groups(size: int) -> list[range]:
    """The 2 ``size`` - 1 runs of places that a group can be, single ones included."""
    return [range(i, i + d) for d in powers_of_two(size) for i in range(0, size, d)]


def make_groups(mesh: DeviceMesh, degrees: list[int]) -> dict[int, Any]:
    """By degree above 1 the group that this rank is in. Every process of the run makes all groups."""
    every: list[list[int]] = [[]] * dist.get_world_size()
    whole = mesh.get_group()
    dist.all_gather_object(every, dist.get_process_group_ranks(whole))
    found: dict[int, Any] = {mesh.size(): whole}
    for members in sorted({tuple(m) for m in every}):
        for places in aligned_groups(len(members)):
            if len(places) == 1 or len(places) == len(members) or len(places) not in degrees:
                continue
            ranks = [members[p] for p in places]
            group = subgroup(ranks, whole)
            if dist.get_rank() in ranks:
                found[len(places)] = group
    return found


@register("context", "flexsp", paper="arXiv:2412.01523", seed_id="B061")
class FlexSPConfig(ContextConfig):
    """Every micro-batch has its own mix of Ulysses group sizes, planned so that the slowest group is fastest."""

    tokens_per_rank: PositiveInt | None = Field(
        None, description="Tokens that a rank can hold; null: what micro_batch_size rows cut evenly leave it."
    )
    max_degree: PositiveInt | None = Field(None, description="Largest group; null: as the heads allow.")
    quadratic: PositiveFloat = Field(5.128e-6, description="ms per token squared on one rank (7B on A100, as below).")
    linear: PositiveFloat = Field(0.18396, description="ms per token on one rank.")
    overhead: float = Field(629.36, ge=0, description="ms per micro-batch.")
    layers: PositiveInt = Field(32, description="Layers, of the bytes that groups exchange.")
    hidden: PositiveInt = Field(4096, description="Width, of the bytes that groups exchange.")
    bandwidth: dict[PositiveInt, PositiveFloat] = Field(
        BANDWIDTH, description="GB/s that a rank sends in an all-to-all, by group size; one for each size in use."
    )
    method: Literal["milp", "layouts"] = Field(
        "layouts",
        description="milp: the paper's program (HiGHS), up to seconds a micro-batch; layouts: a greedy over all mixes, "
        "within 1 % of it in milliseconds.",
    )
    plan_ahead: bool | None = Field(
        None,
        description="Plan the next step on a process of its own while this one runs; null: where method is milp.",
    )
    seconds: PositiveFloat = Field(5.0, description="When the program of a micro-batch stops with the best so far.")

    def degrees(self, cp: int, n_heads: int) -> list[int]:
        most = min(self.max_degree or cp, cp)
        return [d for d in powers_of_two(most) if n_heads % d == 0]

    def planner(self, ranks: int, cap: int, degrees: list[int]) -> FlexSPPlanner:
        """Raises ValueError for what cannot be planned."""
        cost = CostModel(
            self.quadratic, self.linear, self.overhead, self.layers, self.hidden, bandwidth=dict(self.bandwidth)
        )
        return FlexSPPlanner(ranks, cap, cost, tuple(degrees), method=self.method, seconds=self.seconds)

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        if cp & (cp - 1):
            raise ConfigError("flexsp needs a power of two; use 2, 4, 8, ... ", key="parallel.cp", value=cp)
        if self.max_degree is not None and self.max_degree not in powers_of_two(cp):
            raise ConfigError(
                f"should be a power of two up to cp={cp}", key="parallel.context.max_degree", value=self.max_degree
            )
        if self.max_degree is not None and n_heads % self.max_degree:
            raise ConfigError(
                f"does not divide the {n_heads} heads of a rank; use one of "
                f"{', '.join(str(d) for d in powers_of_two(cp) if n_heads % d == 0)}",
                key="parallel.context.max_degree",
                value=self.max_degree,
            )
        degrees = self.degrees(cp, n_heads)
        missing = [d for d in degrees if d > 1 and d not in self.bandwidth]
        if missing:
            raise ConfigError(
                f"has no value for groups of {missing[0]} ranks; add it, or set max_degree={missing[0] // 2}",
                key="parallel.context.bandwidth",
                value=self.bandwidth,
            )
        if self.tokens_per_rank is not None and seq_len > self.tokens_per_rank * degrees[-1]:
            raise ConfigError(
                f"times the largest group of {degrees[-1]} ranks is less than train.seq_len={seq_len}; use at least "
                f"{math.ceil(seq_len / degrees[-1])}",
                key="parallel.context.tokens_per_rank",
                value=self.tokens_per_rank,
            )

    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        over = cast(DeviceMesh, mesh.submesh("cp"))
        groups = make_groups(over, self.degrees(over.size(), n_heads))
        return FlexSPContext(groups, over.get_local_rank(), over.size(), self, n_heads)
