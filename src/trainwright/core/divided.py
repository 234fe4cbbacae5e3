"""Parameters that are divided over ranks by name: each rank holds some of them whole, as the stages of a pipeline do.

What needs a figure of all parameters together (the global gradient norm) looks here for the ranks to ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Division:
    """``group``: the ranks that together hold all parameters. ``elsewhere``: ids of those here that another rank
    counts, because it holds them too."""

    group: Any
    elsewhere: frozenset[int] = frozenset()

    def counts(self, param: Tensor) -> bool:
        return id(param) not in self.elsewhere

    def norm(self, mine: Tensor) -> Tensor:
        """The norm of all parameters, from that of this rank's; 0-d, a collective."""
        # The square of a norm above 1e19 is beyond float32.
        square = mine.to(torch.float64).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt().to(mine.dtype)


_division: ContextVar[Division | None] = ContextVar("division", default=None)


@contextmanager
def divided(division: Division | None) -> Iterator[None]:
    """Inside it, figures of all parameters are taken over the ranks of ``division``; None: over those here."""
    token = _division.set(division)
    try:
        yield
    finally:
        _division.reset(token)


def current_division() -> Division | None:
    return _division.get()
