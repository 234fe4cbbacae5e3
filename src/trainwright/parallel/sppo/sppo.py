"""SPPO: a row is cut into n chunks that go through the pipeline one behind the other, as micro-batches do.

    chunk i     attends K, V of chunks <= i; backward n..1, dK and dV summed for the earlier chunks (chunks.py)
    memory      K, V stay on the device; of what else chunk i saves, r_i goes to host memory (offload.py)
    ratio       r_i = min(1, BW T_fwd(i+1) / A_i), r_n = 0: copied out while chunk i + 1 goes forward (solver.py)
    cut         equal lengths, where later chunks are slower; or equal ``a l + b l (prefix + l / 2)`` (cut.py)
    bubble      (P - 1) / (n + P - 1) of a step on P stages, with chunks that take equally long (simulator.py)

SPPO, arXiv:2503.10377, reconstructed from its abstract and the seed card B009; no code of its authors was found. Ours
are the order of work (all chunks of a micro-batch forward, then all backward, one micro-batch after the other), what is
counted as an activation, and that memory is checked with all of a chunk on the device, which its backward pass needs.
The multiplexed partitioning of the paper (idle stages share the first and last chunks) is planned, not executed:
multiplex.py says what it would save.

It works on one process, too: then it bounds what is on the device at once, by chunks and by what is offloaded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.models.architecture import Architecture
from trainwright.parallel.context.base import ContextConfig, ContextParallel
from trainwright.parallel.sppo.cut import Work, bounds, flops
from trainwright.parallel.sppo.solver import Machine, evaluate, solve

if TYPE_CHECKING:
    from trainwright.parallel.mesh import Mesh


class Measured(BaseModel):
    """Figures of this machine for one stage, as ``trainwright plan sppo`` finds them."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    bandwidth: PositiveFloat = Field(description="Bytes a second from the device to host memory.")
    token_seconds: PositiveFloat = Field(description="Seconds of a token in the forward pass, without its pairs.")
    pair_seconds: NonNegativeFloat = Field(description="Seconds of a pair of query and key, over a stage's layers.")
    token_bytes: PositiveFloat = Field(description="Bytes that a token saves for the backward pass.")
    chunk_bytes: NonNegativeFloat = Field(
        0.0, description="Bytes that a chunk saves whatever its length and rows: the gradient of the head."
    )
    kv_bytes: NonNegativeFloat = Field(0.0, description="Bytes of a token's keys and values, and of their gradients.")


@dataclass(frozen=True)
class Layout:
    """Slots of the chunks' ends, from 0, and the share of each that goes to host memory; None: nothing is offloaded."""

    bounds: tuple[int, ...]
    ratios: tuple[float, ...] | None

    @property
    def chunks(self) -> int:
        return len(self.bounds) - 1


@register("context", "sppo", paper="arXiv:2503.10377", seed_id="B009")
class SppoConfig(ContextConfig):
    """Rows in chunks that follow each other through the pipeline, their activations partly in host memory."""

    chunks: PositiveInt | Literal["auto"] = Field(
        8, description="Chunks of a row; auto: the fastest of 1, 2, 4, ... that fits, by what was measured."
    )
    cut: Literal["equal", "balanced"] = Field(
        "balanced",
        description="equal: chunks of equal length; balanced: of equal work, so that none waits.",
    )
    offload: list[float] | Literal["auto", "off"] = Field(
        "off",
        description="Share of each chunk's activations that goes to host memory, the last one 0; auto: what is copied "
        "while the next chunk goes forward, by what was measured.",
    )
    min_chunk: PositiveInt = Field(128, description="Tokens below which a chunk is not worth its calls.")
    memory: PositiveFloat | None = Field(
        None, description="GiB of a device for activations and keys of a micro-batch; null: no limit. Needs measured."
    )
    measured: Measured | None = Field(None, description="Times, sizes and bandwidth of this machine; needed for auto.")

    def layout(self, arch: Architecture, length: int, stages: int = 1, rows: int = 1) -> Layout:
        """Of rows of ``length`` tokens. Raises ConfigError for what cannot be; the keys are the recipe's."""
        found = self._layout(arch, length, stages, rows)
        shortest = min(stop - start for start, stop in itertools.pairwise(found.bounds))
        if shortest < self.min_chunk:
            raise ConfigError(
                f"cuts rows of {length} tokens into chunks of which one has {shortest}, fewer than "
                f"min_chunk={self.min_chunk}; use {self._most(arch, length)} or fewer, or lower min_chunk",
                key="parallel.context.chunks",
                value=self.chunks,
            )
        return found

    def _layout(self, arch: Architecture, length: int, stages: int, rows: int) -> Layout:
        self._check_ratios()
        if self.measured is None:
            for key in ("chunks", "offload", "memory"):
                value = getattr(self, key)
                if value == "auto" or (key == "memory" and value is not None):
                    raise ConfigError(
                        "is decided by bandwidth and times of this machine, and they were not measured; set "
                        "parallel.context.measured (`trainwright plan sppo` finds it), or give a number"
                        + (", a list or off" if key == "offload" else ""),
                        key=f"parallel.context.{key}",
                        value=value,
                    )
        memory = None if self.memory is None else self.memory * 2**30 / rows
        if self.chunks == "auto":
            if length < self.min_chunk:
                raise ConfigError(
                    f"is above rows of {length} tokens; lower it",
                    key="parallel.context.min_chunk",
                    value=self.min_chunk,
                )
            try:
                choice = solve(
                    length,
                    stages,
                    self.machine(arch, rows),
                    min_chunk=self.min_chunk,
                    memory=memory,
                    how=self.cut,
                    shape=flops(arch),
                    offload=self.offload == "auto",
                )
            except ValueError as error:
                raise self._too_small(str(error)) from None
            return Layout(choice.bounds, choice.ratios if self.offload == "auto" else None)
        if length < self.chunks:
            raise ConfigError(
                f"is more than the {length} tokens of a row; use {self._most(arch, length)} or fewer",
                key="parallel.context.chunks",
                value=self.chunks,
            )
        cut = bounds(length, self.chunks, self.cut, flops(arch))
        if isinstance(self.offload, list):
            return Layout(cut, tuple(self.offload))
        if self.measured is None:
            return Layout(cut, None)
        given = evaluate(cut, stages, self.machine(arch, rows), self.offload == "auto")
        if memory is not None and given.peak > memory:
            raise self._too_small(f"{self.chunks} chunks need {given.peak:.4g} bytes a row")
        return Layout(cut, given.ratios if self.offload == "auto" else None)

    def _check_ratios(self) -> None:
        ratios = self.offload
        if not isinstance(ratios, list):
            return
        why = None
        if self.chunks == "auto":
            why = "is a list, and the number of chunks is not known beforehand; use auto, or give chunks"
        elif len(ratios) != self.chunks:
            why = f"has {len(ratios)} shares for {self.chunks} chunks; give one for each"
        elif any(not 0 <= r <= 1 for r in ratios):
            why = "has a share outside of 0 .. 1"
        elif ratios[-1] != 0:
            why = "sends some of the last chunk, whose backward pass begins at once; make its share 0"
        if why is not None:
            raise ConfigError(why, key="parallel.context.offload", value=ratios)

    def _too_small(self, why: str) -> ConfigError:
        return ConfigError(
            f"is too little: {why}; use more chunks, more stages, offload: auto, or a smaller micro_batch_size",
            key="parallel.context.memory",
            value=self.memory,
        )

    def _most(self, arch: Architecture, length: int) -> int:
        """The largest number of chunks that are long enough."""
        n = max(1, length // self.min_chunk)
        while n > 1:
            cut = bounds(length, n, self.cut, flops(arch))
            if min(stop - start for start, stop in itertools.pairwise(cut)) >= self.min_chunk:
                break
            n -= 1
        return n

    def machine(self, arch: Architecture, rows: int) -> Machine:
        """What the solver goes by; ``measured`` has to be there."""
        assert self.measured is not None
        m = self.measured
        shape = flops(arch).pair  # how the seconds of a pair are spread over layers of different windows
        whole = sum(cost for _, cost in shape)
        pair = tuple((window, m.pair_seconds * cost / whole) for window, cost in shape)
        return Machine(Work(m.token_seconds, pair), m.token_bytes, m.bandwidth, m.kv_bytes, m.chunk_bytes / rows)

    # -- as a context method --------------------------------------------------------------------------------------

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        raise ConfigError(
            "spreads rows over ranks, and sppo spreads them over time; set cp=1, or use another context",
            key="parallel.cp",
            value=cp,
        )

    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        self.check(mesh.degrees.cp, 0, 0, 0)
        raise AssertionError


def sppo_of(config: Any) -> SppoConfig | None:
    """Of a ParallelConfig: the settings where rows go in chunks."""
    found = getattr(config, "context", None)
    return found if isinstance(found, SppoConfig) else None
