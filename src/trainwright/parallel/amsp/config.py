"""AMSP in a recipe."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from trainwright.core.errors import ConfigError
from trainwright.core.registry import MethodConfig, register
from trainwright.parallel.amsp.chain import FACTORS, Chain

if TYPE_CHECKING:
    import torch

    from trainwright.models.base import LanguageModel
    from trainwright.parallel.amsp.engine import Amsp
    from trainwright.parallel.config import Degrees, ParallelConfig

KEY = "parallel.sharding"


class ShardingConfig(MethodConfig):
    """Base of ways to shard a model over data-parallel ranks other than FSDP2's."""

    @abstractmethod
    def check(self, degrees: Degrees, parallel: ParallelConfig) -> None:
        """Raises ConfigError where it cannot be on so many ranks, or not with the other keys of ``parallel``."""

    @abstractmethod
    def describe(self) -> str:
        """How it shards, in words: what ranks have to agree on."""

    @abstractmethod
    def check_steps(self, micro_steps: int | None) -> None:
        """Raises ConfigError where it cannot be with so many micro-batches a step; None: they vary."""

    @abstractmethod
    def apply(self, model: LanguageModel, parallel: ParallelConfig, precision: Any, device: torch.device) -> Any:
        """Shard ``model`` in place. What it gives has ``micro_step(last=...)``, around each micro-batch."""


@register("sharding", "amsp", paper="arXiv:2311.00257", seed_id="B004")
class AmspConfig(ShardingConfig):
    """Parameters, gradients and optimizer states sharded over different numbers of ranks, given or planned."""

    parameters: PositiveInt | None = Field(
        None, description="Neighbouring ranks that parameters are sharded over; divides gradients. null: planned."
    )
    gradients: PositiveInt | None = Field(
        None, description="Ranks that gradients are sharded over; divides states. null: planned."
    )
    states: PositiveInt | None = Field(
        None, description="Ranks that optimizer states are sharded over; divides the number of ranks. null: planned."
    )
    auto: bool = Field(False, description="Plan the factors anew at each start. That is so where none are given.")
    accumulation_buffer: bool = Field(
        True, description="Keep a buffer in which micro-batches add up their gradient shards; false: one a step."
    )
    gradient_dtype: Literal["float32", "compute"] = Field(
        "float32",
        description="What gradients are reduced and added up in; compute: that of the model's copy, half the bytes, "
        "and small gradients of many micro-batches are rounded away.",
    )
    cluster: Path | None = Field(
        None, description="Planner: YAML of the machines, as of `trainwright plan comm`; null: eight H100 a node."
    )
    inside_gb_per_s: PositiveFloat | None = Field(
        None, description="Planner: measured 10^9 bytes a second of a rank inside a node; null: the cluster's."
    )
    between_gb_per_s: PositiveFloat | None = Field(
        None, description="Planner: measured 10^9 bytes a second of a rank between nodes; null: the cluster's."
    )

    @model_validator(mode="before")
    @classmethod
    def _none_given(cls, value: Any) -> Any:
        if isinstance(value, dict) and all(value.get(key) is None for key in FACTORS):
            return {**value, "auto": True}
        return value

    @property
    def chain(self) -> Chain:
        """Raises ConfigError where only some factors are given."""
        factors = [getattr(self, key) for key in FACTORS]
        if None in factors:
            missing = ", ".join(key for key in FACTORS if getattr(self, key) is None)
            raise ConfigError(f"has no {missing}; give all three factors, or none to have them planned", key=KEY)
        return Chain(*factors)

    def check(self, degrees: Degrees, parallel: ParallelConfig) -> None:
        for key in ("dp_shard", "tp", "pp", "ep"):
            if getattr(degrees, key) > 1:
                raise ConfigError(
                    "does not go with sharding, which says itself what data-parallel ranks share; set 1, or leave "
                    "sharding out",
                    key=f"parallel.{key}",
                    value=getattr(degrees, key),
                )
        if parallel.accumulate == "whole":
            raise ConfigError(
                "is for FSDP2; with sharding, gradients=1 holds the whole gradient on every rank",
                key="parallel.accumulate",
                value="whole",
            )
        if parallel.auto:
            raise ConfigError(
                "chooses dp_shard, in whose place sharding stands; leave one of them out", key="parallel.auto"
            )
        if parallel.context is not None and parallel.context.name == "sppo":
            raise ConfigError(
                "goes backward several times a micro-batch, which sharding does not; leave one of them out",
                key="parallel.context",
                value="sppo",
            )
        if self.auto and self.parameters is None:
            return
        chain = self.chain
        fault = chain.fault(degrees.dp_replicate * degrees.cp)
        if fault is not None:
            raise ConfigError(fault[1], key=f"{KEY}.{fault[0]}", value=getattr(chain, fault[0]))

    def describe(self) -> str:
        return ", ".join(f"{key}={getattr(self.chain, key)}" for key in FACTORS)

    def check_steps(self, micro_steps: int | None) -> None:
        if self.accumulation_buffer or self.gradients == 1 or micro_steps == 1:
            return
        many = "a varying number of" if micro_steps is None else f"{micro_steps}"
        raise ConfigError(
            f"leaves no place where {many} micro-batches a step could add up gradients that are sharded over "
            f"{self.gradients or 'several'} ranks; set true, raise train.micro_batch_size, or set gradients=1",
            key=f"{KEY}.accumulation_buffer",
            value=False,
        )

    def apply(self, model: LanguageModel, parallel: ParallelConfig, precision: Any, device: torch.device) -> Amsp:
        """``model`` sharded in place, block by block."""
        from trainwright.parallel.amsp.engine import Amsp

        compute = precision.fsdp_param_dtype
        try:
            return Amsp(
                model,
                self.chain,
                blocks=model.blocks,
                device=device,
                compute_dtype=compute,
                gradient_dtype=None if self.gradient_dtype == "float32" else compute,
                accumulation_buffer=self.accumulation_buffer,
                find_unused_parameters=parallel.find_unused_parameters,
                timeout_s=parallel.timeout,
            )
        except ValueError as error:
            raise ConfigError(str(error), key=KEY) from None
