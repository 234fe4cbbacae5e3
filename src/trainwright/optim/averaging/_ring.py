"""The last K snapshots of the weights in host memory, and averages of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import CheckpointError
from trainwright.core.params import NamedParam
from trainwright.optim.averaging._weights import require_names, shards, swapped_for


class Ring:
    """Snapshots of ``params`` in float32 in host memory, pinned where they are on a GPU; the oldest is overwritten.

    Each slot is one tensor per parameter, laid out as the parameter is: a rank holds its shards alone, and a
    checkpoint can be loaded onto another layout. All ``size`` slots are there from the start, so that the saved state
    always has the same names; they take ``size * 4`` bytes per weight. A weight that is given twice (tied) is held
    once, under its first name. ``steps`` are the steps of the snapshots held, oldest first.
    """

    def __init__(self, params: Sequence[NamedParam], size: int):
        if size < 1:
            raise ValueError(f"a ring of {size} snapshots holds nothing; use at least 1")
        first: dict[int, NamedParam] = {}
        for n in params:
            first.setdefault(id(n.param), n)
        self.params = list(first.values())
        self.size = size
        self.steps: list[int] = []
        self.head = 0  # slot of the next snapshot
        self.slots = [[_host_copy(n.param) for n in self.params] for _ in range(size)]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def nbytes(self) -> int:
        """Host memory that this rank's slots take."""
        return sum(t.nbytes for slot in self.slots for t in shards(slot))

    @torch.no_grad()
    def push(self, step: int) -> None:
        """Take the weights as they are. Raises ValueError for one whose shape has changed since."""
        live, slot = shards(n.param for n in self.params), shards(self.slots[self.head])
        for n, p, held in zip(self.params, live, slot, strict=True):
            if p.shape != held.shape:
                raise ValueError(
                    f"{n.name} has shape {list(p.shape)}, the snapshots before have {list(held.shape)}; "
                    "build a new average after a change of the model"
                )
        torch._foreach_copy_(slot, live)  # waits for the GPU: once in many steps
        self.head = (self.head + 1) % self.size
        self.steps = [*self.steps, step][-self.size :]

    def flush(self) -> None:
        """Forget all snapshots."""
        self.steps, self.head = [], 0

    def snapshot(self, age: int) -> list[Tensor]:
        """This rank's shards of the ``age``-th last snapshot, 0: the last."""
        if not 0 <= age < len(self):
            raise IndexError(f"there are {len(self)} snapshots, none of age {age}")
        return shards(self.slots[(self.head - 1 - age) % self.size])

    def average(self, weights: Sequence[float]) -> Iterator[Tensor]:
        """Shards of sum_s weights[s] snapshot(s), parameter by parameter; the weights add up to 1.

        Computed as last + sum_s weights[s] (snapshot(s) - last), which is exact for weights that do not move, and has
        the rounding of one pass: a running sum would drift. Memory: two copies of one parameter.
        """
        used = [(w, self.snapshot(age)) for age, w in enumerate(weights) if age > 0 and w != 0]
        for i, last in enumerate(self.snapshot(0)):
            moved = torch.zeros_like(last)
            for w, shard in used:
                moved.add_(shard[i] - last, alpha=w)
            yield last + moved

    @torch.no_grad()
    def square_distance(self, lag: int) -> float:
        """Mean of |snapshot(s) - snapshot(s + lag)|^2 over s, all parameters together. A collective where sharded."""
        if not 0 < lag < len(self):
            raise ValueError(f"two snapshots {lag} apart need {lag + 1} of them, there are {len(self)}")
        total = 0.0
        parts: dict[tuple[Any, ...], list[Tensor]] = {}  # squares of this rank by what they have to be summed over
        for age in range(len(self) - lag):
            for n, a, b in zip(self.params, self.snapshot(age), self.snapshot(age + lag), strict=True):
                parts.setdefault(_layout(n.param), []).append((a - b).double().square().sum())
        for layout, squares in parts.items():
            total += float(_sum_of_shards(torch.stack(squares).sum(), layout))
        return total / (len(self) - lag)

    def state_dict(self) -> dict[str, Any]:
        tensors = {
            n.name: {f"slot{s}": slot[i] for s, slot in enumerate(self.slots)} for i, n in enumerate(self.params)
        }
        return {"tensors": tensors, "scalars": {"steps": list(self.steps), "head": self.head}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError for other parameters, shapes or another number of slots; then nothing is changed."""
        saved = state["tensors"]
        require_names(self.params, saved)
        for i, n in enumerate(self.params):
            if len(saved[n.name]) != self.size:
                raise CheckpointError(
                    f"holds {len(saved[n.name])} snapshots of {n.name}, this average {self.size}; "
                    "resume with the same number"
                )
            for s, slot in enumerate(self.slots):
                if (shape := saved[n.name][f"slot{s}"].shape) != slot[i].shape:
                    raise CheckpointError(f"holds {n.name} as {list(shape)}, here it is {list(slot[i].shape)}")
        for i, n in enumerate(self.params):
            for s, slot in enumerate(self.slots):
                slot[i].copy_(saved[n.name][f"slot{s}"])
        self.steps, self.head = [int(s) for s in state["scalars"]["steps"]], int(state["scalars"]["head"])


def _host_copy(param: Tensor) -> Tensor:
    return torch.zeros_like(
        param.detach(),
        dtype=torch.float32,
        device="cpu",
        pin_memory=local_tensor(param.detach()).is_cuda,
        memory_format=torch.contiguous_format,
    )


def _layout(param: Tensor) -> tuple[Any, ...]:
    return (param.device_mesh, param.placements) if isinstance(param, DTensor) else ()


def _sum_of_shards(value: Tensor, layout: tuple[Any, ...]) -> Tensor:
    """Sum of each rank's ``value`` over the mesh dimensions that the layout shards."""
    if not layout:
        return value
    mesh, placements = layout
    summed = [Partial() if p.is_shard() else Replicate() for p in placements]
    # The collective runs where the mesh is, the snapshots are on the host.
    return DTensor.from_local(value.to(mesh.device_type), mesh, summed, run_check=False).full_tensor()


class RingAverage(ABC):
    """Base of averages over a ring: a snapshot after each ``every``-th step from ``start`` on, averaged when asked for.

    The live weights are never touched by it, so the training is the same with and without.
    """

    name = ""  # in recipes
    size_name = "size"  # likewise, of the number of snapshots

    def __init__(self, params: Sequence[NamedParam], size: int, every: int = 100, start: int = 0):
        if every < 1:
            raise ValueError(f"every={every}: snapshots are at least one step apart")
        if start < 0:
            raise ValueError(f"start={start} is negative")
        self.ring = Ring(params, size)
        self.every, self.start = every, start

    @abstractmethod
    def weights(self, count: int) -> list[float]:
        """Weights of the last ``count`` snapshots, the newest first; they add up to 1."""

    def update(self, step: int) -> None:
        """After step ``step``, counted from 1."""
        if step >= self.start and step % self.every == 0:
            self.ring.push(step)

    def flush(self) -> None:
        """Forget the snapshots, where an average over both sides would make no sense: the learning rate has been
        raised again, or weights were merged or loaded."""
        self.ring.flush()

    def swapped(self) -> AbstractContextManager[None]:
        """Inside it the weights hold the average; before the first snapshot they stay as they are."""
        count = len(self.ring)
        return swapped_for(self.ring.params, self.ring.average(self.weights(count)) if count else None)

    def state_dict(self) -> dict[str, Any]:
        state = self.ring.state_dict()
        state["scalars"]["made_for"] = {"average": self.name, f"average.{self.size_name}": self.ring.size}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ring.load_state_dict(state)
