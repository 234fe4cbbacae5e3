"""Single samples out of a DataLoader or iterable, numbered, from any place of a pass on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.dataloader import default_collate

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive


def _as_is(sample: Any) -> Any:
    return sample


class _Indices(Sampler[Any]):
    """Those indices of a sampler's pass whose numbers are ``wanted`` or at least ``start``.

    A sampler without a generator of its own draws from torch's global one, which cannot be brought back; here it sees
    it seeded, and the global one is left as it was.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, wanted: Collection[int], start: int):
        self.sampler, self.seed, self.wanted, self.start = sampler, seed, set(wanted), start

    def __iter__(self) -> Iterator[Any]:
        seen = 0
        for number, index in enumerate(self._all()):
            seen += 1
            if number >= self.start or number in self.wanted:
                yield index
        _check_size(seen, self.start)

    def _all(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            indices = iter(self.sampler)
            try:
                first = next(indices)  # torch's samplers draw their seed, or the whole order, at the first index
            except StopIteration:
                return
        yield first
        yield from indices


class Source:
    """What :class:`~trainwright.data.odb.OnlineDynamicBatches` reads from."""

    def __init__(self, loader: DataLoader[Any] | Iterable[Any], seed: int):
        self.loader, self.seed = loader, seed
        self.collate: Callable[[list[Any]], Any] | None = None
        self.ahead = 0  # samples that the loader's workers make ahead
        self.pin_memory = False
        self._seeded: int | None = None
        if not isinstance(loader, DataLoader):
            if isinstance(loader, Iterator):
                raise ConfigError(
                    "is an iterator that can be read once; give a DataLoader or an iterable", key="loader"
                )
            return
        own_batches = loader.batch_size is None and getattr(loader, "batch_sampler", None) is not None
        if own_batches or loader.batch_size not in (1, None):
            raise ConfigError(
                "the loader has to give single samples, batches are made of them here; use batch_size=1 and a sampler",
                key="loader.batch_size",
                value=loader.batch_size,
            )
        if loader.persistent_workers:
            raise ConfigError(
                "each pass starts workers of its own; set false", key="loader.persistent_workers", value=True
            )
        # With batch_size=None the collate function is one of single samples.
        self.collate = loader.collate_fn if loader.batch_size == 1 else default_collate
        self.pin_memory = loader.pin_memory and torch.cuda.is_available()
        self.ahead = loader.num_workers * (loader.prefetch_factor or 2)
        generator = getattr(loader.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            self._seeded = generator.initial_seed()

    def open(self, epoch: int, wanted: Collection[int] = (), start: int = 0) -> Generator[tuple[int, Any], None, None]:
        """(number, sample) of pass ``epoch``, in order: those of ``wanted`` numbers and all from ``start`` on."""
        loader = self.loader
        for part in (getattr(loader, "sampler", None), getattr(loader, "dataset", None), loader):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        keep = sorted(n for n in wanted if n < start)
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            # Only the wanted samples are read again, not all before them.
            sampler = loader.sampler
            if self._seeded is not None:  # a generator goes on from pass to pass; a resumed run could not know where
                sampler.generator.manual_seed(derive(self._seeded, epoch))  # type: ignore[attr-defined]
            indices = _Indices(sampler, derive(self.seed, "sampler", epoch), keep, start)
            samples: Iterable[Any] = self._reader(loader, epoch, indices)
            try:
                yield from zip(_numbers(keep, start), samples, strict=False)
            finally:
                if self._seeded is not None:
                    sampler.generator.manual_seed(self._seeded)  # type: ignore[attr-defined]
            return
        samples = self._reader(loader, epoch, None) if isinstance(loader, DataLoader) else loader
        wanted, seen = set(keep), 0
        for number, sample in enumerate(samples):
            seen += 1
            if number >= start or number in wanted:
                yield number, sample
        _check_size(seen, start)

    def _reader(self, loader: DataLoader[Any], epoch: int, indices: _Indices | None) -> DataLoader[Any]:
        """A loader of single samples over the same dataset, with the same workers."""
        settings: dict[str, Any] = {} if indices is None else {"sampler": indices}
        if loader.num_workers:
            settings |= {
                "prefetch_factor": loader.prefetch_factor,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        return DataLoader(
            loader.dataset,
            batch_size=None,
            num_workers=loader.num_workers,
            collate_fn=_as_is,
            worker_init_fn=loader.worker_init_fn,
            timeout=loader.timeout,
            generator=torch.Generator().manual_seed(derive(self.seed, "workers", epoch)),  # seeds of the workers
            **settings,
        )


def _check_size(seen: int, start: int) -> None:
    if seen < start:
        raise DataError(
            f"the data has fewer samples than when the state was saved: {seen}, and {start} had been read. Restore it, "
            "or begin the pass anew with set_epoch"
        )


def _numbers(keep: list[int], start: int) -> Iterator[int]:
    yield from keep
    while True:
        yield start
        start += 1
