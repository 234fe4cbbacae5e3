"""float32, bfloat16 and float16 through autocast over float32 weights, and the choice among them by measurement.

Mixed Precision Training, arXiv:1710.03740. Weights stay in float32: a bfloat16 weight of 1.0 moves in steps of
0.004 to 0.008, so a usual update rounds to nothing.
"""

from __future__ import annotations

import logging

import torch
from pydantic import Field, PositiveFloat

from trainwright.core.distributed import broadcast_object
from trainwright.core.errors import ConfigError
from trainwright.core.hardware import fast_dtypes
from trainwright.core.registry import register
from trainwright.precision.base import Precision, PrecisionConfig

log = logging.getLogger("trainwright")


@register("precision", "fp32")
class FP32Config(PrecisionConfig):
    """Everything in float32."""

    def build(self, device: torch.device) -> Precision:
        return Precision(torch.float32, device.type)


@register("precision", "bf16")
class BF16Config(PrecisionConfig):
    """Matrix products in bfloat16, weights and optimizer in float32."""

    def build(self, device: torch.device) -> Precision:
        rates = fast_dtypes(device)
        if rates["bf16"] < rates["fp32"]:
            log.warning(
                "precision=bf16 on this %s: its bfloat16 matrix products run at %.3g GFLOP/s, "
                "float32 ones %.3g times faster; use precision=fp32",
                device.type,
                rates["bf16"] / 1e9,
                rates["fp32"] / max(rates["bf16"], 1.0),
            )
        return Precision(torch.bfloat16, device.type)


@register("precision", "fp16", paper="arXiv:1710.03740")
class FP16Config(PrecisionConfig):
    """Matrix products in float16 with a loss scaler, weights and optimizer in float32."""

    initial_scale: PositiveFloat = Field(65536.0, description="Loss scale to begin with; halved at each overflow.")
    growth_interval: int = Field(2000, ge=1, description="Steps without overflow before the scale is doubled.")

    def build(self, device: torch.device) -> Precision:
        if fast_dtypes(device)["fp16"] == 0:
            raise ConfigError(f"this {device.type} has no float16 matrix product; use auto", key="name", value="fp16")
        scaler = torch.amp.GradScaler(device.type, init_scale=self.initial_scale, growth_interval=self.growth_interval)
        return Precision(torch.float16, device.type, scaler)


@register("precision", "auto")
class AutoConfig(PrecisionConfig):
    """bf16 where its matrix products are measured to be clearly faster than float32's, else fp32."""

    def build(self, device: torch.device) -> Precision:
        rates = fast_dtypes(device)
        # Rank 0 decides: ranks that measured differently would compute, and gather, in different formats.
        fast = broadcast_object(rates["bf16"] > 1.5 * rates["fp32"])
        return Precision(torch.bfloat16 if fast else torch.float32, device.type)
