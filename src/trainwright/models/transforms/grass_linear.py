"""Linear layers whose backward pass computes the gradient of selected rows or columns of the weight alone.

    y = x W^T + b, D the gradient of y:   that of W is D^T x [out, in], which is never made;
    of its rows i it is D[:, i]^T x [r, in], of its columns D^T x[:, i] [out, r]
Which these are, and when the whole gradient is wanted after all, the optimizer says (core/sliced_gradient.py): Grass
(optim/grass.py) wants the whole at the first step and at every new selection, and r rows or columns in between.
The products cost r / m of the dense one, and so do the gradient's bytes.
Grass: Compute Efficient Low-Memory LLM Training with Structured Sparse Gradients, arXiv:2406.17660.

The paper has rows alone. Grass here selects along the shorter side of each matrix, hence the columns.
Of the gradient there is but a part, so that whatever needs the whole is refused: clipping by its norm or by spikes of
that, methods that compare updates with gradients. What is measured, and logged as
``grad_norm``, is the norm of what was computed: it is larger at the steps of a new selection.

Data-parallel ranks (replicas, and shards of FSDP2) add up the slices alone: r / m of the numbers of the dense
reduction, once a step however many micro-batches it has. At a selection the whole gradient is reduced as ever, and all
ranks choose from the norms of its rows. FSDP2's machinery does the rest, for replicas too: DDP would wait for every
gradient.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainwright.core.errors import ConfigError
from trainwright.core.registry import MethodConfig, register
from trainwright.core.sliced_gradient import SlicedGradient, accumulate, offer, wanted
from trainwright.models.base import LanguageModel

log = logging.getLogger("trainwright")


class _SlicedLinear(torch.autograd.Function):
    """``x W^T + b`` in ``dtype``; see the module. Autograd saves what it does for a dense layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        indexes: Tensor,
        dim: int,
        dtype: torch.dtype,
        sharded: tuple[Tensor, ...],
    ) -> Tensor:
        cast = x.to(dtype)
        ctx.save_for_backward(cast, weight, bias, indexes)
        ctx.dim, ctx.sharded = dim, sharded
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(cast, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, bias, indexes = ctx.saved_tensors
        to_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        to_bias = grad.flatten(0, -2).sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            if ctx.dim == -2:
                grad = grad.index_select(-1, indexes)
            else:
                x = x.index_select(-1, indexes)
            values = grad.flatten(0, -2).mT @ x.flatten(0, -2)  # [r, in] or [out, r]
            if ctx.sharded:
                accumulate(ctx.sharded[0], values, indexes, ctx.dim)
            else:
                to_weight = SlicedGradient(values.to(weight.dtype), indexes, ctx.dim, weight.shape)
        return to_x, to_weight, to_bias, None, None, None, None


class GrassLinear(nn.Linear):
    """``linear`` with a backward pass that computes what the optimizer asks for; a drop-in that keeps its parameters.

    Until an optimizer asks for less the whole gradient is computed. ``weight.grad`` is a SlicedGradient then.
    Where FSDP2 shards the weight, the optimizer has a DTensor that the layer computes a gathered copy of: see
    :func:`follow_sharding`.
    """

    sharded: tuple[Tensor, ...]  # the DTensor, in a tuple, since a module would take it for another parameter

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        self.sharded = ()
        offer(self.weight)

    # A graph of the compiler would have the selection of the step in which it was traced.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        asked = self.sharded[0] if self.sharded else self.weight
        slice_ = wanted(asked) if torch.is_grad_enabled() and self.weight.requires_grad else None
        if slice_ is None:
            return F.linear(x, self.weight, self.bias)
        dim, indexes = slice_
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        y: Tensor = _SlicedLinear.apply(x, self.weight, self.bias, indexes, dim, dtype, self.sharded)
        return y


def slice_gradients(model: nn.Module) -> list[str]:
    """Put a GrassLinear in place of each trained nn.Linear of ``model`` that is a hidden matrix; returns their names.

    Roles come from ``model.param_roles()`` where there is one; else all nn.Linear are taken. Do it before the
    optimizer is made. A weight that is used in several places keeps being one parameter: its slices add up.
    """
    roles = model.param_roles() if hasattr(model, "param_roles") else None  # type: ignore[operator]
    by_id = None if roles is None else {id(p): roles[n] for n, p in model.named_parameters() if n in roles}
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.requires_grad
        and (by_id is None or by_id.get(id(module.weight)) == "matrix")
    ]
    for name in found:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, GrassLinear(owner.get_submodule(leaf)))  # type: ignore[arg-type]
    return found


def follow_sharding(model: nn.Module) -> list[Tensor]:
    """After ``fully_shard`` or ``replicate``, before the optimizer is made: the sharded weights of the GrassLinear.

    Their slices, and those alone, have to be added up over the ranks once a step: ``add_up(weights)`` of
    core/sliced_gradient.py, after the last backward pass.
    """
    found: dict[int, Tensor] = {}
    for layer in (m for m in model.modules() if isinstance(m, GrassLinear)):
        if isinstance(layer.weight, DTensor):
            layer.sharded = (layer.weight,)
            offer(layer.weight)
            found[id(layer.weight)] = layer.weight
    return list(found.values())


_NORM = "of a part of the gradient there is no global norm, and between selections a part is all there is"


@register(
    "transform",
    "grass_linear",
    paper="arXiv:2406.17660",
    seed_id="B025",
    requires={
        "optimizer.grass": "it is the one that asks for a part of the gradient",
        "clip.none": f"{_NORM}; set clip: {{name: none}}",
    },
    conflicts={
        "optimizer.mgup": "it compares whole gradients with the update; leave one of them out",
        "optimizer.spectra": "it may clip whole gradients; leave one of them out",
        "precision.fp16": "the loss scale makes overflows usual, and those of rows that are not computed go unseen; "
        "use bf16",
        "transform.lora": "the weights that it slices are frozen there; leave one of them out",
    },
)
class GrassLinearConfig(MethodConfig):
    """Backward passes compute only the rows or columns of each weight's gradient that optimizer=grass steps."""

    def apply(self, model: LanguageModel) -> LanguageModel:
        """Swap the layers. Raises ConfigError where no layer is a plain linear one."""
        matrices = Counter(role for role in model.param_roles().values() if role in ("matrix", "expert"))
        found = slice_gradients(model)
        if not found:
            raise ConfigError(
                "transforms.grass_linear finds no linear layer with a trained hidden matrix in this model; leave it out"
            )
        log.info(
            "grass_linear: %d of %d hidden matrices and %d stacks of experts get gradients of selected rows alone",
            len(found),
            matrices["matrix"],
            matrices["expert"],
        )
        return model
