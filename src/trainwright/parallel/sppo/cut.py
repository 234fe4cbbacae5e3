"""Where a row is cut into chunks, and what a chunk costs.

The first t tokens of a row cost ``a t + b pairs(t)``; a chunk of l tokens behind ``prefix`` others costs the
difference, which for plain causal attention is ``a l + b l (prefix + l / 2)``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from trainwright.models.architecture import Architecture


def pairs(tokens: int, window: int = 0) -> float:
    """Pairs of query and key among the first ``tokens`` of a row; ``window``: keys that a query sees, 0: all."""
    w = min(window or tokens, tokens)
    return w * (w + 1) / 2 + (tokens - w) * w


@dataclass(frozen=True)
class Work:
    """Cost (FLOPs, seconds) of a token, and of a pair by the window of the layers: ``((window, cost), ...)``."""

    token: float
    pair: tuple[tuple[int, float], ...]

    def upto(self, tokens: int) -> float:
        return self.token * tokens + sum(cost * pairs(tokens, window) for window, cost in self.pair)

    def of(self, bounds: tuple[int, ...]) -> list[float]:
        """Of each chunk ``bounds[i]:bounds[i + 1]``."""
        return [self.upto(stop) - self.upto(start) for start, stop in itertools.pairwise(bounds)]


def flops(arch: Architecture) -> Work:
    """Forward FLOPs of one row of ``arch``."""
    by_window: dict[int, float] = {}
    for layer in range(arch.n_layers):
        window = arch.window(layer)
        by_window[window] = by_window.get(window, 0.0) + 4.0 * arch.n_heads * arch.head_dim
    weights = sum(arch.matmul_params(i) for i in range(arch.n_layers)) + arch.vocab_size * arch.dim
    return Work(2.0 * weights, tuple(sorted(by_window.items())))


def bounds(length: int, chunks: int, how: Literal["equal", "balanced"], work: Work) -> tuple[int, ...]:
    """``chunks + 1`` slots, from 0 to ``length``: chunks of equal length, or of equal cost. None is empty.

    Raises ValueError where there are fewer tokens than chunks.
    """
    if not 1 <= chunks <= length:
        raise ValueError(f"a row of {length} tokens cannot be cut into {chunks} chunks")
    if how == "equal":
        return tuple(length * i // chunks for i in range(chunks + 1))
    found = [0]
    total = work.upto(length)
    for i in range(1, chunks):
        # At least one token a chunk, also for those that follow.
        low, high = found[-1] + 1, length - (chunks - i)
        goal = total * i / chunks
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if work.upto(middle) < goal else (low, middle)
        nearer = low - 1 if low - 1 > found[-1] and goal - work.upto(low - 1) < work.upto(low) - goal else low
        found.append(nearer)
    return (*found, length)
