"""Saved activations of a chunk in host memory: a share of them, by hooks on what autograd saves.

Counted and moved are storages, each once, however many views of it are saved; a storage that several chunks save is the
first one's. A chunk never sends more than its ratio: a storage goes when ``sent <= ratio * saved`` holds with it, too.
Parameters (and what :meth:`Offload.leave` names) stay. On CUDA copies run on a stream of their own, to and from pinned
memory, and a chunk is fetched while the one behind it goes backward; elsewhere they are plain copies.

Chunks may also be a model's layers (:meth:`Offload.saving_layers`), of which the gradient that comes to a layer says
that the ones behind it are done.

The :class:`Ledger` has what it comes to. On CPUs, of which the copies end at once, its peaks are exactly those of
solver.py with the sizes and shares that it recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainwright.core.distributed import local_tensor


@dataclass
class Ledger:
    """Bytes of one micro-batch: ``saved`` and ``sent`` (to the host) of each chunk, what is ``resident`` now, and the
    most that was, in the forward pass and in all."""

    saved: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    resident: int = 0
    forward_peak: int = 0  # behind a chunk's forward pass
    peak: int = 0

    @property
    def ratios(self) -> list[float]:
        """The shares that went, which whole storages hold below those asked for."""
        return [out / size if size else 0.0 for out, size in zip(self.sent, self.saved, strict=True)]

    def take(self, size: int) -> None:
        self.resident += size
        self.peak = max(self.peak, self.resident)

    def give(self, size: int) -> None:
        self.resident -= size


class _Held:
    """A storage that was saved. It is freed with the last of its views."""

    def __init__(self, size: int, ledger: Ledger):
        self.size, self.ledger = size, ledger
        self.here = True
        self.host: Tensor | None = None  # its bytes; None: it was not sent
        self.back: Tensor | None = None  # its bytes, on the device again
        self.arrived: Any = None  # CUDA: the event to wait for

    def __del__(self) -> None:
        if self.here:
            self.ledger.give(self.size)


class Offload:
    """Of one micro-batch on ``device``; ``ratios`` of its chunks.

    ahead  while a chunk goes backward, the one before it is fetched, so that all of two are on the device at most;
           None: where copies run beside the computing (CUDA)
    """

    def __init__(self, ratios: Iterable[float], device: torch.device, stream: Any = None, *, ahead: bool | None = None):
        self.ratios = list(ratios)
        self.ledger = Ledger([0] * len(self.ratios), [0] * len(self.ratios))
        self.device = device
        self.stream = stream if stream is not None or device.type != "cuda" else torch.cuda.Stream(device)
        self.ahead = self.stream is not None if ahead is None else ahead
        # What a storage is known by: it lives as long as something refers to it, also weakly.
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[_Held]]] = {}
        self._of_chunk: list[list[weakref.ref[_Held]]] = [[] for _ in self.ratios]
        self._gone: list[Any] = []  # CUDA: the event behind the copies of each chunk
        self._carried = 0.0  # bytes of earlier layers' shares that no whole storage made up
        self._left: list[StorageWeakRef] = []
        self._left_ids: set[int] = set()

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """These are no activations: they are on the device anyway."""
        for whole in tensors:
            tensor = local_tensor(whole)  # of what is spread over ranks, the part here
            if type(tensor) in (Tensor, nn.Parameter):
                known = StorageWeakRef(tensor.untyped_storage())
                self._left.append(known)
                self._left_ids.add(known.cdata)

    @contextmanager
    def saving(self, chunk: int) -> Iterator[None]:
        """Around the forward pass of ``chunk``."""

        def pack(tensor: Tensor) -> Any:
            return self._pack(tensor, chunk)

        # The host runs ahead of the device, and memory is taken when it asks: at most two chunks are under way.
        if self.stream is not None and chunk > 1:
            self._gone[chunk - 2].synchronize()
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack(self)):
            yield
        if self.stream is not None:
            self._gone.append(self.stream.record_event())
        self.ledger.forward_peak = max(self.ledger.forward_peak, self.ledger.resident)

    @contextmanager
    def saving_layers(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Around a forward pass that calls ``layers``, whose numbers are the chunks', one behind the other. What is
        saved outside of them stays, as do the tensors that all of them get besides the stream. A layer whose storages
        are too large for its share (recomputation saves one) leaves it to those behind it.

        Nothing has to be called before the backward pass: :meth:`before_backward` is, as the gradient gets to a layer.
        """
        inside = ExitStack()

        def before(layer: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if layer == 0:
                    self.leave(t for t in args[1:] if isinstance(t, Tensor))
                else:
                    share = self.ratios[layer - 1] * self.ledger.saved[layer - 1]
                    self._carried += share - self.ledger.sent[layer - 1]
                inside.enter_context(self.saving(layer))

            return hook

        def behind(layer: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                inside.close()
                x = output[0] if isinstance(output, tuple) else output
                if x.requires_grad:
                    x.register_hook(lambda grad: self.before_backward(layer))

            return hook

        hooks = [m.register_forward_pre_hook(before(i)) for i, m in enumerate(layers)]
        hooks += [m.register_forward_hook(behind(i)) for i, m in enumerate(layers)]
        try:
            yield
        finally:
            inside.close()
            for handle in hooks:
                handle.remove()

    def _pack(self, tensor: Tensor, chunk: int) -> Any:
        if type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter) or tensor.device != self.device:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._left_ids or not storage.nbytes():
            return tensor
        held = self._find(tensor, storage)
        if held is None:
            held = self._take(tensor, storage, chunk)
        if held.host is None:
            return held, tensor
        return held, (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _find(self, tensor: Tensor, storage: torch.UntypedStorage) -> _Held | None:
        known = self._known.get((storage._cdata, tensor._version))
        return None if known is None else known[1]()

    def _take(self, tensor: Tensor, storage: torch.UntypedStorage, chunk: int) -> _Held:
        size, ledger = storage.nbytes(), self.ledger
        held = _Held(size, ledger)
        ledger.saved[chunk] += size
        share = self.ratios[chunk] * ledger.saved[chunk]
        if share and ledger.sent[chunk] + size <= share + self._carried:
            ledger.sent[chunk] += size
            held.here = False
            held.host = self._send(tensor, storage)
            self._of_chunk[chunk].append(weakref.ref(held))
        else:
            ledger.take(size)
        self._known[storage._cdata, tensor._version] = StorageWeakRef(storage), weakref.ref(held)
        return held

    def _send(self, tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
        flat = _bytes_of(storage, tensor.device)
        if self.stream is None:
            return flat.clone()
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(flat, non_blocking=True)
        flat.record_stream(self.stream)  # its memory is used again only behind the copy
        return host

    # -- and back -------------------------------------------------------------------------------------------------

    def before_backward(self, chunk: int) -> None:
        """``chunk`` is needed now. With ``ahead`` the one before it is fetched meanwhile, and not before the one behind
        it is done: on CUDA the host, which runs ahead, waits for that."""
        self.fetch(chunk)
        if not self.ahead:
            return
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
        self.fetch(chunk - 1)

    def fetch(self, chunk: int) -> None:
        """Begin to bring back what was sent of ``chunk``; nothing for a chunk below 0."""
        if chunk < 0:
            return
        for reference in self._of_chunk[chunk]:
            held = reference()
            if held is not None:
                self._bring(held)

    def _bring(self, held: _Held) -> Tensor:
        if held.back is None:
            assert held.host is not None
            if self.stream is None:
                held.back = held.host.clone()
            else:
                with torch.cuda.stream(self.stream):
                    held.back = torch.empty(held.host.shape, dtype=torch.uint8, device=self.device)
                    held.back.copy_(held.host, non_blocking=True)
                    held.arrived = self.stream.record_event()
            held.here = True
            self.ledger.take(held.size)
        return held.back

    def restored(self, held: _Held, view: Any) -> Tensor:
        back = self._bring(held)
        if held.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(held.arrived)
            back.record_stream(current)
        dtype, offset, shape, stride = view
        found = torch.empty(0, dtype=dtype, device=back.device)
        return found.set_(back.untyped_storage(), offset, shape, stride)


def _unpack(offload: Offload) -> Any:
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        held, view = packed
        return view if isinstance(view, Tensor) else offload.restored(held, view)

    return unpack


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
