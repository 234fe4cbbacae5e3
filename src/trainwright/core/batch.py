"""The one Batch: packed rows of tokens with document bounds and loss weights."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

PADDING = -1  # doc_ids of slots that hold no token


def as_padding(doc_ids: Tensor) -> Tensor:
    """``doc_ids`` with the same bounds, all below 0: of rows that are there again to fill something up."""
    return torch.where(doc_ids < 0, doc_ids, -2 - doc_ids)


@dataclass
class Batch:
    """Rows of packed documents. All tensors are ``[B, T]``.

    tokens     int64, input ids
    targets    int64, the token that each position predicts (any valid id where the weight is 0)
    weights    float32, loss weight per position; 0 = not trained on (padding, seams, prompts)
    positions  int64, position within the document, from 0
    doc_ids    int32, which document of the row a position belongs to; attention never crosses a change of id.
               Padding is a document of its own with weight 0 and an id below 0 (:data:`PADDING`), by which models
               leave it out of what they count: the load of experts. An id of 0 or more is a token to them.
    extras     further ``[B, T, ...]`` or ``[B, ...]`` tensors by name (advantages, reference logprobs, ...)
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    positions: Tensor
    doc_ids: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape

    def weight(self) -> Tensor:
        """Sum of the loss weights, float64 scalar (float32 would lose counts beyond 2**24)."""
        return self.weights.sum(dtype=torch.float64)

    def _map(self, fn) -> Batch:  # type: ignore[no-untyped-def]
        tensors = {f.name: fn(getattr(self, f.name)) for f in fields(self) if f.name != "extras"}
        return Batch(**tensors, extras={k: fn(v) for k, v in self.extras.items()})

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def rows(self, start: int, stop: int) -> Batch:
        """Rows ``start:stop`` as views."""
        return self._map(lambda t: t[start:stop])

    def split(self, micro_batch_size: int) -> list[Batch]:
        """Micro-batches of at most ``micro_batch_size`` rows, as views; the last may be smaller."""
        n = self.tokens.shape[0]
        return [self.rows(i, min(i + micro_batch_size, n)) for i in range(0, n, micro_batch_size)]
