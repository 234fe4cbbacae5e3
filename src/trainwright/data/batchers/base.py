"""What every batcher offers: it lays the documents of an epoch out in rows."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from trainwright.core.registry import MethodConfig
from trainwright.data.packing import RowPlan


class BatcherConfig(MethodConfig):
    """Base of batcher configs."""

    @abstractmethod
    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        """Rows of ``seq_len`` tokens for documents of ``lengths`` (int, >= 1). ``seed`` shuffles the documents; None keeps
        their order. The same arguments give the same rows."""


def order(num_docs: int, seed: int | None) -> np.ndarray:
    """A permutation of the documents, int64."""
    return np.arange(num_docs) if seed is None else np.random.default_rng(seed).permutation(num_docs)
