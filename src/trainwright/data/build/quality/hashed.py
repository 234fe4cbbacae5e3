"""A bag of hashed n-grams under a linear layer: the classifier of fastText, and a regressor of the same make.

    h(x)  = 1/|G(x)| sum over g in G(x) of E[bucket(g)]      G: n-grams of 1..N units; E [buckets, dim]
    P(c)  = softmax(O h(x) + b)_c                            classifier, cross-entropy
    s     = O h(x) + b                                       regressor, squared error

that is, logistic (linear) regression on averaged embeddings, with the embeddings trained along. Since both layers are
linear, prediction uses their product W = E O^T [buckets, outputs]: a few bytes an n-gram, whatever ``dim`` is.

Papers: Bag of Tricks for Efficient Text Classification, arXiv:1607.01759; Ultra-FineWeb, arXiv:2505.05427 (its
classifier, recalled: dim 256, lr 0.1, 3 epochs, 3-grams, min count 3). Where we differ, and why: Adagrad in minibatches
and not SGD one text after the other in racing threads, so that one seed gives one model and a few hundred texts are
enough; single units are hashed as well as n-grams, and ``min_count`` counts buckets, so that no dictionary is kept;
only buckets seen that often have an embedding, and n-grams without one are left out of the mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.quality.normalize import Unit, check_unit, check_words, normalize_text, units

if TYPE_CHECKING:  # only training needs it: workers that score start without it
    import torch

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FACTORS = np.random.Generator(np.random.PCG64(20)).integers(0, 1 << 63, 16, dtype=np.uint64) | np.uint64(1)
_REMEMBERED = 1 << 18  # hashes of units; a cache


@dataclass(frozen=True)
class HashedSettings:
    """What a hashed model is made of; the defaults are the paper's.

    ngrams      n-grams of 1..ngrams units
    buckets     a power of two; two n-grams that share one share an embedding
    min_count   occurrences in the training texts below which a bucket is left out
    max_units   of a longer text the first ones are looked at
    """

    dim: int = 256
    ngrams: int = 3
    buckets: int = 1 << 20
    min_count: int = 3
    epochs: int = 3
    lr: float = 0.1
    batch_size: int = 32
    unit: Unit = "auto"
    max_units: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("dim", "ngrams", "min_count", "epochs", "batch_size", "max_units"):
            if getattr(self, key) < 1:
                raise ConfigError("should be at least 1", key=key, value=getattr(self, key))
        if self.ngrams > len(_FACTORS):
            raise ConfigError(f"should be at most {len(_FACTORS)}", key="ngrams", value=self.ngrams)
        if self.buckets < 2 or self.buckets & (self.buckets - 1):
            raise ConfigError("should be a power of two", key="buckets", value=self.buckets)
        if not self.lr > 0:
            raise ConfigError("should be above 0", key="lr", value=self.lr)
        check_unit(self.unit)


class _Hashes(dict[str, int]):
    def __missing__(self, unit: str) -> int:
        if len(self) >= _REMEMBERED:
            self.clear()
        value = self[unit] = xxhash.xxh3_64_intdigest(unit.encode("utf-8", "surrogatepass"))
        return value


_hashes = _Hashes()


def buckets_of(text: str, settings: HashedSettings) -> NDArray[np.int64]:
    """The bucket of every n-gram of ``text``, repeats included; the text is normalized here."""
    found = units(normalize_text(text), settings.unit)[: settings.max_units]
    ids = np.fromiter((_hashes[u] for u in found), np.uint64, len(found))
    parts = []
    for n in range(1, min(settings.ngrams, len(ids)) + 1):
        mixed = ids[: len(ids) - n + 1] * _FACTORS[0]  # sums modulo 2^64
        for j in range(1, n):
            mixed = mixed + ids[j : len(ids) - n + 1 + j] * _FACTORS[j]
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        parts.append((mixed >> np.uint64(32)) & np.uint64(settings.buckets - 1))
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


class _HashedModel:
    """What both models share. ``weight`` [rows, outputs] is E O^T of the buckets that have an embedding."""

    kind: ClassVar[str]
    settings: HashedSettings
    row_of: NDArray[np.int32]  # [buckets]; -1: none
    embedding: NDArray[np.float32]  # [rows, dim]
    output: NDArray[np.float32]  # [outputs, dim]
    bias: NDArray[np.float32]  # [outputs]

    def _train(self, texts: Sequence[str], targets: torch.Tensor, outputs: int, settings: HashedSettings) -> None:
        import torch
        from torch.nn import functional as F

        check_words(list(texts[:1000]), settings.unit)
        self.settings = settings
        features = [buckets_of(t, settings).astype(np.int32) for t in texts]
        counts = np.zeros(settings.buckets, np.int64)
        for start in range(0, len(features), 1024):
            some = np.concatenate(features[start : start + 1024])
            counts += np.bincount(some, minlength=settings.buckets)
        kept = np.flatnonzero(counts >= settings.min_count)
        if not len(kept):
            raise DataError(
                f"no n-gram occurs min_count={settings.min_count} times in {len(texts)} texts; give more, or lower it"
            )
        self.row_of = np.full(settings.buckets, -1, np.int32)
        self.row_of[kept] = np.arange(len(kept), dtype=np.int32)
        rows = [r[r >= 0] for r in (self.row_of[f] for f in features)]
        del features
        generator = torch.Generator().manual_seed(settings.seed)
        embedding = torch.nn.Parameter(
            (torch.rand(len(kept), settings.dim, generator=generator) * 2 - 1) / settings.dim
        )
        output = torch.nn.Parameter(torch.zeros(outputs, settings.dim))
        bias = torch.nn.Parameter(self._first_bias(targets, outputs))
        optimizer = torch.optim.Adagrad([embedding, output, bias], lr=settings.lr)
        steps = -(-len(texts) // settings.batch_size) * settings.epochs
        step = 0
        for _ in range(settings.epochs):
            order = torch.randperm(len(texts), generator=generator)
            for chosen in order.split(settings.batch_size):
                optimizer.param_groups[0]["lr"] = settings.lr * (1 - step / steps)
                batch = [rows[i] for i in chosen.tolist()]
                ends = np.cumsum([len(b) for b in batch])
                h = F.embedding_bag(
                    torch.from_numpy(np.concatenate(batch).astype(np.int64)),
                    embedding,
                    torch.from_numpy(ends - [len(b) for b in batch]),
                    mode="mean",
                    sparse=True,
                )  # [B, dim]
                loss = self._loss(F.linear(h, output, bias), targets[chosen])
                optimizer.zero_grad()
                with torch.sparse.check_sparse_tensor_invariants(False):  # else torch warns of its own default
                    loss.backward()
                    optimizer.step()
                step += 1
        self.embedding, self.output, self.bias = (p.detach().numpy() for p in (embedding, output, bias))
        self._fold()

    def _first_bias(self, targets: torch.Tensor, outputs: int) -> torch.Tensor:
        import torch

        return torch.zeros(outputs)

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _fold(self) -> None:
        self.weight = self.embedding @ self.output.T  # [rows, outputs]

    def outputs(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """[texts, outputs] before any softmax; a text without a known n-gram gets the bias alone."""
        out = np.tile(self.bias.astype(np.float64), (len(texts), 1))
        for i, text in enumerate(texts):
            rows = self.row_of[buckets_of(text, self.settings)]
            rows = rows[rows >= 0]
            if len(rows):
                out[i] += self.weight[rows].mean(axis=0, dtype=np.float64)
        return out

    def __call__(self, texts: Sequence[str]) -> list[float]:
        raise NotImplementedError

    # -- on disk ------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        return {}

    def save(self, folder: Path | str) -> Path:
        """Write ``config.json`` and ``model.safetensors`` into ``folder``."""
        from safetensors.numpy import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = np.flatnonzero(self.row_of >= 0).astype(np.int32)  # rows are in the order of their buckets
        tensors = {"buckets": kept, "embedding": self.embedding, "output": self.output, "bias": self.bias}
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / WEIGHTS)
        about = {"trainwright_quality": self.kind, "settings": asdict(self.settings), **self._about()}
        (folder / CONFIG).write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", "utf-8")
        return folder

    def _restore(self, folder: Path, settings: dict[str, Any]) -> None:
        from safetensors.numpy import load_file

        self.settings = HashedSettings(**settings)
        tensors = load_file(folder / WEIGHTS)
        self.row_of = np.full(self.settings.buckets, -1, np.int32)
        self.row_of[tensors["buckets"]] = np.arange(len(tensors["buckets"]), dtype=np.int32)
        self.embedding, self.output, self.bias = (tensors[k] for k in ("embedding", "output", "bias"))
        self._fold()


class HashedClassifier(_HashedModel):
    """Probability that a text is of the positive class.

    ``HashedClassifier.fit(texts, labels)``; calling it with texts gives P(positive) of each. ``positive`` is the last
    class in sorted order unless given. Raises ConfigError for labels of one class only.
    """

    kind = "classifier"
    low, high = 0.0, 1.0

    def __init__(self, classes: Sequence[str], positive: str | None = None):
        self.classes = list(classes)
        self.positive = self.classes[-1] if positive is None else positive
        if self.positive not in self.classes:
            raise ConfigError(f"is no class; there are {', '.join(self.classes)}", key="positive", value=positive)

    @classmethod
    def fit(
        cls,
        texts: Sequence[str],
        labels: Sequence[Any],
        settings: HashedSettings | None = None,
        positive: str | None = None,
    ) -> HashedClassifier:
        import torch

        _same_length(texts, labels)
        names = [str(v) for v in labels]
        classes = sorted(set(names))
        if len(classes) < 2:
            raise ConfigError(
                f"all {len(names)} labels are {classes[0] if classes else 'missing'}; a classifier needs examples of "
                "at least two classes",
                key="labels",
            )
        model = cls(classes, positive)
        places = {c: i for i, c in enumerate(classes)}
        targets = torch.tensor([places[n] for n in names])
        model._train(texts, targets, len(classes), settings or HashedSettings())
        return model

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional as F

        return F.cross_entropy(outputs, targets)

    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """[texts, classes]"""
        z = self.outputs(texts)
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [float(p) for p in self.probabilities(texts)[:, self.classes.index(self.positive)]]

    def _about(self) -> dict[str, Any]:
        return {"classes": self.classes, "positive": self.positive}


class HashedRegressor(_HashedModel):
    """A score on the scale ``low``..``high`` of its training labels (0..5 for education value); not clipped to it.

    Without settings it takes larger steps and more of them than a classifier: how high is more to learn than which.
    Raises ConfigError where all labels are the same or one lies outside the scale.
    """

    kind = "regressor"
    defaults: ClassVar[HashedSettings] = HashedSettings(dim=64, lr=0.5, epochs=10)

    def __init__(self, low: float = 0.0, high: float = 5.0):
        if not low < high:
            raise ConfigError(f"should be below high={high}", key="low", value=low)
        self.low, self.high = float(low), float(high)

    @classmethod
    def fit(
        cls,
        texts: Sequence[str],
        scores: Sequence[float],
        settings: HashedSettings | None = None,
        low: float = 0.0,
        high: float = 5.0,
    ) -> HashedRegressor:
        import torch

        _same_length(texts, scores)
        model = cls(low, high)
        targets = torch.tensor([float(s) for s in scores])
        if not len(targets) or bool((targets == targets[0]).all()):
            raise ConfigError(
                f"all {len(targets)} labels are the same; a scorer needs texts of different quality", key="labels"
            )
        outside = (targets < low) | (targets > high) | ~torch.isfinite(targets)
        if bool(outside.any()):
            raise ConfigError(f"should be in {low:g}..{high:g}", key="labels", value=float(targets[outside][0]))
        model._train(texts, targets, 1, settings or cls.defaults)
        return model

    def _first_bias(self, targets: torch.Tensor, outputs: int) -> torch.Tensor:
        return targets.mean().reshape(1)

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional as F

        return F.mse_loss(outputs[:, 0], targets)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [float(v) for v in self.outputs(texts)[:, 0]]

    def _about(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}


def load_hashed(folder: Path | str) -> HashedClassifier | HashedRegressor:
    """A model that ``save`` wrote. Raises DataError for anything else."""
    from safetensors import SafetensorError

    folder = Path(folder)
    try:
        about = json.loads((folder / CONFIG).read_text("utf-8"))
        kind = about.get("trainwright_quality")
        model: HashedClassifier | HashedRegressor
        if kind == HashedClassifier.kind:
            model = HashedClassifier(about["classes"], about["positive"])
        elif kind == HashedRegressor.kind:
            model = HashedRegressor(about["low"], about["high"])
        else:
            raise DataError(f"{folder}: is no quality model of ours")
        model._restore(folder, about["settings"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"{folder}: no whole quality model ({error})") from None
    return model


def _same_length(texts: Sequence[str], labels: Sequence[Any]) -> None:
    if len(texts) != len(labels):
        raise ConfigError(f"{len(labels)} labels for {len(texts)} texts; give one each", key="labels")
