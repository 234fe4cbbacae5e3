"""The parameters of one layer under a chain: their storage, and the transfers that fill and empty it.

With C numbers in a chunk (1/s_o of the layer) a rank holds

    shard   [s_o / s_p, C]  compute dtype; s_p = 1: the whole layer, as the model computes with it
    grads   [s_o / s_g, C]  in which micro-batches add up
    master  [C]             what the optimizer steps, as DTensors; a row of ``shard`` itself where the dtype is the same

and ``whole`` [s_p, s_o / s_p, C] while the layer is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainwright.parallel.amsp.groups import Groups
from trainwright.parallel.amsp.layout import Layout


@dataclass
class Held:
    """A parameter, and everywhere that it is registered."""

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]]


class Unit:
    """``held`` on ``device``; the modules' parameters become this rank's optimizer shards. See the module."""

    def __init__(
        self,
        held: Sequence[Held],
        groups: Groups,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        gradient_dtype: torch.dtype | None,
        keep_gradients: bool = True,
    ):
        self.groups, self.chain, self.device, self.keep_gradients = groups, groups.chain, device, keep_gradients
        self.names, self.places = [h.name for h in held], [h.places for h in held]
        params = [h.param for h in held]
        self.dtype = params[0].dtype if params else torch.float32
        self.compute_dtype = compute_dtype or self.dtype
        self.gradient_dtype = gradient_dtype or torch.promote_types(torch.float32, self.dtype)
        shards, p = self.chain.states, self.chain.parameters
        self.trained = [i for i, param in enumerate(params) if param.requires_grad]
        self.layout = Layout([x.shape for x in params], shards, self.compute_dtype.itemsize)
        self.grad_layout = Layout([params[i].shape for i in self.trained], shards, self.gradient_dtype.itemsize)
        self.depth = shards // p  # rows of a parameter shard
        self.row = groups.rank % shards  # of this rank among the optimizer shards

        self.whole = torch.zeros(self.layout.whole, dtype=self.compute_dtype, device=device)
        self.shard: Tensor | None = None
        if p > 1:
            self.shard = torch.zeros((self.depth, self.layout.chunk), dtype=self.compute_dtype, device=device)
        self.aliased = self.compute_dtype == self.dtype
        self.own_master = torch.empty(0)
        if not self.aliased:
            self.own_master = torch.zeros(self.layout.chunk, dtype=self.dtype, device=device)
        self.parameters = [
            nn.Parameter(view, requires_grad=old.requires_grad)
            for view, old in zip(self.layout.parameters(self.whole), params, strict=True)
        ]
        self.masters = [self._master(i, piece, params[i]) for i, piece in enumerate(self._master_pieces())]
        self._fill(params)
        self.full = p == 1  # ``whole`` holds the layer
        self._release()
        self.grads: Tensor | None = None  # [s_o / s_g, C], allocated at the first micro-batch
        self.adding = False  # micro-batches of this step are in ``grads`` already
        self.used = [False] * len(self.trained)
        self.pending: dict[str, tuple[Any, Tensor]] = {}  # transfers under way
        self._use(self.masters)

    # -- storage --------------------------------------------------------------------------------------------------

    def _master_pieces(self) -> list[Tensor]:
        """The optimizer shard's part of each parameter, flat; rows of what else holds them where the dtype is one."""
        if not self.aliased:
            return self.layout.pieces(self.own_master)
        if self.shard is not None:
            return self.layout.pieces(self.shard[self.row // self.chain.parameters])
        return [padded[self.row] for padded in self.layout.padded(self.whole)]

    def _master(self, i: int, piece: Tensor, old: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._as_dtensor(self.layout, i, piece), requires_grad=old.requires_grad)

    def _as_dtensor(self, layout: Layout, i: int, piece: Tensor) -> Tensor:
        """A flat piece as the shard of parameter ``i`` of ``layout``; plain where optimizer states are not sharded."""
        shape = layout.local_shape(i, self.row)
        local = piece[: shape.numel()].view(shape)
        mesh = self.groups.mesh
        if mesh is None:
            return local
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        stride = torch.empty(layout.shapes[i], device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=layout.shapes[i], stride=stride)

    @torch.no_grad()
    def _fill(self, params: Sequence[nn.Parameter]) -> None:
        """Take over the values; those on the meta device come later, into the masters."""
        p = self.chain.parameters
        padded, master = self.layout.padded(self.whole), self._master_pieces()
        shard = None if self.shard is None else self.layout.pieces(self.shard)
        for i, old in enumerate(params):
            if old.is_meta:
                continue
            self.layout.parameters(self.whole)[i].copy_(old)
            if shard is not None:
                shard[i].copy_(padded[i].view(self.depth, p, -1)[:, self.row % p])
            if not self.aliased:
                shape = self.layout.local_shape(i, self.row)
                start = self.row * self.layout.rows[i] if self.chain.states > 1 else 0
                mine = old.detach()[start : start + shape[0]] if self.chain.states > 1 else old.detach()
                master[i][: shape.numel()].copy_(mine.reshape(-1))

    def _use(self, params: Sequence[nn.Parameter]) -> None:
        for param, places in zip(params, self.places, strict=True):
            for module, name in places:
                module._parameters[name] = param

    def _release(self) -> None:
        if self.shard is not None:
            self.full = False
            self.whole.untyped_storage().resize_(0)

    def free(self) -> None:
        """Give the whole layer's memory back, where parameters are sharded; the masters are registered again."""
        work = self.pending.pop("gather", None)
        if work is not None:
            work[0].wait()  # began for nothing: the layer was left out
        self._use(self.masters)
        self._release()

    def nbytes(self) -> dict[str, int]:
        """Bytes held between steps: parameters, gradients, and of the states the master copy."""
        parameters = self.whole if self.shard is None else self.shard
        sizes = {"parameters": parameters, "gradients": self.grads, "states": self.own_master}
        return {k: 0 if t is None else t.untyped_storage().nbytes() for k, t in sizes.items()}

    @property
    def published(self) -> bool:
        """Whether the masters' values have to be brought to where the model finds them."""
        return bool(self.names) and (self.depth > 1 or not self.aliased)

    @torch.no_grad()
    def fingerprint(self) -> Tensor:
        """Two sums over the bits of the masters, which tell a change."""
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.dtype.itemsize]
        pieces = [piece.view(bits) for piece in self._master_pieces()]
        sums = [torch.stack([p.sum(dtype=torch.int64), p[1::2].sum(dtype=torch.int64)]) for p in pieces]
        return torch.stack(sums).sum(0) if sums else torch.zeros(2, dtype=torch.int64, device=self.device)

    # -- parameters -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start_publish(self) -> None:
        """Begin to bring the masters' values to the s_o / s_p ranks with the parameter shard that they are part of."""
        if not self.published:
            return
        # Contiguous, and no view of what is received into.
        mine = torch.cat([piece.to(self.compute_dtype) for piece in self._master_pieces()])
        if self.depth == 1:
            self.pending["publish"] = (None, mine[None])
            return
        out = torch.empty((self.depth, self.layout.chunk), dtype=self.compute_dtype, device=self.device)
        self.pending["publish"] = (_gather(out.view(-1), mine, self.groups.publish), out)

    @torch.no_grad()
    def finish_publish(self) -> None:
        if "publish" not in self.pending:
            return
        work, out = self.pending.pop("publish")
        if work is not None:
            work.wait()
        if self.shard is None:
            self.layout.fill_whole(self.whole, out[None])
        else:
            self.shard.copy_(out)

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to bring the s_p shards of the layer together; nothing to do where it is whole or coming."""
        if self.full or self.shard is None or "gather" in self.pending:
            return
        out = torch.empty((self.chain.parameters, *self.shard.shape), dtype=self.compute_dtype, device=self.device)
        if out.numel():
            self.pending["gather"] = (_gather(out.view(-1), self.shard.view(-1), self.groups.gather), out)

    @torch.no_grad()
    def finish_gather(self) -> None:
        """The layer is whole, and its modules hold it."""
        if self.shard is not None and not self.full:
            self.start_gather()
            self.whole.untyped_storage().resize_(self.layout.whole * self.compute_dtype.itemsize)
            if "gather" in self.pending:
                work, out = self.pending.pop("gather")
                work.wait()
                # What the forward pass saved are these tensors, and their values are the same again.
                with torch.autograd._unsafe_preserve_version_counter((self.whole, *self.parameters)):
                    self.layout.fill_whole(self.whole, out)
            self.full = True
        self._use(self.parameters)

    # -- gradients ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_gradients(self) -> Tensor | None:
        """This micro-batch's gradients, off the parameters: as they are sent, or None where they are added up here."""
        params = [self.parameters[i] for i in self.trained]
        values = [p.grad for p in params]
        for i, p in enumerate(params):
            self.used[i] |= p.grad is not None
            p.grad = None
        g, depth = self.chain.gradients, self.chain.states // self.chain.gradients
        if g > 1:
            sent = torch.empty((g, depth, self.grad_layout.chunk), dtype=self.gradient_dtype, device=self.device)
            return self.grad_layout.send_form(values, g, sent)
        if self.adding:
            self.grad_layout.add_to(cast(Tensor, self.grads), values)
        else:
            self.grad_layout.send_form(values, 1, self._buffer()[None])
            self.adding = True
        return None

    def reduction(self, sent: Tensor | None, last: bool) -> Iterator[None]:
        """The transfers of a micro-batch's gradients, each begun and left under way until the next call.

        Afterwards the gradient shard counts this micro-batch, and after the ``last`` one the masters have the mean.
        """
        with torch.no_grad():
            if sent is not None:
                out = torch.empty(sent.shape[1:], dtype=sent.dtype, device=sent.device)
                work = _scatter(out.view(-1), sent.view(-1), self.groups.scatter)
                yield
                work.wait()
                del sent
                self._add(out)
            if not last:
                return
            grads = cast(Tensor, self.grads)
            mine = grads[0]
            if self.groups.towards is not None:
                mine = torch.empty(grads.shape[1], dtype=grads.dtype, device=grads.device)
                work = _scatter(mine, grads.view(-1), self.groups.towards)
                yield
                work.wait()
            if self.groups.replicas is not None:
                work = dist.all_reduce(mine, group=self.groups.replicas, async_op=True)
                yield
                cast(Any, work).wait()
            self._give(mine.div_(self.groups.ranks))

    def _buffer(self) -> Tensor:
        if self.grads is None:
            rows = self.chain.states // self.chain.gradients
            self.grads = torch.empty((rows, self.grad_layout.chunk), dtype=self.gradient_dtype, device=self.device)
        return self.grads

    def _add(self, out: Tensor) -> None:
        if self.adding:
            cast(Tensor, self.grads).add_(out)
        elif self.keep_gradients:
            self._buffer().copy_(out)
        else:
            self.grads = out
        self.adding = True

    def _give(self, mine: Tensor) -> None:
        """The step's gradient to the masters."""
        for j, (i, piece) in enumerate(zip(self.trained, self.grad_layout.pieces(mine), strict=True)):
            self.masters[i].grad = self._as_dtensor(self.grad_layout, j, piece.to(self.dtype))
        self.adding = False
        if not self.keep_gradients:
            self.grads = None

    def hook_gradients(self, when_complete: Callable[[], None]) -> None:
        """``when_complete`` is called in each backward pass that has been through all trained parameters."""
        self.waiting: set[int] = set(self.trained)

        def seen(i: int) -> Callable[[Tensor], None]:
            def note(param: Tensor) -> None:
                self.waiting.discard(i)
                if not self.waiting:
                    when_complete()

            return note

        for i in self.trained:
            self.parameters[i].register_post_accumulate_grad_hook(seen(i))

    def expect_gradients(self) -> None:
        self.waiting = set(self.trained)


def _gather(out: Tensor, mine: Tensor, group: Any) -> Any:
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return function(out, mine, group=group, async_op=True)


def _scatter(out: Tensor, sent: Tensor, group: Any) -> Any:
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(out, sent, group=group, async_op=True)
