"""The degrees of parallelism of a recipe, and what they come to on a given number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

from trainwright.core.errors import ConfigError

_LATER = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Degrees:
    """Resolved degrees; their product is the world size. Expert parallelism re-uses ranks of the others."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp


class ParallelConfig(BaseModel):
    """How the processes share the work."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    dp_replicate: int = Field(-1, description="Replicas of the model (DDP); -1: whatever the other degrees leave.")
    dp_shard: PositiveInt = Field(
        1, description="Processes over which parameters, gradients and optimizer are sharded (FSDP2)."
    )
    tp: PositiveInt = Field(1, description="Tensor-parallel degree.")
    pp: PositiveInt = Field(1, description="Pipeline stages.")
    cp: PositiveInt = Field(1, description="Context-parallel degree.")
    ep: PositiveInt = Field(1, description="Expert-parallel degree.")
    reshard_after_forward: bool = Field(
        True, description="FSDP2: free a block's gathered parameters after its forward pass."
    )
    accumulate: Literal["sharded", "whole"] = Field(
        "sharded",
        description="FSDP2, gradients of several micro-batches: sharded reduces after each, so that a rank holds its "
        "shard only; whole reduces once a step, and every rank holds the whole gradient until then.",
    )
    find_unused_parameters: bool = Field(
        False, description="Allow parameters that some micro-batch does not use (per-expert modules, skipped layers)."
    )

    @field_validator("dp_replicate")
    @classmethod
    def _replicate(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("should be -1 (whatever is left) or at least 1")
        return value

    def resolve(self, world_size: int) -> Degrees:
        """Degrees on ``world_size`` processes. Raises ConfigError where they don't multiply to it."""
        for key in _LATER:
            if getattr(self, key) > 1:
                raise ConfigError(
                    "is not in this release (it has dp_replicate and dp_shard); set it to 1",
                    key=f"parallel.{key}",
                    value=getattr(self, key),
                )
        replicate = self.dp_replicate
        if replicate == -1:
            if world_size % self.dp_shard:
                legal = [d for d in range(1, world_size + 1) if world_size % d == 0]
                raise ConfigError(
                    f"does not divide the world size {world_size}; use one of {', '.join(map(str, legal))}, "
                    "or start another number of processes (--nproc)",
                    key="parallel.dp_shard",
                    value=self.dp_shard,
                )
            replicate = world_size // self.dp_shard
        asked = replicate * self.dp_shard
        if asked != world_size:
            raise ConfigError(
                f"dp_replicate={replicate} x dp_shard={self.dp_shard} = {asked} processes, but there are "
                f"{world_size}; start that many (--nproc {asked}) or change the degrees",
                key="parallel",
            )
        return Degrees(replicate, self.dp_shard)
