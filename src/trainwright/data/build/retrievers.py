"""Which documents of a corpus are near another: by words, by embeddings, by repository, or at random.

A retriever is built on one corpus, whose documents it numbers in their order; ``fingerprint`` says on which, so that
it is not used with another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive
from trainwright.data.build.bm25 import BM25
from trainwright.data.build.documents import Document

Mask = NDArray[np.bool_]  # [documents]
Embed = Callable[[Sequence[str]], ArrayLike]  # texts -> [texts, width]
CHUNK = 256


@runtime_checkable
class Retriever(Protocol):
    """What :func:`~trainwright.data.build.splice.build_examples` asks for neighbours."""

    fingerprint: str

    def neighbours(self, doc: int, k: int, used: Mask) -> Sequence[int]:
        """At most ``k`` documents near ``doc``, nearest first, none of them ``doc`` or marked in ``used``."""

    def retire(self, used: Mask) -> None:
        """Documents that are used for good: they need not be found any more."""


class Fingerprint:
    """Hash of a corpus: of ids and texts in their order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, document: Document) -> Document:
        for part in (document.id, document.text):
            data = part.encode("utf-8", "surrogatepass")
            self._hash.update(len(data).to_bytes(8, "little") + data)
        return document

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def fingerprint(documents: Iterable[Document]) -> str:
    out = Fingerprint()
    for document in documents:
        out.add(document)
    return out.hexdigest()


class BM25Retriever:
    """Neighbours by the words they share, with the settings of :class:`~trainwright.data.build.bm25.BM25`."""

    def __init__(self, documents: Sequence[Document], index: BM25 | None = None):
        self.documents, self.index = documents, index or BM25()
        if len(self.index):
            raise ConfigError("should be a new index, without documents", key="index")
        own = Fingerprint()
        self.index.add(own.add(d).text for d in documents)
        self.fingerprint = own.hexdigest()
        self._removed = 0

    def neighbours(self, doc: int, k: int, used: Mask) -> Sequence[int]:
        without = used.copy()
        without[doc] = True
        return self.index.top(self.documents[doc].text, k, without).tolist()

    def retire(self, used: Mask) -> None:
        if 2 * (np.count_nonzero(used) - self._removed) > len(used) - self._removed:  # half of what is in it is used
            self.index.remove(used)
            self._removed = int(np.count_nonzero(used))


class EmbeddingRetriever:
    """Neighbours by cosine of embeddings, exactly: every free document is compared.

    embed      texts -> ``[texts, width]``: a sentence encoder, or anything else; called with ``batch`` texts at once
    first      characters of a text that it gets; None: all
    Memory: 4 bytes x width a document. For millions of documents give an approximate index of your own as a Retriever.
    """

    def __init__(self, documents: Sequence[Document], embed: Embed, batch: int = CHUNK, first: int | None = 4000):
        own = Fingerprint()
        stream = iter(documents)
        parts = []
        while chunk := [own.add(d).text[:first] for d in islice(stream, batch)]:
            vectors = np.asarray(embed(chunk), dtype=np.float32)
            if vectors.ndim != 2 or len(vectors) != len(chunk) or not np.isfinite(vectors).all():
                raise DataError(
                    f"embed gave {'values that are not finite' if vectors.ndim == 2 else ''} {vectors.shape} for "
                    f"{len(chunk)} texts; it should give finite numbers, one row a text"
                )
            parts.append(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))
        self.vectors = np.concatenate(parts) if parts else np.zeros((0, 1), np.float32)
        self.fingerprint = own.hexdigest()
        self._numbers = np.arange(len(self.vectors))

    def neighbours(self, doc: int, k: int, used: Mask) -> Sequence[int]:
        if not len(own := np.flatnonzero(self._numbers == doc)):
            raise ValueError(f"document {doc} was retired")
        scores = self.vectors @ self.vectors[own[0]]
        scores[used[self._numbers]] = -np.inf
        scores[own[0]] = -np.inf
        best = np.argsort(-scores, kind="stable")[:k]
        return self._numbers[best[np.isfinite(scores[best])]].tolist()

    def retire(self, used: Mask) -> None:
        free = ~used[self._numbers]
        if 2 * np.count_nonzero(free) < len(free):
            self.vectors, self._numbers = self.vectors[free], self._numbers[free]


class SameRepository:
    """Files of the same repository, those of the same folder first, then by how much of the path they share.

    repository, path   keys of the metadata; a document without the first has no neighbours
    """

    def __init__(self, documents: Sequence[Document], repository: str = "repository", path: str = "path"):
        own = Fingerprint()
        self._files: dict[str, list[int]] = {}
        self._repository: list[str | None] = []
        self._folders: list[tuple[str, ...]] = []
        for i, document in enumerate(documents):
            own.add(document)
            name = document.metadata.get(repository)
            self._repository.append(None if name is None else str(name))
            self._folders.append(tuple(str(document.metadata.get(path, "")).split("/")))
            if name is not None:
                self._files.setdefault(str(name), []).append(i)
        if not self._files:
            raise DataError(
                f"no document has {repository!r} in its metadata; name the key that holds the repository, or use bm25"
            )
        self.fingerprint = own.hexdigest()

    def neighbours(self, doc: int, k: int, used: Mask) -> Sequence[int]:
        name = self._repository[doc]
        free = [i for i in self._files[name] if i != doc and not used[i]] if name is not None else []
        return sorted(free, key=lambda i: (-self._shared(doc, i), self._folders[i], i))[:k]

    def _shared(self, a: int, b: int) -> int:
        """Folders at the beginning that two paths have in common."""
        count = 0
        for x, y in zip(self._folders[a][:-1], self._folders[b][:-1], strict=False):
            if x != y:
                break
            count += 1
        return count

    def retire(self, used: Mask) -> None:
        for name, files in self._files.items():
            if all(used[i] for i in files):
                self._files[name] = []


class RandomRetriever:
    """Any free document: with it, the examples are those of random packing. The baseline."""

    def __init__(self, documents: Sequence[Document], seed: int = 0):
        self.fingerprint = fingerprint(documents)
        self._rng = np.random.Generator(np.random.PCG64(derive(seed, "random neighbours")))

    def neighbours(self, doc: int, k: int, used: Mask) -> Sequence[int]:
        free = np.flatnonzero(~used)
        free = free[free != doc]
        return self._rng.choice(free, min(k, len(free)), replace=False).tolist()

    def retire(self, used: Mask) -> None:
        pass
