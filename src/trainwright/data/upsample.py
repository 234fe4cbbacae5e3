"""Documents used more or less than once an epoch.

``uses`` u: every document is used floor(u) times, and round(N * (u - floor(u))) of the N, drawn by the data's own hash,
once more. So with a whole u each is used exactly u times, with another one floor(u) or ceil(u) times, and below 1 a
part of the documents is used, the same in every epoch.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from trainwright.core.errors import ConfigError
from trainwright.core.seeds import derive
from trainwright.data.dataset import TokenDataset
from trainwright.data.permutation import Permutation


class UpSampled(TokenDataset):
    """``dataset`` with each document ``uses`` times; document numbers run on over the repeats."""

    def __init__(self, dataset: TokenDataset, uses: float):
        if not (math.isfinite(uses) and uses > 0):
            raise ConfigError("should be above 0", key="up_sample", value=uses)
        n = dataset.num_docs
        whole, part = math.floor(uses), uses - math.floor(uses)
        extra = round(n * part)
        if n and not whole:
            extra = max(extra, 1)  # a part of the documents is never none
        self.dataset, self.uses, self.name = dataset, uses, dataset.name
        self._whole = whole * n
        seed = derive(0, "up_sample", dataset.fingerprint)
        self._extra = np.sort(Permutation(n, seed).at(np.arange(extra))) if extra else np.zeros(0, np.int64)
        lengths = np.asarray(dataset.lengths)
        self.lengths = np.concatenate([np.tile(lengths, whole), lengths[self._extra]]).astype(np.int32)
        digest = hashlib.blake2b(f"{dataset.fingerprint} up_sample {uses!r}".encode(), digest_size=16)
        self.fingerprint = digest.hexdigest()

    def original(self, doc: int) -> int:
        """The number that document ``doc`` has in the dataset below."""
        return doc % self.dataset.num_docs if doc < self._whole else int(self._extra[doc - self._whole])

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.dataset.tokens(self.original(doc), start, stop)

    def loss_weights(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        return self.dataset.loss_weights(self.original(doc), start, stop)


def up_sampled(dataset: TokenDataset, uses: float) -> TokenDataset:
    """``dataset`` itself where each document is used once."""
    return dataset if uses == 1 else UpSampled(dataset, uses)
