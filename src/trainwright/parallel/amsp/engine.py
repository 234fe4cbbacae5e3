"""AMSP: parameters, gradients and optimizer states sharded over different numbers of ranks, usable alone.

    amsp = Amsp(model, Chain(parameters=2, gradients=4, states=8), blocks=model.layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for i, rows in enumerate(micro_batches):
        with amsp.micro_step(last=i == len(micro_batches) - 1):
            loss(model(rows)).backward()
    amsp.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()

With chain s_p | s_g | s_o | N and F parameters, of ranks that are neighbours:

    forward, backward   all_gather of a layer over s_p ranks, the next layer's under way meanwhile
    micro-batch         reduce_scatter of a layer's gradient over s_g ranks, under the next layer's backward pass; the
                        shard is added to a buffer of F / s_g
    step                reduce_scatter of that over s_o / s_g ranks that hold it too, all_reduce of F / s_o over N / s_o
    after the optimizer all_gather of what it made of its F / s_o, over the s_o / s_p ranks of a parameter shard,
                        layer by layer under the next forward pass

(1, 1, 1) is DDP, (1, 1, N) ZeRO-1, (1, N, N) ZeRO-2, (N, N, N) ZeRO-3, (k, k, k) MiCS or HSDP. The gradient is the
mean over the ranks. ``model.parameters()`` are DTensors over s_o ranks and N / s_o replicas (plain ones for s_o = 1),
as under HSDP: elementwise optimizers step the shards, norms and matrix optimizers see whole parameters through DTensor,
and checkpoints hold whole parameters whatever the chain. With ``compute_dtype`` they are master weights, and the model
computes with a copy.

Paper: AMSP: Super-Scaling LLM Training via Advanced Model States Partitioning (arXiv:2311.00257). Reconstructed from
its abstract, InternEvo's code and the collectives that the factors imply: the order of transfers and the nesting of
shards (every s-th chunk, so that groups are neighbours and no result has to be reordered) are ours. Transfers of a
layer start in one fixed order on every rank, whatever order the backward pass comes to layers in, so that ragged work
cannot lock them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from trainwright.core.errors import ConfigError
from trainwright.parallel.amsp.chain import Chain
from trainwright.parallel.amsp.groups import Groups
from trainwright.parallel.amsp.unit import Held, Unit


class _Pass:
    """A forward pass. Its graph holds it; nothing else does when the pass is over."""


class Amsp:
    """``model`` sharded in place by ``chain``, over all ranks of the default group; see the module.

    blocks                  modules that are gathered one at a time, in the order that forward calls them. All other
                            parameters, and those that blocks share, are gathered for the whole pass
    device                  where shards go; None: where the first parameter is
    compute_dtype           of the copy that the model computes with and that is gathered; None: as the parameters are
    gradient_dtype          in which gradients are reduced and added up; None: float32, or float64 for such parameters
    accumulation_buffer     False: a gradient shard is kept for the last micro-batch alone, so that a step has one
    find_unused_parameters  a parameter without a gradient on some ranks counts 0 there; one without any keeps None
    timeout_s               of the groups' collectives; None: torch's own

    Every rank passes the same values. Raises ValueError for a chain that does not fit the number of ranks, parameters
    without a dimension to shard, and different dtypes within a block.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        *,
        blocks: Iterable[nn.Module] = (),
        device: torch.device | None = None,
        compute_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        accumulation_buffer: bool = True,
        find_unused_parameters: bool = False,
        timeout_s: float | None = None,
    ):
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        chain.check(ranks)
        blocks = list(blocks)
        parts = _divided(model, blocks)
        _check(parts, chain)
        device = device or next(model.parameters()).device
        self.model, self.chain, self.find_unused = model, chain, find_unused_parameters
        self.accumulation_buffer = accumulation_buffer or chain.gradients == 1
        self.compute_dtype = compute_dtype
        self.groups = Groups.build(chain, device.type, timeout_s)
        from_meta = any(p.is_meta for p in model.parameters())
        self.units = [
            Unit(held, self.groups, device, compute_dtype, gradient_dtype, self.accumulation_buffer) for held in parts
        ]
        _move_buffers(model, device)
        self._stale = [False] * len(self.units)  # the masters may differ from what the model computes with
        # Of the masters, as the model has them. A rank that built on the meta device still has to get its own.
        self._sums = None if from_meta else self._fingerprint()
        self._adding = False  # between micro-batches of a step
        self._pass: _Pass | None = None  # under way
        self._graphs: WeakSet[_Pass] = WeakSet()  # forward passes whose backward pass may come
        self._calls = [0] * len(self.units)  # forward passes that the backward pass will still go through
        self._at_work: list[set[_Pass]] = [set() for _ in self.units]  # forward passes that it is in
        self._last = True
        self._in_backward = False
        self._done: dict[int, Tensor | None] = {}  # units whose gradients wait for their turn
        self._next = 0  # of the reversed units, whose gradients are sent next
        self._running: list[Iterator[None]] = []
        for i, unit in enumerate(self.units):
            unit.hook_gradients(partial(self._gradients_complete, i))
        model.register_forward_pre_hook(self._before_model, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._after_model, always_call=True)
        for i, block in enumerate(blocks, 1):
            block.register_forward_pre_hook(self._before_block(i), prepend=True)
            block.register_forward_hook(self._after_block(i))

    # -- what a training loop calls ---------------------------------------------------------------------------------

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; outside of it every backward pass is a step's last.

        Raises ValueError for a second micro-batch without an accumulation buffer.
        """
        if not last and not self.accumulation_buffer:
            raise ValueError(
                f"gradients of several micro-batches need an accumulation buffer where they are sharded over "
                f"{self.chain.gradients} ranks; set accumulation_buffer=True, or take one micro-batch a step"
            )
        self._last = last
        try:
            yield
        finally:
            self._last = True

    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Scale the gradients down to ``max_norm`` over all parameters and shards; their norm before, 0-d. Collective.

        Raises ValueError where ``parameters`` are not all trained ones: the norm of a shard alone, or of a local part,
        differs from rank to rank.
        """
        own = [p for p in self.model.parameters() if p.requires_grad]
        if parameters is not None and {id(p) for p in parameters} != {id(p) for p in own}:
            raise ValueError("the norm is that of all shards of all parameters; pass none, or model.parameters()")
        norm = nn.utils.clip_grad_norm_(own, max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def nbytes(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
        """Bytes on this rank between steps: parameters, gradients, and states (master copy and ``optimizer``'s)."""
        found = {"parameters": 0, "gradients": 0, "states": 0}
        for unit in self.units:
            for key, n in unit.nbytes().items():
                found[key] += n
        for entries in optimizer.state.values() if optimizer is not None else ():
            for value in entries.values():
                if isinstance(value, Tensor) and value.ndim:
                    local = value.to_local() if hasattr(value, "to_local") else value
                    found["states"] += local.nbytes
        return found

    # -- forward ----------------------------------------------------------------------------------------------------

    def _see_changes(self) -> None:
        """Find out whether the masters were changed since the model got their values.

        After a backward pass they are taken to be. Otherwise, as in an evaluation, their sums tell: whoever writes to a
        parameter, a loaded checkpoint or an average, does not tell us. That is a collective of one number.
        """
        if not any(unit.published for unit in self.units):
            return
        known = any(self._stale)
        sums = None if torch.is_grad_enabled() and known else self._fingerprint()
        if not known:
            differs = torch.ones((), dtype=torch.int32, device=self.units[0].device)
            if sums is not None and self._sums is not None:
                differs.copy_((sums - self._sums).abs().max() > 0)
            if self.groups.ranks > 1:
                dist.all_reduce(differs, op=dist.ReduceOp.MAX)
            known = bool(differs)
        if known:
            self._stale, self._sums = [True] * len(self.units), sums

    def _fingerprint(self) -> Tensor:
        return torch.stack([unit.fingerprint() for unit in self.units])

    def _start_publish(self, i: int) -> None:
        if i < len(self.units) and self._stale[i]:
            self.units[i].start_publish()
            self._stale[i] = False

    def _prefetch(self, i: int) -> None:
        """Bring unit ``i`` under way: its shard is up to date, its gather has begun."""
        if i < len(self.units):
            self._start_publish(i)
            self.units[i].finish_publish()
            self.units[i].start_gather()

    def _gather(self, i: int) -> None:
        self._start_publish(i)
        self._start_publish(i + 1)
        self._prefetch(i)
        self.units[i].finish_gather()

    @torch._dynamo.disable
    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._adding and not self._graphs:
            self._calls = [0] * len(self.units)
            self.units[0].free()  # perhaps kept for a backward pass that never came
            self._see_changes()
        self._pass = _Pass()
        if torch.is_grad_enabled():
            self._graphs.add(self._pass)
        self._gather(0)
        self._prefetch(1)
        self._start_publish(2)
        if self.compute_dtype is None:
            return None
        return tree_map(self._cast, args), tree_map(self._cast, kwargs)

    def _cast(self, value: Any) -> Any:
        return value.to(self.compute_dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    @torch._dynamo.disable
    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            results = _tensors(output)
            if results:
                torch.autograd.graph.register_multi_grad_hook(results, partial(_hold, self._pass), mode="any")
        self._pass = None  # the graph holds it, while there is one
        for unit in self.units[1:]:
            if "gather" in unit.pending:
                unit.free()
        root = self.units[0]
        if torch.is_grad_enabled() and output is not None:
            root._use(root.masters)  # stays whole for the backward pass
        else:
            root.free()

    def _before_block(self, i: int) -> Any:
        @torch._dynamo.disable
        def hook(module: nn.Module, args: Any) -> None:
            self._gather(i)
            if not self._in_backward:  # else a recomputation
                self._prefetch(i + 1)
                self._start_publish(i + 2)

        return hook

    def _after_block(self, i: int) -> Any:
        @torch._dynamo.disable
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._in_backward:
                return
            self.units[i].free()
            if torch.is_grad_enabled():
                results = _tensors(output)
                if results:
                    self._calls[i] += 1
                    begin = partial(self._before_backward, i, self._pass or _Pass())
                    torch.autograd.graph.register_multi_grad_hook(results, begin, mode="any")

        return hook

    # -- backward ---------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._next, self._done, self._running = 0, {}, []
        self.units[0]._use(self.units[0].parameters)  # recomputed blocks may share some
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    @torch._dynamo.disable
    def _before_backward(self, i: int, forward_pass: _Pass, grad: Tensor) -> None:
        self._begin_backward()
        # The pass has left the layer that it was in: the gradient of that one's input is there.
        for j, passes in enumerate(self._at_work):
            if j != i and forward_pass in passes:
                self._leave(j, {forward_pass})
        self._at_work[i].add(forward_pass)
        self._calls[i] -= 1
        self.units[i].finish_gather()
        before = next((j for j in range(i - 1, 0, -1) if self._calls[j]), None)
        if before is not None:
            self.units[before].start_gather()

    def _leave(self, i: int, passes: set[_Pass]) -> None:
        self._at_work[i] -= passes
        if not self._at_work[i]:
            self.units[i].free()

    @torch._dynamo.disable
    def _gradients_complete(self, i: int) -> None:
        self._begin_backward()
        if i not in self._done:
            self._take(i)
            self._advance()

    def _take(self, i: int) -> None:
        unit = self.units[i]
        self._done[i] = unit.take_gradients()
        if i and len(unit.trained) == len(unit.names):  # else frozen parameters may still be read
            self._leave(i, set(self._at_work[i]))

    def _advance(self) -> None:
        """Send what may be sent: units in reverse order on every rank, earlier ones a stage further first."""
        order = list(reversed(range(len(self.units))))
        while self._next < len(order) and order[self._next] in self._done:
            i = order[self._next]
            self._next += 1
            sent = self._done[i]
            self._done[i] = None
            self._running = [r for r in self._running if _continues(r)]
            if self.units[i].trained:
                reduction = self.units[i].reduction(sent, self._last)
                if _continues(reduction):
                    self._running.append(reduction)

    def _end_backward(self) -> None:
        self._in_backward = False
        for i in reversed(range(len(self.units))):
            if i not in self._done:
                self._take(i)
        self._advance()
        while self._running:
            self._running = [r for r in self._running if _continues(r)]
        for unit in self.units:
            unit.free()
            unit.expect_gradients()
        self._calls = [0] * len(self.units)
        self._at_work = [set() for _ in self.units]
        self._graphs = WeakSet()
        self._adding = not self._last
        if self._last:
            self._stale = [True] * len(self.units)  # a step of the optimizer follows
            self._settle_unused()

    def _settle_unused(self) -> None:
        """Parameters that no micro-batch used: refused, or without a gradient where no rank used them."""
        flags = [used for unit in self.units for used in unit.used]
        params = [(unit.names[i], unit.masters[i]) for unit in self.units for i in unit.trained]
        for unit in self.units:
            unit.used = [False] * len(unit.trained)
        if self.find_unused:
            if self.groups.ranks > 1:
                seen = torch.tensor(flags, dtype=torch.int32, device=self.units[0].device)
                dist.all_reduce(seen)
                flags = (seen > 0).tolist()
            for (_, param), used in zip(params, flags, strict=True):
                if not used:
                    param.grad = None
            return
        names = [name for (name, _), used in zip(params, flags, strict=True) if not used]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ConfigError(
                f"the step gave no gradient to {', '.join(names[:4])}{more}; set true, or freeze them",
                key="parallel.find_unused_parameters",
                value=False,
            )


def _tensors(output: Any) -> list[Tensor]:
    """Those of a module's results that a backward pass can come to."""
    leaves = tree_flatten(output)[0]
    leaves += [field for leaf in leaves if is_dataclass(leaf) for field in vars(leaf).values()]
    return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]


def _hold(forward_pass: _Pass | None, grad: Tensor) -> None:
    pass


def _continues(reduction: Iterator[None]) -> bool:
    return next(reduction, True) is None


def _divided(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[Held]]:
    """Parameters of the root, then of each block; a parameter that several hold belongs to the root."""
    held: dict[int, Held] = {}
    owners: dict[int, set[int]] = {}
    inside = {id(m): i for i, block in enumerate(blocks, 1) for m in block.modules()}
    for prefix, module in model.named_modules(remove_duplicate=True):
        for name, param in module._parameters.items():
            if param is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            held.setdefault(id(param), Held(full, param, [])).places.append((module, name))
            owners.setdefault(id(param), set()).add(inside.get(id(module), 0))
    parts: list[list[Held]] = [[] for _ in range(len(blocks) + 1)]
    for key, one in held.items():
        of = owners[key]
        parts[next(iter(of)) if len(of) == 1 else 0].append(one)
    return parts


def _check(parts: Sequence[Sequence[Held]], chain: Chain) -> None:
    for held in parts:
        dtypes = {h.param.dtype for h in held}
        if len(dtypes) > 1:
            named = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise ValueError(f"{held[0].name} and others of one block have different dtypes ({named}); make them one")
        for h in held:
            if h.param.ndim == 0 and chain.states > 1:
                raise ValueError(f"{h.name} is a single number, with no dimension to shard; give it the shape [1]")


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
