"""What planning reads of a micro-batch stays on the host: reading it from the device waits for all that runs there.

The ``doc_ids`` that a model is given are looked up here. What is kept goes with the tensor, in whose place a copy or a
slice is another one; where nothing is kept, :func:`on_host` copies, which is right but waits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from trainwright.core.batch import Batch

_kept: Any = WeakTensorKeyDictionary()


def keep(doc_ids: Tensor, host: Tensor) -> None:
    """``host`` is what plans read for ``doc_ids``: its values or, row by row, those of whole rows."""
    _kept[doc_ids] = host


def kept(doc_ids: Tensor) -> Tensor | None:
    return cast(Tensor | None, _kept.get(doc_ids))


def on_host(doc_ids: Tensor) -> Tensor:
    """The values of ``doc_ids``."""
    if doc_ids.device.type == "cpu":
        return doc_ids
    found = kept(doc_ids)
    return doc_ids.cpu() if found is None else found


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x``, of the host, on ``device``; nothing waits, not even for what runs there."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def sent(batch: Batch, device: torch.device) -> Batch:
    """``batch``, a part that a strategy has made, on ``device``."""
    out = batch._map(lambda t: moved(t, device))
    if out.doc_ids is not batch.doc_ids and batch.doc_ids.device.type == "cpu":
        found = kept(batch.doc_ids)
        keep(out.doc_ids, batch.doc_ids if found is None else found)
    return out


def chunked(doc_ids: Tensor, rows: int) -> list[Tensor]:
    """``doc_ids`` some ``rows`` at a time, of which the same is kept."""
    found = kept(doc_ids)
    parts = list(doc_ids.split(rows))
    if found is not None:
        for part, host in zip(parts, found.split(rows), strict=True):
            keep(part, host)
    return parts


def split(batch: Batch, rows: int) -> list[Batch]:
    """``batch.split(rows)``, of whose parts the same is kept."""
    parts = batch.split(rows)
    for part, doc_ids in zip(parts, chunked(batch.doc_ids, rows), strict=True):
        part.doc_ids = doc_ids
    return parts
