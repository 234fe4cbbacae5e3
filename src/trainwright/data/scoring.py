"""Scores of documents by a small model of early training: hard and yet learnable ones come out high (SALT-DS).

    S(x) = median over targets t of x of  1[y_t among the k likeliest ids] * -log p(y_t)          nats

A token that the model does not have among its k likeliest counts 0, as one that it can't learn yet; one that it is sure
of counts next to 0. So does a document without targets, and one of which the model misses more than half.

SALT, arXiv:2410.18779, scores sequences of the training stream; here a sequence is a document, since batchers lay
documents out anew each epoch. k = 10, and the model of 26k of 208k steps are recalled, not read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.data.dataset import TokenDataset


@torch.no_grad()
def learnable_losses(logits: Tensor, targets: Tensor, k: int) -> Tensor:
    """``1[y in top-k] * -log p(y)`` of each row of ``logits [N, V]``, float32 ``[N]``; of equals the target first."""
    logits = logits.float()
    own = logits.gather(1, targets[:, None])
    likelier = (logits > own).sum(1)
    return torch.where(likelier < k, (torch.logsumexp(logits, 1, keepdim=True) - own).squeeze(1), 0.0)


def document_scores(losses: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Median of the losses of a document's targets, those of weight 0 left out; 0 where there is none."""
    if weights is not None:
        losses = losses[weights > 0]
    return float(np.median(losses)) if len(losses) else 0.0


def score_documents(
    model: Any,
    dataset: TokenDataset,
    *,
    seq_len: int,
    pad_id: int,
    k: int = 10,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """float32 ``[num_docs]``: S of every document, by ``model`` (put into eval mode by the caller), in rows of
    ``seq_len``; longer documents are seen in pieces of that length.

    A number per token is kept meanwhile in a temporary file; ``progress`` gets the tokens done.
    Raises ValueError for k < 1 and a model in train mode.
    """
    from trainwright.objectives.teacher_cache import chunks, first_tokens, passes, spread

    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if model.training:
        raise ValueError("the model is in train mode; call model.eval()")
    firsts, done = first_tokens(dataset), 0
    scores = np.zeros(dataset.num_docs, dtype=np.float32)
    with tempfile.TemporaryFile() as file:
        losses = np.memmap(file, np.float32, "w+", shape=(max(dataset.num_tokens, 1),))
        for rows, batch, hidden in passes(model, dataset, seq_len, pad_id):
            here, there = spread(rows, firsts)
            row, slot = (torch.from_numpy(x).to(batch.tokens.device) for x in here.T)
            targets = batch.targets[row, slot]
            for part, logits in chunks(hidden, row, slot):
                losses[there[part]] = learnable_losses(logits, targets[part], k).cpu().numpy()
            done += len(there)
            if progress is not None:
                progress(done)
        for doc, (first, length) in enumerate(zip(firsts.tolist(), dataset.lengths.tolist(), strict=True)):
            # The loss at token t is that of token t + 1; the last token has no target.
            trained = dataset.loss_weights(doc, 1, length) if length > 1 else None
            scores[doc] = document_scores(losses[first : first + max(length - 1, 0)], trained)
        del losses
    return scores
