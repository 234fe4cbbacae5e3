"""The sharding factors s_p | s_g | s_o | N: over how many ranks parameters, gradients and optimizer states are sharded.

An optimizer shard needs its gradient, and a gradient shard its parameter, so each factor divides the next one, and the
last divides the number N of ranks. Groups are neighbouring ranks: small factors stay within a machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

FACTORS = ("parameters", "gradients", "states")


@dataclass(frozen=True, order=True)
class Chain:
    """Ranks over which each of the three is sharded; 1: every rank holds all of it."""

    parameters: int = 1
    gradients: int = 1
    states: int = 1

    def __str__(self) -> str:
        return f"({self.parameters}, {self.gradients}, {self.states})"

    def fault(self, ranks: int) -> tuple[str, str] | None:
        """Which factor cannot be, on ``ranks`` ranks, and why; None: the chain is legal."""
        return next(self._faults(ranks), None)

    def check(self, ranks: int) -> Chain:
        """The chain itself. Raises ValueError where it is not legal on ``ranks`` ranks."""
        fault = self.fault(ranks)
        if fault is not None:
            raise ValueError(f"{fault[0]}={getattr(self, fault[0])}: {fault[1]}")
        return self

    def _faults(self, ranks: int) -> Iterator[tuple[str, str]]:
        for key in FACTORS:
            if getattr(self, key) < 1:
                yield key, "should be at least 1"
        for key, next_key in itertools.pairwise(FACTORS):
            size, next_size = getattr(self, key), getattr(self, next_key)
            if next_size % size:
                yield (
                    key,
                    f"does not divide {next_key}={next_size}, as it should: an optimizer shard needs its gradient, a "
                    f"gradient shard its parameter; use one of {_divisors(next_size)}",
                )
        if ranks % self.states:
            yield "states", f"does not divide the number of processes, {ranks}; use one of {_divisors(ranks)}"

    def name(self, ranks: int) -> str:
        """What this point is called elsewhere; empty where it has no name."""
        known = {
            Chain(1, 1, 1): "DDP",
            Chain(1, 1, ranks): "ZeRO-1",
            Chain(1, ranks, ranks): "ZeRO-2",
            Chain(ranks, ranks, ranks): "ZeRO-3",
        }
        if self in known:
            return known[self]
        return "MiCS, HSDP" if self.parameters == self.gradients == self.states else ""


def chains(ranks: int) -> list[Chain]:
    """All legal chains on ``ranks`` ranks, those that shard least first: 20 for 8 ranks, 286 for 1024."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [
        Chain(p, g, o) for o in sizes for g in sizes if o % g == 0 for p in sizes if g % p == 0
    ]  # fmt: skip


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
