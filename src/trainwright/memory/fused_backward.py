"""Each parameter is stepped within the backward pass, as soon as its gradient is whole, and the gradient freed.

At most a layer's gradients live at once, instead of all of them: memory of one float per parameter is saved. With
GaLore this is the "per-layer" mode of its paper (arXiv:2403.03507); the idea is LOMO's (arXiv:2306.09782). The weights
are those of an ordinary step to rounding: a matrix goes through the optimizer alone and not in a batch with others.

What cannot be with it, and is refused: whatever needs all gradients before the first step (clipping by the global norm,
several micro-batches, loss scaling, skipping a step whose gradient is not finite), and gradients that ranks have to add
up first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainwright.core.registry import register
from trainwright.memory.base import MemoryConfig
from trainwright.models.base import LanguageModel
from trainwright.optim.base import UpdateRule


class FusedBackward:
    """Steps ``optimizer`` inside the backward pass.

        fused = FusedBackward(optimizer)
        with fused.step():
            loss.backward()

    optimizer  an UpdateRule, or a CompositeOptimizer of such (``config.build_rule(params)``)
    A parameter that gets no gradient is left alone, as by ``optimizer.step()``; after the context no parameter has a
    gradient. A parameter used several times (tied) is stepped once, by the sum. Outside the context backward passes
    give gradients as usual. Raises TypeError for another optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._owners: dict[Tensor, tuple[UpdateRule, dict[str, Any]]] = {}
        for rule in getattr(optimizer, "parts", [optimizer]):
            if not isinstance(rule, UpdateRule):
                raise TypeError(
                    f"{type(rule).__name__} cannot step single parameters; build the optimizer with build_rule()"
                )
            for group in rule.param_groups:
                self._owners |= dict.fromkeys(group["params"], (rule, group))
        self._active = False
        self._started: set[int] = set()
        self._squares: list[Tensor] = []
        self._hooks: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(self._on_grad) for p in self._owners]

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step: the backward pass inside, a single one, updates the weights."""
        self._active = True
        self._started.clear()
        self._squares = []
        try:
            yield
        finally:
            self._active = False

    def grad_norm(self) -> Tensor:
        """Norm of all gradients of the last step, 0-d, without a host sync. They were not clipped."""
        if not self._squares:
            return torch.zeros(())
        device = self._squares[0].device
        return torch.linalg.vector_norm(torch.stack([s.to(device) for s in self._squares]))

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _on_grad(self, param: Tensor) -> None:
        if not self._active:
            return
        rule, group = self._owners[param]
        if id(group) not in self._started:
            self._started.add(id(group))
            rule.start(group)
        grad = cast(Tensor, param.grad)
        exact = torch.float32 if grad.element_size() < 4 else grad.dtype
        self._squares.append(torch.linalg.vector_norm(grad, dtype=exact))
        rule.step_part([param], [grad], group)
        param.grad = None


@register(
    "memory",
    "fused_backward",
    paper="arXiv:2306.09782",
    requires={
        "clip.none": "the global norm is known only after the last gradient, when most weights are stepped; "
        "set clip: {name: none}, or use an optimizer that bounds its own update (spam, muon)"
    },
)
class FusedBackwardConfig(MemoryConfig):
    """Steps each parameter within the backward pass and frees its gradient at once (GaLore's per-layer mode)."""

    def apply(self, model: LanguageModel) -> None:
        """Nothing: the loop asks for :class:`FusedBackward`."""

    def build(self, optimizer: torch.optim.Optimizer) -> FusedBackward:
        return FusedBackward(optimizer)


def fused_backward(methods: Sequence[MemoryConfig]) -> FusedBackwardConfig | None:
    """The method of ``methods`` that steps within the backward pass, if there is one."""
    return next((m for m in methods if isinstance(m, FusedBackwardConfig)), None)
