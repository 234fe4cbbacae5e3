"""Number formats of a run: what autocast computes in, whether losses are scaled, what FSDP gathers in."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.core.registry import MethodConfig


@dataclass
class Precision:
    """Master weights stay float32; ``compute_dtype`` is that of matrix products."""

    compute_dtype: torch.dtype
    device_type: str
    scaler: Any = None  # torch.amp.GradScaler for float16

    def autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute_dtype)

    @property
    def fsdp_param_dtype(self) -> torch.dtype | None:
        """What FSDP gathers parameters in; None: as they are."""
        return None if self.compute_dtype == torch.float32 else self.compute_dtype


class PrecisionConfig(MethodConfig):
    """Base of precision configs."""

    @abstractmethod
    def build(self, device: torch.device) -> Precision: ...
