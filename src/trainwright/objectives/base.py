"""What every objective offers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trainwright.core.batch import Batch
from trainwright.core.registry import MethodConfig
from trainwright.models.base import LanguageModel

if TYPE_CHECKING:
    from trainwright.data.dataset import TokenDataset
    from trainwright.data.tokenizers.base import Tokenizer


@dataclass
class Loss:
    """A sum and the weight to divide it by, kept apart so that the trainer can normalise over the global batch."""

    sum: Tensor  # scalar with gradient: sum of weighted token losses (+ auxiliary terms times weight)
    weight: Tensor  # float64 scalar: sum of the loss weights
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached sums, to be divided by the global weight too


@dataclass(frozen=True)
class RunContext:
    """What a trainer knows before the first step; see :class:`Objective`."""

    tokenizer: Tokenizer
    seq_len: int
    total_steps: int
    resumed: bool  # the run goes on from a checkpoint; how far it is, ``at_step`` says
    device: torch.device  # of this rank
    tokens_per_step: int  # over all ranks
    flops_per_token: float  # of the model that is trained, forward and backward
    open_model: Callable[[str, str], tuple[LanguageModel, Tokenizer]]  # (run's or Hugging Face folder, checkpoint)
    training_sets: Mapping[str, TokenDataset]
    cache_dir: Path
    split: str = ""  # names the degree (tp, cp, pp) that spreads a row or the model over ranks; dp does not


class Objective(Protocol):
    """A function of model and batch. The model may be wrapped (DDP, FSDP, compile): call it, don't look inside.

    It may have, besides, what the trainer calls where it is there:

    ``prepare(context: RunContext)``  once, before the first step: open what is needed, refuse what does not fit
    ``at_step(step: int)``            before every step, with the number of steps done. All that changes during a run
                                      follows from that number, so that a resumed or rolled-back run is exact
    ``metrics() -> dict``             further figures for the log, of this rank alone
    ``watched: str``                  which of the Loss's metrics the monitors judge; by default its sum. For an
                                      objective whose loss changes its meaning in mid-run, which would look like a spike
    """

    def __call__(self, model: LanguageModel, batch: Batch) -> Loss: ...


class ObjectiveConfig(MethodConfig):
    """Base of objective configs."""

    @abstractmethod
    def build(self) -> Objective: ...
