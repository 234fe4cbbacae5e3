"""FlashCP: documents of a row are cut over the ranks or kept whole on one, as a search finds cheapest.

Static ways cut every document and send all keys to all ranks. Here (planning/flashcp.py) as few documents are cut as
even work allows, and a cut document's chunk of keys goes only to ranks with a later chunk of it: with R ranks 3/4 of an
all-gather where all are cut, nothing where none is. Attention is exact (pieces.py).

Ranks may hold unequal numbers of tokens, at most (1 + the largest ``slack``) of the mean where a plan allows that; each
row is filled up with padding of weight 0 to the longest share of any row and rank, so ``[B, T']`` is the same for all.
In a pipeline it is the longest of the step; why its exchanges meet is said in base.py (``Stages``).

FlashCP: Load-Balanced Communication-Efficient Context Parallelism for LLM Training, arXiv:2606.08476. The paper's text
was not to be had; what the abstract leaves open (heuristic, unequal shares) is ours and stated in the planner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.parallel.context.base import ContextConfig, ContextParallel
from trainwright.parallel.context.pieces import (
    LONGEST,
    MOST_RANKS,
    PADDING,
    Document,
    PieceContext,
    document_lengths,
    documents_of_padding,
    encode,
    taken,
)
from trainwright.parallel.mesh import Mesh
from trainwright.planning import flashcp

Planner = Callable[[Sequence[int], int], flashcp.Plan]


class FlashCP(PieceContext):
    """``planner(lengths, ranks)`` gives the plan of a row of documents; it has to be the same function on all ranks.

    ``group``: process group of the ranks; None: one process. ``keep``: see :class:`PieceContext`."""

    def __init__(self, group: object, planner: Planner = flashcp.make_plan, keep: bool = True):
        super().__init__(group, keep)
        self.planner = planner

    def plans(self, batch: Batch) -> list[flashcp.Plan]:
        """Of each row."""
        return [self.planner(lengths, self.size) for lengths in document_lengths(batch.doc_ids)]

    def shard(self, batch: Batch) -> Batch:
        """``[B, T']``, see the module. Raises ModelError, on every rank, where ranks made different plans."""
        return self.micro_batches(batch, batch.tokens.shape[0])[0]

    def micro_batches(self, batch: Batch, rows: int) -> list[Batch]:
        """In a pipeline all are as long as the longest of the step. Raises ModelError as :meth:`shard` does."""
        parts = batch.split(rows)
        plans = [self.plans(part) for part in parts]
        digests = repr([[p.digest() for p in part] for part in plans])
        together = hashlib.blake2b(digests.encode(), digest_size=7).digest()
        self.same_on_all(int.from_bytes(together, "big"), batch.tokens.device)
        layouts = [self._layout(part, planned) for part, planned in zip(parts, plans, strict=True)]
        if self.stages is None:
            return [taken(part, *layout) for part, layout in zip(parts, layouts, strict=True)]
        longest = max(slots.shape[1] for slots, _ in layouts)
        return [
            taken(
                part,
                F.pad(slots, (0, longest - slots.shape[1]), value=-1),
                F.pad(codes, (0, longest - codes.shape[1]), value=PADDING),
            )
            for part, (slots, codes) in zip(parts, layouts, strict=True)
        ]

    def _layout(self, batch: Batch, plans: Sequence[flashcp.Plan]) -> tuple[Tensor, Tensor]:
        """Slots and codes ``[B, T']`` of this rank, see :func:`taken`."""
        length = max((max(p.tokens()) for p in plans), default=1)
        slots = torch.full((len(plans), length), -1)
        codes = torch.full((len(plans), length), PADDING)
        index = 0
        padding = documents_of_padding(batch.doc_ids)
        for row, plan in enumerate(plans):
            starts = [0]
            for n in plan.lengths:
                starts.append(starts[-1] + n)
            at = 0
            for k, span in plan.pieces(self.rank):
                cut = plan.homes[k] == flashcp.CUT
                first, ranks = (0, self.size) if cut else (self.rank, 1)
                document = Document(index + k, plan.lengths[k], first, ranks, padding[row][k])
                start = row * batch.tokens.shape[1] + starts[k]
                slots[row, at : at + len(span)] = torch.arange(start + span.start, start + span.stop)
                codes[row, at : at + len(span)] = encode(document)
                at += len(span)
            index += len(plan.lengths)
        return slots, codes


class CostSection(BaseModel):
    """What a rank needs for parts of a step, in seconds (one forward and backward of all layers, or of one)."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    pair: PositiveFloat = Field(description="Attention of a pair of tokens.")
    token: NonNegativeFloat = Field(description="Linear layers, a token.")
    send: NonNegativeFloat = Field(description="Keys and values of a token to one rank.")


@register("context", "flashcp", paper="arXiv:2606.08476", seed_id="A16")
class FlashCPConfig(ContextConfig):
    """Documents are cut over the ranks or kept whole, whichever sends least at even work; keys go only where needed."""

    imbalance: float = Field(
        1.05, ge=1, description="Largest over mean attention work of a row's ranks that is even enough."
    )
    slack: list[NonNegativeFloat] = Field(
        [0.0, 0.02, 0.05, 0.1],
        min_length=1,
        description="Tokens of a rank above the mean, as a share of it; tried in turn.",
    )
    min_chunk: PositiveInt = Field(
        128, description="Tokens; documents too short for 2 x cp chunks of these stay whole where work is even so."
    )
    costs: CostSection | None = Field(
        None, description="Take the plan of least time by these; null: of least bytes within imbalance."
    )
    keep_keys: bool = Field(
        True,
        description="Keep received keys and values for the backward pass; false sends them again: less memory, half as "
        "many bytes more.",
    )

    @field_validator("slack")
    @classmethod
    def _sorted(cls, value: list[float]) -> list[float]:
        return sorted(value)

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        check_limits(cp, seq_len)

    def planner(self, lengths: Sequence[int], ranks: int) -> flashcp.Plan:
        costs = None if self.costs is None else flashcp.Costs(**self.costs.model_dump())
        return flashcp.make_plan(
            lengths, ranks, imbalance=self.imbalance, slack=self.slack, min_chunk=self.min_chunk, costs=costs
        )

    def over(self, group: object) -> FlashCP:
        """Over the ranks of ``group``; None: one process."""
        return FlashCP(group, self.planner, self.keep_keys)

    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        return self.over(cast(DeviceMesh, mesh.submesh("cp")).get_group())


def check_limits(cp: int, seq_len: int) -> None:
    """Raises ConfigError for what the numbers in ``doc_ids`` cannot hold."""
    if seq_len > LONGEST:
        raise ConfigError(f"should be at most {LONGEST} with this context", key="train.seq_len", value=seq_len)
    if cp > MOST_RANKS:
        raise ConfigError(f"should be at most {MOST_RANKS} with this context", key="parallel.cp", value=cp)
