"""Number formats of a run: what autocast computes in, whether losses are scaled, what FSDP gathers in."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.core.registry import MethodConfig


@dataclass
class Precision:
    """Master weights stay float32; ``compute_dtype`` is that of matrix products.

    A step is ``backward(loss)``, perhaps ``unscale(optimizer)`` (before gradients are measured or clipped), then
    ``step(optimizer)`` or ``skip(optimizer)``. Without a scaler these are plain backward and step.
    """

    compute_dtype: torch.dtype
    device_type: str
    scaler: Any = None  # torch.amp.GradScaler for float16
    overflows: int = 0  # steps whose scaled gradients were not finite

    def autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute_dtype)

    @property
    def fsdp_param_dtype(self) -> torch.dtype | None:
        """What FSDP gathers parameters in; None: as they are."""
        return None if self.compute_dtype == torch.float32 else self.compute_dtype

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale; once a step."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer's step; False when an overflow of float16 skipped it. The scale is adapted."""
        if self.scaler is None:
            optimizer.step()
            return True
        self.scaler.step(optimizer)
        return not self._adapt()

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Instead of :meth:`step` when an update is left out, so that the scaler is ready for the next one."""
        if self.scaler is not None:
            self._adapt()

    def _adapt(self) -> bool:
        before = self.scaler.get_scale()
        self.scaler.update()
        overflowed = bool(self.scaler.get_scale() < before)
        self.overflows += overflowed
        return overflowed

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict(), "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A state without a scaler, or for one that this precision does not have, changes nothing."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state["scaler"])
            self.overflows = int(state["overflows"])


class PrecisionConfig(MethodConfig):
    """Base of precision configs."""

    @abstractmethod
    def build(self, device: torch.device) -> Precision: ...
