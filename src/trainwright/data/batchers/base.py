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

    @abstractmethod
    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        """Rows of at most ``seq_len`` tokens that hold every token of documents of ``lengths`` (integers >= 0) once.

        ``seed`` shuffles the documents; None keeps their order. The same arguments give the same rows, on any machine:
        a run is resumed by planning anew. The loader shuffles the order of the rows itself.
        """
