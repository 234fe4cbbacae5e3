"""What every batcher offers: it lays the documents of an epoch out in rows."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from trainwright.core.registry import MethodConfig
from trainwright.data.packing import RowPlan


class BatcherConfig(MethodConfig):
    """Base of batcher configs."""

    # Rows of a step are regrouped by their length and trimmed before the forward pass (data/odb_rows.py).
    regroups: ClassVar[bool] = False
    # The rows of a step belong together: plan_steps() gives whole steps in their order, and the loader keeps it.
    orders_steps: ClassVar[bool] = False
    # Every token is in a row once an epoch.
    keeps_all: ClassVar[bool] = True

    @abstractmethod
    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        """Rows of at most ``seq_len`` tokens that hold every token of documents of ``lengths`` (integers >= 0) once.

        ``seed`` shuffles the documents; None keeps their order. The same arguments give the same rows, on any machine:
        a run is resumed by planning anew. The loader shuffles the order of the rows itself.
        """

    def plan_steps(self, lengths: np.ndarray, seq_len: int, seed: int | None, step_rows: int) -> RowPlan:
        """With ``orders_steps``: rows ``step_rows * i : step_rows * (i + 1)`` are those of step i over all ranks."""
        return self.plan(lengths, seq_len, seed)
