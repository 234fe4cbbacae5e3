"""A stage takes a stream of documents and gives one; what it did to them can be read off it.

Stages hold a bounded number of documents. One that judges each document by itself is a ``DocumentStage``: it runs in
this process or in worker processes, several such stages in a row in one worker, with the same result in the same order.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar, runtime_checkable

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.statistics import Drop, Statistics, merge_all

CHUNK_CHARACTERS = 1 << 20  # of the texts that a worker gets at once
CHUNK_DOCUMENTS = 512
T = TypeVar("T")
R = TypeVar("R")


@runtime_checkable
class Stage(Protocol):
    """What a pipeline is made of.

    ``run`` is a generator: it takes documents as its reader asks for more, and may be run once. ``statistics`` are
    whole when it has ended.
    """

    name: str
    statistics: Statistics

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]: ...


class DocumentStage(ABC):
    """A stage that judges each document by itself. A subclass gives ``name`` and ``apply``; it must be picklable."""

    name: str

    def __init__(self) -> None:
        self.statistics = Statistics(self.name)

    @abstractmethod
    def apply(self, document: Document) -> Document | Drop:
        """The document as it goes on (the same object where nothing changed), or why it does not."""

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        return run_fused([self], documents, workers)


def run_fused(stages: Sequence[DocumentStage], documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
    """Documents through several stages, each worker doing all of them; the order stays."""
    if workers <= 0:
        for document in documents:
            done = _through(stages, document)
            if done is not None:
                yield done
        return
    for kept, statistics in parallel_map(_Worker(stages), chunks(documents), workers):
        merge_all((s.statistics for s in stages), statistics)
        yield from kept


def _through(stages: Sequence[DocumentStage], document: Document) -> Document | None:
    for stage in stages:
        stage.statistics.see(document.text)
        before = document.text
        answer = stage.apply(document)
        if isinstance(answer, Drop):
            stage.statistics.drop(document, answer)
            return None
        stage.statistics.keep(answer, before)
        document = answer
    return document


class _Worker:
    """Work on one chunk; pickled once a process, by its pool's initializer."""

    def __init__(self, stages: Sequence[DocumentStage]):
        self.stages = [copy.copy(s) for s in stages]

    def __call__(self, chunk: list[Document]) -> tuple[list[Document], list[Statistics]]:
        for stage in self.stages:
            stage.statistics = Statistics(stage.name, stage.statistics.samples_each)
        kept = [k for d in chunk if (k := _through(self.stages, d)) is not None]
        return kept, [s.statistics for s in self.stages]


def chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Lists of documents of about CHUNK_CHARACTERS in all."""
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text) + 200
        if size >= CHUNK_CHARACTERS or len(chunk) >= CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


_function: Callable[[Any], Any] | None = None


def _install(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that was killed cannot end its workers, and these would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(value: Any) -> Any:
    assert _function is not None
    return _function(value)


def parallel_map(function: Callable[[T], R], values: Iterable[T], workers: int) -> Iterator[R]:
    """``function`` over ``values`` in worker processes, results in order, at most 2 x workers values under way.

    ``function`` is sent to each worker once. 0 workers: in this process. A worker that dies raises DataError.
    """
    if workers <= 0:
        yield from map(function, values)
        return
    # forkserver: a process that holds threads (torch, arrow) must not fork itself.
    context = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_install, initargs=(function,))
    waiting: deque[Future[R]] = deque()
    try:
        stream = iter(values)
        for value in itertools.islice(stream, 2 * workers):
            waiting.append(pool.submit(_call, value))
        while waiting:
            result = waiting.popleft().result()
            for value in itertools.islice(stream, 1):
                waiting.append(pool.submit(_call, value))
            yield result
    except BrokenProcessPool:
        raise DataError(
            "a worker process of the data pipeline died: out of memory, or a stage from a module that it cannot "
            "import; try fewer workers, or 0 to see its own error"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_workers(workers: int) -> int:
    if workers < 0:
        raise ConfigError("should be at least 0", key="workers", value=workers)
    return workers
