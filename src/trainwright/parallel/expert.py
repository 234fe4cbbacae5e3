"""Expert parallelism: each rank holds some experts of every layer, and tokens travel to them and back.

Of the ``dp_shard x cp`` ranks that see different tokens, ``ep`` neighbours share the experts out; rank i of them holds
experts ``i E / ep .. (i + 1) E / ep - 1``. In each layer a rank routes its own tokens, all to all: how many rows go to
each expert, the rows, and their results back (GShard, arXiv:2006.16668, without its capacity: no token is dropped).

Weights are DTensors, cut along the experts. FSDP2 shards a rank's experts over the ranks ``ep`` apart that hold the
same ones, and all else over all of ``dp_shard x cp``. Under tensor parallelism (with ``sequence_parallel``) each of its
ranks routes the tokens that it has; experts are then whole on each, and their gradients summed.

The gradient: losses are scaled by the number of data ranks, R, because FSDP2 takes a mean. Experts get rows of ``ep``
ranks and the mean over R / ep of them, so their gradient is multiplied by 1 / ep.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainwright.core.errors import ConfigError
from trainwright.models.moe import MoE
from trainwright.parallel.tensor import _WholeExperts

WEIGHTS = ("gate", "up", "down")


class _Exchanged(torch.autograd.Function):
    """Rows ``[sum(sent), D]``, ``sent[i]`` for rank i in order -> ``[sum(received), D]``; gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Scaled(torch.autograd.Function):
    """The same value; its gradient times ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


class _SpreadExperts(MoE):
    """Holds ``E / ep`` experts; takes and returns rows of all."""

    _ep: Any  # the process group
    _ep_size: int

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        own = (w.to_local() if isinstance(w, DTensor) else w for w in super()._weights())
        gate, up, down = (cast(Tensor, _Scaled.apply(w, 1 / self._ep_size)) for w in own)  # [E / ep, ...]
        return gate, up, down

    @torch.compiler.disable  # how much is sent is not known when it is compiled
    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        device = rows.device.type
        if torch.is_autocast_enabled(device):  # what the products will use: half the bytes
            rows = rows.to(torch.get_autocast_dtype(device))
        there = counts.unflatten(0, (self._ep_size, -1))  # [ep, E / ep]: rows from here for each expert
        here = torch.empty_like(there)  # rows from each rank for this rank's experts
        dist.all_to_all_single(here, there.contiguous(), group=self._ep)
        # The one wait for the device: the sizes of what is sent are host numbers.
        sent, received = torch.stack([there.sum(1), here.sum(1)]).tolist()
        x = cast(Tensor, _Exchanged.apply(rows, sent, received, self._ep))  # [R, D], by rank and then by expert
        expert = torch.arange(here.shape[1], device=here.device).expand_as(here).flatten()
        order = expert.repeat_interleave(here.flatten(), output_size=x.shape[0]).argsort(stable=True)
        out = super()._experts(x.index_select(0, order), here.sum(0))
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        return cast(Tensor, _Exchanged.apply(out.index_select(0, place), received, sent, self._ep))


class _SpreadExpertsTensorParallel(_SpreadExperts, _WholeExperts):
    """The same, with the gradient summed over the ranks of a tensor-parallel group, which route different tokens."""


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spread the experts of ``model`` in place over the ranks of ``mesh`` (one dimension), after
    ``apply_tensor_parallel`` where there is some.

    Every rank passes the same weights. Raises ConfigError where experts are not plain or ``mesh`` does not divide them.
    """
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    for moe in layers:
        if type(moe) not in (MoE, _WholeExperts):
            raise ConfigError(
                f"spreads plain experts, and these are {type(moe).__name__}; leave out the transform that put them "
                "there, or set ep=1",
                key="parallel.ep",
                value=mesh.size(),
            )
        n_experts = moe.gate.shape[0]
        if n_experts % mesh.size():
            raise ConfigError(f"does not divide the {n_experts} experts", key="parallel.ep", value=mesh.size())
        for name in WEIGHTS:
            weight = cast(nn.Parameter, getattr(moe, name))
            whole = weight.detach()
            # Ranks of a tensor-parallel group stay equal, as they sum their gradients; DTensor need not know of them.
            whole = whole.to_local() if isinstance(whole, DTensor) else whole
            cut = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            moe.register_parameter(name, nn.Parameter(cut, requires_grad=weight.requires_grad))
        moe.__class__ = _SpreadExperts if type(moe) is MoE else _SpreadExpertsTensorParallel
        spread = cast(_SpreadExperts, moe)
        spread._ep, spread._ep_size = mesh.get_group(), mesh.size()


def shard_dim(weight: Tensor, ep: int, ranks: int) -> int:
    """The dimension of ``weight [E, ...]`` that FSDP2 shards over ``ranks`` ranks with the same ``E / ep`` experts."""
    return 0 if weight.shape[0] // ep % ranks == 0 or weight.shape[1] % ranks else 1


def fully_shard_experts(block: nn.Module, over: DeviceMesh, data: DeviceMesh, ep: int, **settings: Any) -> None:
    """FSDP2 for the experts of ``block`` over the ranks that hold the same, ahead of the rest of it.

    over  ranks with the same experts: one dimension, or replicas and shards
    data  what everything else is sharded over
    """
    from torch.distributed.fsdp import fully_shard

    ranks = over.size(over.ndim - 1)
    for moe in [m for m in block.modules() if isinstance(m, MoE)]:
        # It would else be taken for one of the experts' weights, and averaged over too few ranks.
        fully_shard(moe.router, mesh=data, **(settings | {"reshard_after_forward": False}))
        fully_shard(moe, mesh=over, shard_placement_fn=lambda w: Shard(shard_dim(w, ep, ranks)), **settings)
