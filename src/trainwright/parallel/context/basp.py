"""BASP: Ulysses in groups that shrink as a micro-batch grows: rows are shared out first, tokens only then.

A context group of P ranks has b rows of s tokens. With ``g = gcd(b, P)`` it is split into g neighbourhoods of
``G = P / g`` ranks; the j-th takes rows ``j b / g .. (j + 1) b / g - 1``, and the i-th rank in it their slots
``i s / G ..``. A rank then holds ``[b / g, s / G]``, as many tokens as ever, ``b s / P``. Its neighbourhood trades
tokens for heads by all-to-all (DeepSpeed Ulysses, arXiv:2309.14509), each of which sends

    (b s width / P) (1 - 1 / G) elements     (width: heads x head_dim, of queries or of keys)

a rank instead of ``1 - 1 / P``; at ``G = 1`` there is none. It is the re-meshing of context ranks into data ranks, done
for each micro-batch: short last batches and growing ones need no restart. Parameters stay where they are.

Seed card A01; no code of its authors was found, so this is made from the method's description. Where b and P have no
common divisor the groups stay whole, which is said once; ``padding`` adds rows without weight where that helps.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from trainwright.core.batch import Batch, as_padding
from trainwright.core.distributed import all_gather_single
from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.models.attention import AttentionPlan, attention, plan_attention
from trainwright.parallel.context.base import ContextConfig, ContextParallel
from trainwright.parallel.context.host import on_host
from trainwright.parallel.context.unified import heads_to_tokens, tokens_to_heads
from trainwright.parallel.mesh import Mesh, subgroup

log = logging.getLogger("trainwright")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def group_size(rows: int, ranks: int) -> int:
    """Ranks that share a row: G."""
    return ranks // math.gcd(rows, ranks)


def padded_rows(rows: int, ranks: int, padding: float) -> int:
    """Rows after at most ``padding * rows`` are added: as many as give the smallest groups, and no more."""
    allowed = range(rows, rows + int(padding * rows + 1e-9) + 1)
    return min(allowed, key=lambda b: (group_size(b, ranks), b))


def bytes_sent(rows: int, length: int, n_heads: int, n_kv_heads: int, head_dim: int, ranks: int, element: int) -> int:
    """Bytes that a rank sends in the attention of one layer, forward and backward: q, k, v there and the output back,
    and their gradients. Key-value heads that G does not divide are repeated first."""
    size = group_size(rows, ranks)
    kv = n_kv_heads if n_kv_heads % size == 0 else math.lcm(n_kv_heads, size)
    tokens = rows * length // ranks
    return 2 * (2 * n_heads + 2 * kv) * head_dim * tokens * element * (size - 1) // size


@dataclass
class BaspPlan:
    """The neighbourhood of one micro-batch and how its whole rows are attended."""

    size: int  # G
    group: Any  # None for G = 1
    local: AttentionPlan


class Basp(ContextParallel):
    """On this rank, over the ranks of ``mesh`` (one dimension), with ``n_heads`` query heads. A collective of the run:
    neighbourhoods of every size are made here, once.

    The size that a micro-batch uses travels in its ``doc_ids``, which :meth:`shard` numbers anew; those of padding stay
    below 0.
    """

    def __init__(self, mesh: DeviceMesh, n_heads: int, padding: float = 0.0, multiple_of: int = 1):
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.n_heads, self.padding, self.multiple_of = n_heads, padding, multiple_of
        self.sizes = divisors(self.size)
        self.groups = make_groups(mesh, self.sizes)
        self._said: set[str] = set()

    def shard(self, batch: Batch) -> Batch:
        """Raises ConfigError where G does not divide the heads, or the row length of this micro-batch."""
        batch = self._padded(batch)
        rows, length = batch.shape
        size = group_size(rows, self.size)
        self._check(rows, length, size)
        share, piece = rows * size // self.size, length // size
        first, start = self.rank // size * share, self.rank % size * piece
        runs = F.pad((batch.doc_ids[:, 1:] != batch.doc_ids[:, :-1]).cumsum(1, dtype=torch.int32), (1, 0))
        numbered = runs * len(self.sizes) + self.sizes.index(size)
        numbered = torch.where(batch.doc_ids < 0, -1 - numbered, numbered)

        def cut(t: Tensor) -> Tensor:
            t = t[first : first + share]
            return t[:, start : start + piece] if t.ndim > 1 and t.shape[1] == length else t

        mine = batch._map(cut)
        mine.doc_ids = cut(numbered)
        return mine

    def _padded(self, batch: Batch) -> Batch:
        """``batch`` with rows that count for nothing: up to ``multiple_of``, which a validation's last batch may miss,
        and as ``padding`` allows."""
        rows = batch.shape[0]
        least = -(-rows // self.multiple_of) * self.multiple_of
        missing = padded_rows(least, self.size, self.padding) - rows
        if not missing:
            return batch
        more = batch._map(lambda t: torch.cat([t, t[:1].expand(missing, *t.shape[1:])]))
        for t in (more.weights, *more.extras.values()):
            t[rows:] = 0
        more.doc_ids[rows:] = as_padding(more.doc_ids[rows:])
        return more

    def _check(self, rows: int, length: int, size: int) -> None:
        for what, n in (("heads of a rank", self.n_heads), ("tokens of a row", length)):
            if n % size:
                raise ConfigError(
                    f"a micro-batch of {rows} rows is shared by groups of {size} of the {self.size} ranks, which does "
                    f"not divide the {n} {what}; use micro-batches (the last of a step too) whose rows are a multiple "
                    f"of {self.size // max(d for d in self.sizes if n % d == 0)}",
                    key="parallel.context",
                    value="basp",
                )
        if size == self.size > 1 and rows > 1:
            self._say(
                "a micro-batch of %d rows has no divisor in common with cp=%d: no gain over ulysses; use another "
                "micro_batch_size, or parallel.context.padding",
                rows,
                self.size,
            )

    def _say(self, message: str, *values: int) -> None:
        if message not in self._said and dist.get_rank() == 0:
            log.warning("basp: " + message, *values)
        self._said.add(message)

    def plan(self, doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> BaspPlan:
        if doc_ids is None:
            raise ValueError("the batches of BASP carry doc_ids; give the model those of shard() or micro_batches()")
        number = int(on_host(doc_ids)[0, 0])
        size = self.sizes[(number if number >= 0 else -1 - number) % len(self.sizes)]
        if size == 1:
            return BaspPlan(1, None, plan_attention(doc_ids, batch, length, window, device))
        group = self.groups[size]
        gathered = doc_ids.new_empty(size * batch, length)
        all_gather_single(gathered, doc_ids.contiguous(), group)
        whole = gathered.unflatten(0, (size, batch)).transpose(0, 1).flatten(1, 2)  # [b / g, s]
        return BaspPlan(size, group, plan_attention(whole, batch, size * length, window, device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: BaspPlan) -> Tensor:
        if plan.size == 1:
            return attention(q, k, v, plan.local)
        q, k = q.to(v.dtype), k.to(v.dtype)
        k, v = self._enough_heads(k, plan.size), self._enough_heads(v, plan.size)
        q, k, v = (tokens_to_heads(x, plan.group) for x in (q, k, v))
        return heads_to_tokens(attention(q, k, v, plan.local), plan.group)

    def _enough_heads(self, x: Tensor, size: int) -> Tensor:
        heads = x.shape[2]
        if heads % size == 0:
            return x
        self._say("%d key-value heads are repeated for groups of %d ranks, which sends more", heads, size)
        return x.repeat_interleave(math.lcm(heads, size) // heads, dim=2)


def make_groups(mesh: DeviceMesh, sizes: list[int]) -> dict[int, Any]:
    """By size above 1 the group of neighbours that this rank is in. Every process of the run makes all of them."""
    whole = mesh.get_group()
    every: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, dist.get_process_group_ranks(whole))
    found: dict[int, Any] = {mesh.size(): whole}
    for members in sorted({tuple(m) for m in every}):
        for size in sizes:
            if size in (1, len(members)):
                continue
            for start in range(0, len(members), size):
                ranks = list(members[start : start + size])
                group = subgroup(ranks, whole)
                if dist.get_rank() in ranks:
                    found[size] = group
    return found


@register("context", "basp", seed_id="A01")
class BaspConfig(ContextConfig):
    """Ulysses whose groups shrink as a micro-batch has more rows: rows are shared out first, tokens only then."""

    multiple_of: PositiveInt = Field(
        1,
        description="Every micro-batch has a multiple of so many rows, the last of a step too. Groups are then "
        "smaller, and only they have to divide the heads and the row length.",
    )
    padding: NonNegativeFloat = Field(
        0.0, description="Rows without weight that may be added for smaller groups, as a share of a micro-batch's rows."
    )

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        size = group_size(self.multiple_of, cp)
        for what, n in (("heads of a rank", n_heads), ("tokens of a row", seq_len)):
            if n % size:
                fits = [m for m in divisors(cp) if n_heads % (cp // m) == 0 and seq_len % (cp // m) == 0]
                raise ConfigError(
                    f"a micro-batch of {self.multiple_of} rows is shared by groups of {size} of the {cp} ranks, which "
                    f"does not divide the {n} {what}; set multiple_of (and train.micro_batch_size) to a multiple of "
                    f"{fits[0]}, or lower cp",
                    key="parallel.context.multiple_of",
                    value=self.multiple_of,
                )

    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        return Basp(cast(DeviceMesh, mesh.submesh("cp")), n_heads, self.padding, self.multiple_of)
