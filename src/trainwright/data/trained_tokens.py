"""How many tokens of a dataset are trained on."""

from __future__ import annotations

import numpy as np

from trainwright.data.dataset import TokenDataset
from trainwright.data.permutation import Permutation


def trained_tokens(dataset: TokenDataset, most_docs: int = 4096) -> tuple[float, bool]:
    """Targets of weight > 0 in an epoch, and whether that is an estimate. Masks are read of ``most_docs`` documents
    drawn at random, and of all if none of those has a trained token."""
    some = np.arange(min(most_docs, dataset.num_docs))
    if len(some) < dataset.num_docs:
        some = np.sort(Permutation(dataset.num_docs, seed=0).at(some))
    for docs in (some, np.arange(dataset.num_docs)):
        trained, seen, masked = 0, 0, False
        for doc, length in zip(docs.tolist(), dataset.lengths[docs].tolist(), strict=True):
            given = dataset.loss_weights(doc, 1, length) if length > 1 else None
            masked |= given is not None
            trained += max(length - 1, 0) if given is None else int(np.count_nonzero(given))
            seen += length
        if not masked:
            return dataset.num_tokens - int(np.count_nonzero(dataset.lengths)), False
        if len(docs) == dataset.num_docs:
            return trained, False
        if trained:
            return trained / seen * dataset.num_tokens, True
    return 0, False
