"""What every objective offers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from trainwright.core.batch import Batch
from trainwright.core.registry import MethodConfig
from trainwright.models.base import LanguageModel


@dataclass
class Loss:
    """A sum and the weight to divide it by, kept apart so that the trainer can normalise over the global batch."""

    sum: Tensor  # scalar with gradient: sum of weighted token losses (+ auxiliary terms times weight)
    weight: Tensor  # float64 scalar: sum of the loss weights
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached sums, to be divided by the global weight too


class Objective(Protocol):
    """A function of model and batch. The model may be wrapped (DDP, FSDP, compile): call it, don't look inside."""

    def __call__(self, model: LanguageModel, batch: Batch) -> Loss: ...


class ObjectiveConfig(MethodConfig):
    """Base of objective configs."""

    @abstractmethod
    def build(self) -> Objective: ...
