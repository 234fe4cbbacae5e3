"""The key-value cache of generation: allocated once, a slot per token, prompts of any lengths padded on the left.

A cached pass sees keys by the same rule as a packed row (same document, not later, inside the window), so padding is
just another document, ``PAD_DOCUMENT``, and cached and uncached passes agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.core.errors import ConfigError
from trainwright.models.attention import AttentionPlan

PAD_DOCUMENT = -1


class KVCache:
    """Keys and values of every layer, ``[B, capacity, Hkv, hd]`` each, in the dtype and on the device they come in."""

    def __init__(self, n_layers: int, capacity: int):
        self.capacity = capacity
        self.length = 0  # slots filled, the same for all rows
        self.keys: list[Tensor | None] = [None] * n_layers
        self.values: list[Tensor | None] = [None] * n_layers
        self.doc_ids: Tensor | None = None  # [B, capacity]
        self.single = True  # no row has a second document or padding: no mask needed for one new token

    def extend(self, tokens: Tensor, doc_ids: Tensor | None) -> None:
        """Take ``tokens [B, T]`` as the next T slots; their keys and values follow layer by layer."""
        batch, new = tokens.shape
        if self.length + new > self.capacity:
            raise ConfigError(f"the key-value cache holds {self.capacity} tokens, {self.length + new} are needed")
        if self.doc_ids is None:
            self.doc_ids = torch.zeros(batch, self.capacity, dtype=torch.int32, device=tokens.device)
        ids = self.doc_ids[:, self.length : self.length + new]
        if doc_ids is not None:
            ids.copy_(doc_ids)
            first = self.doc_ids[:, :1]
            self.single = self.single and bool((ids == first).all())
        elif self.length:
            ids.copy_(self.doc_ids[:, self.length - 1 : self.length])
        self.length += new

    def plan(self, new: int, window: int) -> AttentionPlan:
        """How the last ``new`` slots see the keys up to them."""
        reach = self._reach(new, window)
        if self.doc_ids is None:
            raise RuntimeError("extend() comes before plan()")
        if self.single and (new == 1 or (new == reach and (not window or new <= window))):
            return AttentionPlan("causal" if new > 1 else "mask", window)
        device = self.doc_ids.device
        j = torch.arange(self.length - reach, self.length, device=device)
        i = torch.arange(self.length - new, self.length, device=device)[:, None]
        seen = j <= i
        if window:
            seen = seen & (i - j < window)
        ids = self.doc_ids[:, self.length - reach : self.length]
        mask = seen & (ids[:, -new:, None] == ids[:, None, :])
        return AttentionPlan("mask", window, mask=mask.unsqueeze(1))

    def update(self, layer: int, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Store ``k, v [B, T, Hkv, hd]`` of the newest slots; returns views of the keys and values in their reach."""
        new = k.shape[1]
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            shape = (k.shape[0], self.capacity, *k.shape[2:])
            keys, values = k.new_empty(shape), v.new_empty(shape)
            self.keys[layer], self.values[layer] = keys, values
        keys[:, self.length - new : self.length] = k
        values[:, self.length - new : self.length] = v
        start = self.length - self._reach(new, window)
        return keys[:, start : self.length], values[:, start : self.length]

    def _reach(self, new: int, window: int) -> int:
        return min(self.length, new + window - 1) if window else self.length
