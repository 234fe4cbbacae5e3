"""The rows of a micro-batch as chunks under way: what a step goes by, with one stage or several."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainwright.core.batch import Batch
from trainwright.models.architecture import Architecture
from trainwright.parallel.sppo.chunks import ChunkedAttention
from trainwright.parallel.sppo.offload import Ledger, Offload
from trainwright.parallel.sppo.sppo import Layout, SppoConfig


class ChunkedRows:
    """Cuts micro-batches, and has one of them under way: :meth:`begin`, then each chunk forward, then each backward."""

    def __init__(self, config: SppoConfig, arch: Architecture, stages: int, device: torch.device):
        self.config, self.arch, self.stages, self.device = config, arch, stages, device
        self.attention = ChunkedAttention()
        self.offload: Offload | None = None
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def ledger(self) -> Ledger | None:
        """Of the last micro-batch; None where nothing is offloaded."""
        return None if self.offload is None else self.offload.ledger

    def layout(self, rows: int, length: int) -> Layout:
        key = (rows, length)
        if key not in self._layouts:
            self._layouts[key] = self.config.layout(self.arch, length, self.stages, rows)
        return self._layouts[key]

    def begin(self, micro: Batch, modules: Iterable[nn.Module] = ()) -> list[Batch]:
        """The chunks of ``micro``, in order. ``modules`` have the buffers that are no activations."""
        layout = self.layout(*micro.tokens.shape)
        self.attention.start(layout.bounds, micro.doc_ids)
        self.offload = None
        if layout.ratios is not None:
            device = self.device if self.device.index is not None else micro.tokens.device
            self.offload = Offload(layout.ratios, device, self._stream)
            self.offload.leave([micro.tokens, micro.targets, micro.weights, micro.positions, micro.doc_ids])
            self.offload.leave(micro.extras.values())
            for module in modules:
                self.offload.leave(itertools.chain(module.parameters(), module.buffers()))
        return [cut(micro, start, stop) for start, stop in itertools.pairwise(layout.bounds)]

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        saving: Any = nullcontext() if self.offload is None else self.offload.saving(chunk)
        self.attention.chunk = chunk
        try:
            with saving:
                yield
        finally:
            self.attention.chunk = None

    def before_backward(self, chunk: int) -> None:
        """What was offloaded of ``chunk`` is needed now."""
        if self.offload is not None:
            self.offload.before_backward(chunk)


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Slots ``start:stop`` of every row, as views. What has no slots (a row's source) is whole in each."""
    length = batch.tokens.shape[1]

    def part(t: Tensor) -> Tensor:
        return t[:, start:stop] if t.ndim > 1 and t.shape[1] == length else t

    return batch._map(part)


def tell_last(module: nn.Module, last: bool) -> None:
    """FSDP's machinery has several forward passes under way: only the step's last backward pass ends them."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
