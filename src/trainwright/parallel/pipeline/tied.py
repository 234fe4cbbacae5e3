"""A head that is tied to the embedding, where first and last stage hold it both.

On two ranks it is one parameter on each, and both get the sum of their gradients, so that equal optimizers keep them
equal. On one rank (zero_bubble's V) the head is a copy of the embedding, which is the parameter that is trained.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.core.distributed import local_tensor


class TiedHead:
    """``embed`` and ``head`` are the parameter where this rank has that end, else None; ``ranks`` are first and last
    stage's in ``group``."""

    def __init__(self, embed: nn.Module | None, head: nn.Module | None, ranks: tuple[int, int], group: Any):
        self.embed, self.head, self.ranks, self.group = embed, head, ranks, group

    @torch.no_grad()
    def refresh(self) -> None:
        """The copy takes over what the optimizer made of the embedding."""
        if self.embed is not None and self.head is not None:
            local_tensor(_weight(self.head)).copy_(local_tensor(_weight(self.embed)))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Once a step, when both ends have their gradient. A message to and fro between two ranks."""
        if self.embed is not None and self.head is not None:
            embed, head = _weight(self.embed), _weight(self.head)
            if head.grad is not None:
                local_tensor(_grad(embed)).add_(local_tensor(head.grad))
                head.grad = None
            return
        here = self.embed if self.embed is not None else self.head
        if here is None or not _weight(here).requires_grad:
            return
        mine = local_tensor(_grad(_weight(here)))
        other = self.ranks[1] if self.embed is not None else self.ranks[0]
        sent, received = mine.contiguous(), torch.empty_like(mine, memory_format=torch.contiguous_format)
        peer = dist.get_global_rank(self.group, other)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer, self.group), dist.P2POp(dist.irecv, received, peer, self.group)]
        ):
            work.wait()
        mine.add_(received)


def _weight(module: Any) -> Any:
    return module.weight


def _grad(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
