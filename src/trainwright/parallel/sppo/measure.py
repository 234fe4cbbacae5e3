"""Times, sizes and bandwidth that SPPO decides by, measured here:

    trainwright plan sppo recipe.yaml     prints the lines for the recipe

The first and the second half of a row go forward as chunks. With l tokens in each, and the pairs of t tokens P(t),
``T_1 = a l + b P(l)`` and ``T_2 = a l + b (P(2l) - P(l))`` give the seconds a of a token and b of a pair; bytes are
those that the hooks count, of halves and of quarters. A stage is taken to be the model's share: its figures divided by
the stages, but for what a chunk saves whatever its length, which is the last one's.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from trainwright.core.batch import Batch
from trainwright.models.base import LanguageModel
from trainwright.parallel.sppo.cut import flops, pairs
from trainwright.parallel.sppo.rows import ChunkedRows
from trainwright.parallel.sppo.sppo import Measured, SppoConfig


def measure(
    model: LanguageModel, length: int, *, rows: int = 1, stages: int = 1, precision: Any = None, repeats: int = 5
) -> Measured:
    """Of ``model``, one of our decoders on the device that it is to run on, with rows of ``length`` tokens.

    Raises ValueError for rows of fewer than 4 tokens.
    """
    if length < 4:
        raise ValueError(f"rows of {length} tokens cannot be halved and halved again")
    from trainwright.objectives.next_token import NextTokenConfig

    decoder = cast(Any, model)
    device = next(model.parameters()).device
    half = length // 4 * 2
    two, four = (
        ChunkedRows(SppoConfig(chunks=n, cut="equal", offload=[0.0] * n, min_chunk=1), decoder.arch, 1, device)
        for n in (2, 4)
    )
    objective = NextTokenConfig().build()
    ids = torch.randint(decoder.vocab_size, (rows, 2 * half), device=device)
    slots = torch.arange(2 * half, device=device).expand(rows, -1)
    batch = Batch(ids, ids, torch.ones(ids.shape, device=device), slots, torch.zeros_like(ids, dtype=torch.int32))
    times: list[list[float]] = [[], []]
    saved, keys = [], 0
    for chunked, turns in ((two, repeats + 1), (four, 1)):
        with _installed(decoder, chunked):
            for turn in range(turns):
                losses = []
                for i, chunk in enumerate(chunked.begin(batch, [model])):
                    _wait(device)
                    start = time.perf_counter()
                    with chunked.forward(i), contextlib.nullcontext() if precision is None else precision.autocast():
                        losses.append(objective(model, chunk))
                    _wait(device)
                    if turn:  # the first warms up
                        times[i].append(time.perf_counter() - start)
            store, ledger = chunked.attention.store, chunked.ledger
        assert store is not None and ledger is not None
        keys = store.bytes + store.gradient_bytes
        saved.append(ledger.saved[-1])  # the first one's may have casts of the weights
    of_half, of_quarter = saved
    first, second = (statistics.median(t) / rows / stages for t in times)
    shape = flops(decoder.arch).pair
    whole = sum(cost for _, cost in shape)
    near, far = (sum(cost / whole * pairs(t, window) for window, cost in shape) for t in (half, 2 * half))
    more = far - 2 * near
    pair = max(0.0, (second - first) / more) if more > 0 else 0.0
    token = (first - pair * near) / half
    if token <= 0:  # noise, or no work but the pairs
        token, pair = first / half / 2, first / near / 2
    return Measured(
        bandwidth=measure_bandwidth(device, repeats=repeats),
        token_seconds=token,
        pair_seconds=pair,
        token_bytes=(of_half - of_quarter) / (half // 2 * rows) / stages,
        chunk_bytes=max(0, 2 * of_quarter - of_half),
        kv_bytes=keys / (2 * half * rows) / stages,
    )


def measure_bandwidth(device: torch.device, size: int = 64 << 20, repeats: int = 5) -> float:
    """Bytes a second from ``device`` to host memory (on CUDA: pinned), the median of some copies of ``size`` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(device)
        taken.append(time.perf_counter() - start)
    return size / statistics.median(taken[1:])


@contextlib.contextmanager
def _installed(decoder: Any, chunked: ChunkedRows) -> Iterator[None]:
    before = decoder.plan_attention, decoder.rope, [block.attn.attend for block in decoder.blocks]
    chunked.attention.install(cast(nn.Module, decoder))
    try:
        yield
    finally:
        decoder.plan_attention, decoder.rope, attends = before
        for block, attend in zip(decoder.blocks, attends, strict=True):
            block.attn.attend = attend


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
