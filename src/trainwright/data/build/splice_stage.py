"""SPLiCe as a stage of a corpus: documents in, long examples out (see ``splice``).

Documents are read once and kept on disk, where they can be read at any place; in memory are the index of the retriever
and a few bytes a document.
"""

from __future__ import annotations

import importlib
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

import numpy as np

from trainwright.core.errors import ConfigError
from trainwright.data.build.bm25 import BM25
from trainwright.data.build.documents import Document
from trainwright.data.build.retrievers import (
    BM25Retriever,
    Embed,
    EmbeddingRetriever,
    RandomRetriever,
    Retriever,
    SameRepository,
)
from trainwright.data.build.splice import Characters, Examples, Measure, Order, Tokens, Trim, check_settings
from trainwright.data.build.statistics import Statistics

Retrieval = Literal["bm25", "same_repository", "embedding", "random"]


class StoredDocuments(Sequence[Document]):
    """Documents in a file, each compressed by itself, at random access; 8 bytes of memory each."""

    def __init__(self, path: Path):
        import zstandard

        self._pack = zstandard.ZstdCompressor(level=1)
        self._unpack = zstandard.ZstdDecompressor()
        self._file = path.open("w+b")
        self._ends = array("Q", [0])

    def append(self, document: Document) -> None:
        self._file.seek(0, 2)
        self._file.write(self._pack.compress(pickle.dumps(document, protocol=5)))
        self._ends.append(self._file.tell())

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, i: int) -> Document: ...
    @overload
    def __getitem__(self, i: slice) -> list[Document]: ...
    def __getitem__(self, i: int | slice) -> Document | list[Document]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        self._file.seek(self._ends[i])
        data = self._file.read(self._ends[i + 1] - self._ends[i])
        return cast(Document, pickle.loads(self._unpack.decompress(data)))

    def close(self) -> None:
        self._file.close()


class Splice:
    """Long examples of related documents (SPLiCe), each about ``length`` tokens.

    retriever   bm25, same_repository (``repository`` and ``path`` name the keys of the metadata), embedding (``embed``
                is ``module:function`` from texts to vectors, or the function) or random, the baseline
    tokenizer   folder or tokenizer.json of a Hugging Face tokenizer, to count tokens; None: ``characters_per_token``
    bm25        settings of the index: k1, b, first_words, query_words, max_share
    The rest is as for :class:`~trainwright.data.build.splice.Examples`.

    Put it behind deduplication. An example names its documents in its metadata and has their licences. Train on the
    output with as long rows (``data.batcher: best_fit``), mixed with ordinary data by ``weight``.
    """

    name = "splice"

    def __init__(
        self,
        length: int = 32768,
        retriever: Retrieval = "bm25",
        k: int = 1,
        order: Order = "identity",
        trim: Trim | None = "cut",
        max_similarity: float | None = 0.8,
        caps: Mapping[str, float] | None = None,
        separator: str = "\n\n",
        tokenizer: str | None = None,
        characters_per_token: float = 4.0,
        bm25: Mapping[str, Any] | None = None,
        embed: str | Embed | None = None,
        repository: str = "repository",
        path: str = "path",
        seed: int = 0,
        document_mask: bool = False,
        work_dir: Path | None = None,
    ):
        check_settings(length, k, order, trim, max_similarity, caps, document_mask)
        if retriever not in ("bm25", "same_repository", "embedding", "random"):
            raise ConfigError("should be bm25, same_repository, embedding or random", key="retriever", value=retriever)
        if (retriever == "embedding") != (embed is not None):
            raise ConfigError("and retriever=embedding go together; give both or neither", key="embed", value=embed)
        self.length, self.retriever, self.repository, self.path = length, retriever, repository, path
        self.seed, self.work_dir = seed, work_dir
        self.bm25 = _index(bm25 or {})
        self.embed = _function(embed) if isinstance(embed, str) else embed
        self.measure = _measure(tokenizer, characters_per_token)
        self.settings: dict[str, Any] = {
            "k": k, "order": order, "trim": trim, "max_similarity": max_similarity, "caps": caps,
            "separator": separator,
        }  # fmt: skip
        self.statistics = Statistics(self.name)
        self.statistics.figures = {"length": length, "retriever": retriever, "k": k, "order": order, "trim": trim}

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        if self.work_dir is not None:
            self.work_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="splice-", dir=self.work_dir) as folder:
            stored = StoredDocuments(Path(folder) / "documents")
            try:
                yield from self._examples(stored, documents)
            finally:
                stored.close()

    def _examples(self, stored: StoredDocuments, documents: Iterable[Document]) -> Iterator[Document]:
        lengths = array("q")
        sources: list[str] = []
        names: dict[str, str] = {}
        for document in documents:
            self.statistics.see(document.text)
            lengths.append(self.measure.count(document.text))
            sources.append(names.setdefault(document.source, document.source))
            stored.append(document)
        if not len(stored):
            return
        examples = Examples(
            stored, self._retriever(stored), self.length, measure=self.measure, check=False, sources=sources,
            lengths=np.array(lengths, np.int64), seed=self.seed, **self.settings,
        )  # fmt: skip
        for i, example in enumerate(examples):
            parts = [stored[d] for d in example.documents]
            licences = sorted({p.licence or "unknown" for p in parts})
            out = Document(
                example.text,
                f"splice-{self.seed}-{i:08d}",
                "splice",
                licence=None if licences == ["unknown"] else " AND ".join(licences),
                metadata={"documents": [p.id for p in parts], "sources": sorted({p.source for p in parts})},
                provenance=[{"step": self.name, "retriever": self.retriever, **self.settings, "roots": example.roots}],
            )
            self.statistics.keep(out)
            yield out
        self.statistics.figures |= {k: v for k, v in vars(examples.report).items() if k != "by_source"}
        self.statistics.figures["by_source"] = dict(sorted(examples.report.by_source.items()))

    def _retriever(self, stored: StoredDocuments) -> Retriever:
        if self.retriever == "bm25":
            return BM25Retriever(stored, self.bm25)
        if self.retriever == "same_repository":
            return SameRepository(stored, self.repository, self.path)
        if self.retriever == "random":
            return RandomRetriever(stored, self.seed)
        return EmbeddingRetriever(stored, cast(Embed, self.embed))


def _index(settings: Mapping[str, Any]) -> BM25:
    try:
        return BM25(**settings)
    except TypeError:
        known = "k1, b, first_words, query_words, max_share"
        raise ConfigError(f"should be settings of the index: {known}", key="bm25", value=dict(settings)) from None
    except ConfigError as error:
        raise error.under("bm25") from None


def _function(name: str) -> Embed:
    module, colon, function = name.partition(":")
    try:
        return cast(Embed, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        said = "should look like module:function" if not colon else f"cannot be loaded ({error})"
        raise ConfigError(said, key="embed", value=name) from None


def _measure(tokenizer: str | None, characters_per_token: float) -> Measure:
    if tokenizer is None:
        return Characters(characters_per_token)
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"no tokenizer.json can be read there ({error})", key="tokenizer", value=tokenizer) from None
    return Tokens(lambda text: backend.encode(text, add_special_tokens=False).ids, backend.decode)
