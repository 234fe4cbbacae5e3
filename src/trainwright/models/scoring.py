"""Log-likelihoods of continuations, in batches: what multiple-choice evaluation is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainwright.core.errors import ConfigError
from trainwright.models.base import LanguageModel


class Score(NamedTuple):
    logprob: float  # sum over the continuation's tokens, in nats
    greedy: bool  # whether each token is the likeliest


@torch.no_grad()
def continuation_logprobs(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    pad_id: int,
    batch_size: int = 8,
    max_length: int | None = None,
) -> list[Score]:
    """log P(continuation | context) of pairs of token ids, in their order. A context holds at least one token.

    A context that does not fit ``max_length`` (the model's) is cut from the left; a continuation never is: one that
    does not fit is a ConfigError.
    """
    limit = max_length or model.max_seq_len
    device = next(model.parameters()).device
    # Longest first: rows of a batch have like lengths, and a batch that does not fit fails at once.
    order = sorted(range(len(pairs)), key=lambda i: -(len(pairs[i][0]) + len(pairs[i][1])))
    out = [Score(0.0, True)] * len(pairs)
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        rows = []
        for i in chunk:
            context, continuation = list(pairs[i][0]), list(pairs[i][1])
            if len(continuation) > limit:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens does not fit the model's {limit}", key="tasks"
                )
            rows.append((context + continuation)[-(limit + 1) :])
        width = max(len(r) for r in rows) - 1
        tokens = torch.full((len(rows), width), pad_id, dtype=torch.int64)
        for j, row in enumerate(rows):
            tokens[j, : len(row) - 1] = torch.tensor(row[:-1])
        logprobs: Tensor = model(tokens.to(device)).float().log_softmax(-1)  # [B, T, V]
        for j, (i, row) in enumerate(zip(chunk, rows, strict=True)):
            n = len(pairs[i][1])
            if not n:
                continue
            targets = torch.tensor(row[-n:], device=device)
            scored = logprobs[j, len(row) - 1 - n : len(row) - 1]  # [n, V]
            total = scored.gather(-1, targets[:, None]).sum().item()
            out[i] = Score(total, bool((scored.argmax(-1) == targets).all()))
    return out
