"""A number that the step computes on the device and the host looks at later, so that nothing waits for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Gauge:
    """The sum or the largest, over steps and devices, of 0-d tensors."""

    def __init__(self, largest: bool = False):
        self.largest = largest
        self._held: dict[torch.device, Tensor] = {}
        self._on_host: dict[torch.device, Tensor] = {}

    def put(self, value: Tensor) -> None:
        device, value = value.device, value.detach().float()
        if device in self._held:
            held = self._held[device]
            value = torch.maximum(held, value) if self.largest else held + value
        self._held[device] = self._on_host[device] = value
        if device.type == "cuda":  # arrives some time before a later step looks at it
            self._on_host[device] = torch.zeros((), pin_memory=True).copy_(value, non_blocking=True)

    def seen(self) -> float:
        """What has reached the host by now; on a GPU a step or so behind."""
        return self._over(self._on_host)

    def value(self) -> float:
        """The exact number; waits for the device."""
        return self._over(self._held)

    def _over(self, tensors: dict[torch.device, Tensor]) -> float:
        values = [float(t) for t in tensors.values()]
        return (max(values) if self.largest else sum(values)) if values else 0.0
