"""The degrees of parallelism of a recipe, and what they come to on a given number of processes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from trainwright.core.errors import ConfigError
from trainwright.core.registry import MethodConfig, Slot, build
from trainwright.parallel.amsp.config import ShardingConfig
from trainwright.parallel.context.base import ContextConfig


@dataclass(frozen=True)
class Degrees:
    """Resolved degrees; their product is the world size. Expert parallelism re-uses ranks: ``ep`` divides
    ``dp_shard * cp`` and the experts lie on that many of them."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp


class TensorConfig(MethodConfig):
    """Base of what changes how tensor-parallel ranks work together. The stream is then whole on every rank."""

    def check(self, degrees: Degrees, config: ParallelConfig, arch: Any) -> None:
        """Raises ConfigError where it does not go with the degrees or a model of :class:`Architecture` ``arch``."""

    def check_recipe(self, config: Any, rows: int, micro_batch_size: int) -> None:
        """Raises ConfigError for parts of the RunConfig ``config`` that it does not go with. ``rows`` is a rank's share
        of the global batch. Before any process group is made, as :meth:`check`."""

    @abstractmethod
    def apply(self, model: Any, mesh: Any) -> None:
        """Change ``model``, whose layers are cut over the ranks of ``mesh`` (one dimension) already, in place."""


class PipelineSection(BaseModel):
    """How a pipeline's stages work together."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b",
        description="gpipe (arXiv:1811.06965), 1f1b (arXiv:2006.09503), interleaved (arXiv:2104.04473): several "
        "stages a rank; zero_bubble (arXiv:2401.10241): the V schedule, two stages a rank.",
    )
    stages_per_rank: PositiveInt = Field(
        1, description="Stages of a rank; more than 1 for interleaved, 2 for zero_bubble."
    )
    layers: list[PositiveInt] | None = Field(
        None, description="Layers of each stage, in order; null: as even as they go, the first and last stage fewer."
    )
    fill_warmup: NonNegativeInt = Field(
        0,
        description="1f1b with early exits (arXiv:2312.04916): up to so many of a step's micro-batches go through the "
        "first stages alone, while these wait for the first gradient.",
    )
    fill_cooldown: NonNegativeInt = Field(
        0,
        description="The same at the end: up to so many go backward through the last stages alone.",
    )
    backward_ratio: PositiveFloat = Field(
        2.0, description="Time of a backward pass over that of a forward pass; says how many of them bubbles hold."
    )


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
    sequence_parallel: bool = Field(
        True, description="tp: norms and the residual stream hold 1 / tp of a row's tokens on each rank."
    )
    context: Annotated[ContextConfig | None, Slot("context", optional=True)] = Field(
        None, description="cp: how a row's tokens are spread; null: ring."
    )
    tensor: Annotated[TensorConfig | None, Slot("tensor", optional=True)] = Field(
        None, description="tp: how its communication hides behind computing; null: not."
    )
    sharding: Annotated[ShardingConfig | None, Slot("sharding", optional=True)] = Field(
        None, description="How data-parallel ranks share the model in another way than dp_shard's; null: dp_shard."
    )
    pipeline: PipelineSection = Field(default_factory=PipelineSection)
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
    auto: bool = Field(
        False,
        description="Choose dp_replicate, dp_shard, cp and tp anew at each start, by the number of processes, the "
        "model, seq_len and the memory of a device. `parallel: auto` is short for it.",
    )
    device_memory: PositiveFloat | None = Field(
        None, description="auto: GiB of memory to count on for each device; null: what it has."
    )
    timeout: PositiveFloat = Field(
        600.0, description="Seconds that ranks wait for one that does not answer before the run ends."
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """``parallel: auto``, also with overrides of other keys."""
        if value == "auto":
            return {"auto": True}
        if isinstance(value, dict) and value.get("name") == "auto":
            return {**{k: v for k, v in value.items() if k != "name"}, "auto": True}
        return value

    @model_validator(mode="before")
    @classmethod
    def _whole_stream(cls, value: Any) -> Any:
        """What a tensor method needs of ``sequence_parallel``, where the recipe does not say."""
        if isinstance(value, dict) and value.get("tensor") is not None:
            return {"sequence_parallel": False, **value}
        return value

    @field_validator("dp_replicate")
    @classmethod
    def _replicate(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("should be -1 (whatever is left) or at least 1")
        return value

    def resolve(self, world_size: int) -> Degrees:
        """Degrees on ``world_size`` processes. Raises ConfigError where they don't multiply to it."""
        others = self.dp_shard * self.cp * self.tp * self.pp
        replicate = self.dp_replicate
        if replicate == -1:
            if world_size % others:
                raise self._misfit(world_size, others)
            replicate = world_size // others
        if replicate * others != world_size:
            named = [("dp_replicate", replicate), *((k, getattr(self, k)) for k in ("dp_shard", "cp", "tp", "pp"))]
            product = " x ".join(f"{k}={v}" for k, v in named if v > 1 or k in ("dp_replicate", "dp_shard"))
            raise ConfigError(
                f"{product} = {replicate * others} processes, but there are {world_size}; start that many "
                f"(--nproc {replicate * others}) or change the degrees",
                key="parallel",
            )
        if (self.dp_shard * self.cp) % self.ep:
            raise ConfigError(
                f"does not divide dp_shard x cp = {self.dp_shard * self.cp}, the ranks that the experts lie on; use "
                f"{_choices(self.dp_shard * self.cp)}",
                key="parallel.ep",
                value=self.ep,
            )
        degrees = Degrees(replicate, self.dp_shard, self.cp, self.tp, self.pp, self.ep)
        if self.sharding is not None:
            self.sharding.check(degrees, self)
        return degrees

    def _misfit(self, world_size: int, others: int) -> ConfigError:
        """What to say where the degrees do not divide the number of processes."""
        named = [(k, getattr(self, k)) for k in ("dp_shard", "cp", "tp", "pp") if getattr(self, k) > 1]
        if len(named) == 1:
            key, value = named[0]
            return ConfigError(
                f"does not divide the world size {world_size}; use one of {_choices(world_size)}, or start another "
                f"number of processes (--nproc {value})",
                key=f"parallel.{key}",
                value=value,
            )
        product = " x ".join(f"{k}={v}" for k, v in named)
        return ConfigError(
            f"{product} = {others} does not divide the world size {world_size}; start {others} processes or a multiple "
            f"(--nproc {others}), or lower one of them",
            key="parallel",
        )


def micro_batch_rows(local: int, seq_len: int, pp: int, given: int | None = None) -> int:
    """Rows of a micro-batch of a rank with ``local`` rows a step; ``given`` by the recipe, or some 8192 tokens."""
    micro = given or max(1, 8192 // seq_len)
    if pp > 1 and given is None:
        micro = min(micro, max(1, local // (4 * pp)))  # ranks are idle for (pp - 1) / micro-batches of a step
    return min(micro, local)


def _choices(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def context_method(config: ParallelConfig) -> ContextConfig:
    """How rows are spread where ``cp`` is above 1."""
    return config.context or cast(ContextConfig, build("context", "ring"))
