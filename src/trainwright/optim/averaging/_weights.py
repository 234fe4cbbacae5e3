"""What all averages share: the swap of the weights for their average, and names in saved state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import CheckpointError
from trainwright.core.params import NamedParam


def shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of each. Averages are laid out as their weights, so plain kernels work on these."""
    return [local_tensor(t.detach()) for t in tensors]


@contextmanager
def swapped_for(params: Sequence[NamedParam], averages: Iterable[Tensor] | None) -> Iterator[None]:
    """Inside it ``params`` hold ``averages``, and afterwards bit for bit what they held before.

    params    the weights, sharded or not
    averages  shards of this rank in the order of ``params``, of any dtype and on any device, taken one by one;
              None: there is no average yet, and the weights stay
    """
    if averages is None:
        yield
        return
    live = shards(n.param for n in params)
    kept = [p.clone() for p in live]
    try:
        with torch.no_grad():
            for weight, average in zip(live, averages, strict=True):
                weight.copy_(average)
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(live, kept)


def require_same(average: Any, scalars: dict[str, Any] | None) -> None:
    """CheckpointError for the stored ``scalars`` of another average, or of another number of snapshots.

    Before tensors are read, which are named by that. None: there is no average, on either side.
    """
    stored = (scalars or {}).get("made_for", {"average": None} if scalars is None else {})
    own = {"average": None} if average is None else average.state_dict()["scalars"].get("made_for", {})
    for key in own:
        if key in stored and own[key] != stored[key]:
            now, before = own[key] or "none", stored[key] or "none"
            raise CheckpointError(
                f"{key} is {now} now and was {before} when the checkpoint was written, and its state goes with that; "
                f"set {key} back to {stored[key] or 'null'} to go on with this run, or start a new run from "
                "the weights"
            )


def require_names(params: Sequence[NamedParam], saved: dict[str, Any]) -> None:
    """CheckpointError naming the parameters that ``saved`` has no average of."""
    missing = [n.name for n in params if n.name not in saved]
    if missing:
        raise CheckpointError(
            f"holds no average of {', '.join(missing[:8])}; resume with the same trained parameters and average"
        )
