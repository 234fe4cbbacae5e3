"""Data parallelism over a built model: DDP, FSDP2, HSDP. The model itself does not know.

The loop divides the loss by the weight of the global batch, so the gradients of the ranks have to be added up. DDP and
FSDP2 take their mean (gloo has no scaled sum), hence ``loss_scale``, the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from trainwright.models.base import LanguageModel
from trainwright.parallel.config import ParallelConfig
from trainwright.parallel.mesh import Mesh


@dataclass
class Parallelized:
    """A model made parallel: call ``module``; ``model`` is the same without a wrapper."""

    model: LanguageModel
    module: nn.Module
    loss_scale: float = 1.0  # multiplies the loss, where the reduction is a mean over ranks

    @contextmanager
    def no_sync(self, *, last_micro_batch: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients are reduced on the last one only."""
        if isinstance(self.module, DistributedDataParallel):
            with contextlib.nullcontext() if last_micro_batch else self.module.no_sync():
                yield
            return
        sharded = hasattr(self.module, "set_requires_gradient_sync")
        if sharded:
            cast(Any, self.module).set_requires_gradient_sync(last_micro_batch)
        yield

    def state(self) -> dict[str, Tensor]:
        return model_state(self.model)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by plain name, each storage once; the live tensors, DTensors where sharded."""
    seen: set[int] = set()
    out = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            out[name] = value.detach()
    return out


def parallelize(
    model: LanguageModel, mesh: Mesh, config: ParallelConfig, precision: Any, device: torch.device
) -> Parallelized:
    """Move ``model`` to ``device`` and make it parallel over ``mesh``.

    Every rank passes a model with the same weights, built from the same seed.
    """
    model = model.to(device)
    if mesh.mesh is None:
        return Parallelized(model, model)
    if mesh.degrees.dp_shard == 1:
        wrapped = DistributedDataParallel(
            model,
            process_group=mesh.mesh["dp_replicate"].get_group(),
            gradient_as_bucket_view=True,
            find_unused_parameters=any(role == "expert" for role in model.param_roles().values()),
        )
        return Parallelized(model, wrapped, loss_scale=float(mesh.dp_size))
    sharded = _fully_shard(model, mesh, config, precision)
    return Parallelized(model, sharded, loss_scale=float(mesh.dp_size))


def _fully_shard(model: LanguageModel, mesh: Mesh, config: ParallelConfig, precision: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    whole = cast(DeviceMesh, mesh.mesh)
    over = whole if mesh.degrees.dp_replicate > 1 else whole["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=precision.fsdp_param_dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=over, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=over, mp_policy=policy, reshard_after_forward=False)
    return model
