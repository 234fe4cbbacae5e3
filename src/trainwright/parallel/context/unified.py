"""Ring attention, Ulysses, and both at once: ways to spread the tokens of a row over ranks that keep all heads exact.

Of n = u x r ranks, u neighbours trade tokens for heads by all-to-all (DeepSpeed Ulysses, arXiv:2309.14509), so that
each has H / u heads of their tokens together; r such groups form a ring (ring_attention.py). u = 1 is the ring alone,
r = 1 is Ulysses alone; both together are USP (arXiv:2405.07719), for more ranks than there are key-value heads and for
rings that cross slow links.

A row of T tokens is cut into 2 r pieces; ring place j takes pieces j and 2r - 1 - j, and its u ranks a contiguous share
of these each. Attention never crosses a document; a window is honoured.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_gather_single
from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.models.attention import attention, plan_attention
from trainwright.parallel.context.base import ContextConfig, ContextParallel
from trainwright.parallel.context.host import keep, kept, moved
from trainwright.parallel.context.ring_attention import Pair, Ring, RingAttention, RingPlan
from trainwright.parallel.mesh import Mesh, subgroup


class _AllToAll(torch.autograd.Function):
    """``[n, ...]``: piece i goes to rank i; the gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _trade(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _trade(grad, ctx.group), None


def _trade(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def tokens_to_heads(x: Tensor, group: Any) -> Tensor:
    """``[B, T / n, H, hd]`` of each rank -> ``[B, T, H / n, hd]``: all tokens, this rank's heads."""
    n = dist.get_world_size(group)
    pieces = x.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4)  # [n, B, T / n, H / n, hd]
    return cast(Tensor, _AllToAll.apply(pieces.contiguous(), group)).transpose(0, 1).flatten(1, 2)


def heads_to_tokens(x: Tensor, group: Any) -> Tensor:
    """The inverse: ``[B, T, H / n, hd]`` -> ``[B, T / n, H, hd]``."""
    n = dist.get_world_size(group)
    pieces = x.unflatten(1, (n, -1)).transpose(0, 1)  # [n, B, T / n, H / n, hd]
    return cast(Tensor, _AllToAll.apply(pieces.contiguous(), group)).permute(1, 2, 0, 3, 4).flatten(2, 3)


class UnifiedContext(ContextParallel):
    """``ulysses`` neighbours trade heads, and the groups of them form a ring, over the ranks of ``mesh``."""

    def __init__(self, mesh: DeviceMesh, ulysses: int):
        self.mesh, self.size = mesh, mesh.size()
        self.ulysses, self.places = ulysses, mesh.size() // ulysses
        self.group = mesh.get_group()
        rank = mesh.get_local_rank()
        self.place = rank // ulysses
        self.rank = rank
        ranks = dist.get_process_group_ranks(self.group)
        self.heads_group, self.ring = self.group, None
        if ulysses < self.size:
            self.heads_group, ring_group = _subgroups(mesh, ranks, ulysses)
            self.ring = Ring(ring_group)

    # -- slots --

    def pieces(self, place: int, length: int) -> tuple[range, range]:
        """The two stretches of a row of ``length`` tokens that a place of the ring holds, in order."""
        size = length // (2 * self.places)
        last = 2 * self.places - 1 - place
        return range(place * size, (place + 1) * size), range(last * size, (last + 1) * size)

    def slots(self, rank: int, length: int) -> Tensor:
        """Slots of the row that ``rank`` holds, int64 ``[length / size]``."""
        first, second = self.pieces(rank // self.ulysses, length)
        share = length // self.size
        start = rank % self.ulysses * share
        return torch.tensor([*first, *second])[start : start + share]

    def shard(self, batch: Batch) -> Batch:
        length = batch.tokens.shape[1]
        slots = self.slots(self.rank, length).to(batch.tokens.device)

        def cut(t: Tensor) -> Tensor:
            return t.index_select(1, slots) if t.ndim > 1 and t.shape[1] == length else t

        part = batch._map(cut)
        if batch.doc_ids.device.type == "cpu":
            keep(part.doc_ids, batch.doc_ids)
        return part

    # -- attention --

    def plan(self, doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> RingPlan:
        total = length * self.size
        runs = None if doc_ids is None else self._runs(doc_ids, total)
        if self.ring is None:
            runs = None if runs is None or _one_document(runs) else moved(runs, device)
            return RingPlan(local=plan_attention(runs, batch, total, window, device))
        window = 0 if window >= total else window
        own = self.pieces(self.place, total)
        plan = RingPlan()
        for step in range(self.places):
            other = self.pieces((self.place - step) % self.places, total)
            pairs = [_pair(i, a, j, b, runs, window, device) for i, a in enumerate(own) for j, b in enumerate(other)]
            plan.pairs.append([p for p in pairs if p is not None])
        return plan

    def _runs(self, doc_ids: Tensor, total: int) -> Tensor:
        """Of whole rows, numbers of the documents that never come back: ``[B, T]``. Those of :meth:`shard` are known on
        the host; else they are gathered from each rank's ``[B, T / n]``."""
        whole = kept(doc_ids)
        if whole is not None and whole.shape[1] == total:
            return _numbered(whole)
        gathered = doc_ids.new_empty(self.size * doc_ids.shape[0], doc_ids.shape[1])
        all_gather_single(gathered, doc_ids.contiguous(), self.group)
        row = doc_ids.new_empty(doc_ids.shape[0], total)
        slots = torch.cat([self.slots(rank, total) for rank in range(self.size)]).to(doc_ids.device)
        row[:, slots] = gathered.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)
        return _numbered(row)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self.ulysses > 1:
            k, v = (self._enough_heads(x) for x in (k, v))
            q, k, v = (tokens_to_heads(x, self.heads_group) for x in (q, k, v))
        if self.ring is None:
            out = attention(q, k, v, plan.local)
        else:
            out = cast(Tensor, RingAttention.apply(q, k, v, plan, self.ring))
        return heads_to_tokens(out, self.heads_group) if self.ulysses > 1 else out

    def _enough_heads(self, x: Tensor) -> Tensor:
        """Key-value heads repeated up to a multiple of the ranks that share them out."""
        heads = x.shape[2]
        return x if heads % self.ulysses == 0 else x.repeat_interleave(math.lcm(heads, self.ulysses) // heads, dim=2)


def _subgroups(mesh: DeviceMesh, ranks: list[int], ulysses: int) -> tuple[Any, Any]:
    """The groups of neighbours and of rings that this rank is in. Every process of the run makes all of them."""
    found: tuple[Any, Any] = (None, None)
    every: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, ranks)
    for members in sorted({tuple(m) for m in every}):
        rows = [list(members[i : i + ulysses]) for i in range(0, len(members), ulysses)]
        columns = [list(members[i::ulysses]) for i in range(ulysses)]
        heads = [subgroup(r, mesh.get_group()) for r in rows]
        rings = [subgroup(c, mesh.get_group()) for c in columns]
        if dist.get_rank() in members:
            i = members.index(dist.get_rank())
            found = heads[i // ulysses], rings[i % ulysses]
    return found


def _numbered(doc_ids: Tensor) -> Tensor:
    """A change of id ends a document even where the id comes back later in the row: numbers that only grow."""
    return F.pad((doc_ids[:, 1:] != doc_ids[:, :-1]).cumsum(1, dtype=torch.int32), (1, 0))


def _one_document(runs: Tensor) -> bool:
    """Whether each row is one; not known of what is not on the host."""
    return runs.device.type == "cpu" and not bool(runs[:, -1].any())


def _pair(
    i: int, a: range, j: int, b: range, runs: Tensor | None, window: int, device: torch.device | None = None
) -> Pair | None:
    """Own piece ``a`` (the i-th) over piece ``b`` (the other's j-th); None where no query sees a key. A mask is made,
    on ``device`` (None: that of ``runs``), only where some pairs are visible and others not."""
    if b.start > a.start or (window and a.start - (b.stop - 1) >= window):
        return None
    size = len(a)
    pair = Pair(slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size), causal=a.start == b.start)
    inside = not window or a.stop - 1 - b.start < window
    if runs is not None and runs.device.type == "cpu":  # elsewhere looking would wait for the device
        # Numbers of documents only grow: the nearest pair of tokens is the last to be parted, the farthest the first.
        if b.start < a.start and not bool((runs[:, a.start] == runs[:, b.stop - 1]).any()):
            return None
        if bool((runs[:, a.stop - 1] == runs[:, b.start]).all()):
            runs = None
    if runs is None and inside:
        return pair
    if device is None:
        device = torch.device("cpu") if runs is None else runs.device
    queries = torch.arange(a.start, a.stop, device=device)[:, None]
    keys = torch.arange(b.start, b.stop, device=device)
    seen = queries >= keys
    if window:
        seen = seen & (queries - keys < window)
    mask = seen[None]
    if runs is not None:
        of_queries, of_keys = (moved(runs[:, r.start : r.stop], device) for r in (a, b))
        mask = mask & (of_queries[:, :, None] == of_keys[:, None, :])
    pair.causal, pair.mask = False, mask.unsqueeze(1)
    return pair


class _Spread(ContextConfig):
    """What the three have in common."""

    by_rows: ClassVar[bool] = True

    @abstractmethod
    def ulysses_of(self, cp: int, n_heads: int) -> int:
        """How many of ``cp`` ranks trade heads."""

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        u = self.ulysses_of(cp, n_heads)
        legal = [d for d in range(1, cp + 1) if cp % d == 0 and n_heads % d == 0]
        if cp % u or n_heads % u:
            raise ConfigError(
                f"{u} ranks that trade heads do not divide cp={cp} and the {n_heads} heads of a rank; use one of "
                f"{', '.join(map(str, legal))}, with name: usp or ring",
                key="parallel.context",
                value=self.name,
            )
        pieces = cp * (2 if u < cp else 1)
        if seq_len % pieces:
            raise ConfigError(
                f"needs train.seq_len to be a multiple of {pieces}, and it is {seq_len}; use "
                f"{seq_len // pieces * pieces} or {-(-seq_len // pieces) * pieces}",
                key="parallel.cp",
                value=cp,
            )

    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        over = cast(DeviceMesh, mesh.submesh("cp"))
        return UnifiedContext(over, self.ulysses_of(over.size(), n_heads))


@register("context", "ring", paper="arXiv:2310.01889")
class RingConfig(_Spread):
    """Keys and values go round a ring of ranks; tokens are dealt out in zig-zag, so that all have the same work."""

    def ulysses_of(self, cp: int, n_heads: int) -> int:
        return 1


@register("context", "ulysses", paper="arXiv:2309.14509")
class UlyssesConfig(_Spread):
    """Ranks trade tokens for heads by all-to-all, attend whole rows of their heads, and trade back."""

    def ulysses_of(self, cp: int, n_heads: int) -> int:
        return cp


@register("context", "usp", paper="arXiv:2405.07719")
class UnifiedConfig(_Spread):
    """Ulysses among neighbours, and a ring of such groups."""

    ulysses: PositiveInt | None = Field(
        None, description="Ranks that trade heads; null: as many as divide both cp and the heads."
    )

    def ulysses_of(self, cp: int, n_heads: int) -> int:
        return self.ulysses or math.gcd(cp, n_heads)
