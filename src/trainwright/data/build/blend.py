"""A corpus mixed from others: shares by weight or temperature, a budget, repeats, a held-out part, no contamination.

    p_i = w_i / sum w    or    p_i = n_i^(1/T) / sum_j n_j^(1/T)      T = 1: natural sizes, T -> inf: equal shares

with n_i what source i has once held-out and contaminated documents are left out. It reads the sources twice: to count,
and to mix. Memory: the hashes of the contaminants, 8 bytes a document for its id (20 while they are sorted), and one
bucket of the shuffle.

Papers: SlimPajama-DC, arXiv:2309.10818 (shares); mT5, arXiv:2010.11934 (temperature); GPT-3, arXiv:2005.14165 (13-gram
decontamination).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError, nearest
from trainwright.data.build.composition import MANIFEST, read_manifest, write_manifest
from trainwright.data.build.decontamination import NgramDecontaminate
from trainwright.data.build.documents import Document
from trainwright.data.build.mixing import Share, differing, gather, is_held_out, mix, plan_mixture, scatter, shuffle
from trainwright.data.build.operator_hashes import hash_values, operator_hashes
from trainwright.data.build.pipeline import Progress, Watcher, save_statistics
from trainwright.data.build.resume import FOLDER, Made, lock, write_whole
from trainwright.data.build.seen import SeenHashes
from trainwright.data.build.statistics import Drop, Statistics
from trainwright.data.build.writers import Writer

log = logging.getLogger("trainwright")

UNITS: dict[str, Callable[[Document], int]] = {
    "bytes": lambda d: len(d.text.encode("utf-8", "surrogatepass")),
    "characters": lambda d: len(d.text),
    "documents": lambda d: 1,
}
PARTICULARS = 300  # bytes of a document on disk beside its text, about


def temperature_shares(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """p_i proportional to n_i^(1/T). Raises ConfigError for T that is not above 0, and where nothing is left."""
    if not temperature > 0 or math.isnan(temperature):
        raise ConfigError("should be above 0; 1 keeps natural sizes", key="temperature", value=temperature)
    if not any(n > 0 for n in sizes.values()):
        raise DataError("no source has a document left to mix")
    # By logarithms: n^(1/T) overflows for a low temperature.
    logs = {k: math.log(n) / temperature for k, n in sizes.items() if n > 0}
    top = max(logs.values())
    raw = {k: math.exp(v - top) for k, v in logs.items()}
    whole = math.fsum(raw.values())
    return {k: v / whole for k, v in raw.items()}


def weight_shares(weights: Mapping[str, float], sources: Iterable[str]) -> dict[str, float]:
    """Weights over their sum. Raises ConfigError for negative ones, a sum of 0, and sources that are missing."""
    known = list(sources)
    for name, weight in weights.items():
        if name not in known:
            raise ConfigError(f"no such source; {nearest(name, known)}", key=f"weights.{name}")
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError("should be at least 0", key=f"weights.{name}", value=weight)
    missing = [n for n in known if n not in weights]
    if missing:
        raise ConfigError(
            "has no weight but others have; give one to each, 0 to leave it out", key=f"weights.{missing[0]}"
        )
    whole = math.fsum(weights.values())
    if whole <= 0:
        raise ConfigError("sum to 0; give at least one source a weight above 0", key="weights", value=dict(weights))
    return {n: w / whole for n, w in weights.items()}


class Blend:
    """Sources and what is to become of them.

    weights: by source; else shares by ``temperature``. total: budget in ``unit`` (bytes, characters, documents, or
    tokens of ``tokenizer``, a folder); None: as much as the shares give within ``repeat``. repeat: how often a source
    may be gone through; 1: never twice. holdout: share of the documents kept apart, by the hash of their text.
    contaminants: documents that none may share ``ngram`` words in a row with. shuffle, seed: the order.
    Of documents with the same id the first of the mixture keeps it; a later one is called ``source:id``, and where
    that is taken too ``source:id#2`` and so on.
    """

    def __init__(
        self,
        sources: Mapping[str, Iterable[Document]],
        weights: Mapping[str, float] | None = None,
        temperature: float | None = None,
        total: int | None = None,
        unit: str = "bytes",
        tokenizer: str | Path | None = None,
        repeat: float = 1.0,
        holdout: float = 0.0,
        contaminants: Iterable[Document | str] = (),
        ngram: int = 13,
        shuffle: bool = True,
        seed: int = 0,
        work_dir: Path | None = None,
    ):
        if not sources:
            raise ConfigError("names no source", key="inputs")
        if weights is not None and temperature is not None:
            raise ConfigError(
                "gives shares, and so do the weights; leave one out", key="temperature", value=temperature
            )
        if temperature is not None:
            temperature_shares({"any": 1}, temperature)
        if weights is not None:
            weight_shares(weights, sources)
        if not 0 <= holdout < 1:
            raise ConfigError("should be at least 0 and below 1", key="holdout", value=holdout)
        if not repeat >= 1:
            raise ConfigError("should be at least 1, which repeats nothing", key="repeat", value=repeat)
        if total is not None and total < 1:
            raise ConfigError("should be at least 1", key="total", value=total)
        self.sources, self.weights, self.temperature = dict(sources), weights, temperature
        self.total, self.repeat, self.holdout, self.seed, self.shuffle = total, repeat, holdout, seed, shuffle
        self.unit, self.size = unit, _size(unit, tokenizer)
        self.work_dir = work_dir
        self._counts = None if tokenizer is None else str(tokenizer)
        self.statistics = Statistics("read")
        self.held = Statistics("hold_out")
        self.clean = NgramDecontaminate(contaminants, ngram) if contaminants else None
        self.ngram = ngram
        self.renamed = 0  # documents whose id another one had before
        self._bytes: dict[str, int] = {}  # of a source on disk, about

    def _pass(self, name: str, counting: bool, held_out: bool = False) -> Iterator[Document]:
        """Documents of a source that may be mixed, or those that are held out."""
        for document in self.sources[name]:
            apart = self.holdout > 0 and is_held_out(document, self.holdout, self.seed)
            if counting:
                self.statistics.see(document.text)
                self.statistics.keep(document)
                if self.holdout:
                    self.held.see(document.text)
                    if apart:
                        self.held.drop(document, Drop("held out"))
                    else:
                        self.held.keep(document)
            if apart != held_out:
                continue
            if self.clean is not None and not held_out:
                answer = self.clean.apply(document)
                if counting:
                    self.clean.statistics.see(document.text)
                    if isinstance(answer, Drop):
                        self.clean.statistics.drop(document, answer)
                    else:
                        self.clean.statistics.keep(document)
                if isinstance(answer, Drop):
                    continue
            yield document

    def plan(self) -> dict[str, Share]:
        """Read all sources once and settle what each gives. Raises ConfigError where that is more than it may."""
        sizes = {n: sum(self._measured(n)) for n in self.sources}
        if self.weights is not None:
            fractions = weight_shares(self.weights, self.sources)
        else:
            fractions = temperature_shares(sizes, 1.0 if self.temperature is None else self.temperature)
        empty = [n for n, f in fractions.items() if f > 0 and not sizes[n]]
        if empty:
            raise DataError(f"source {empty[0]!r}: no document left of it to mix; give it weight 0, or leave it out")
        total = self.total
        if total is None:
            total = max(
                int(min(sizes[n] * (self.repeat if self.repeat > 1 else 1) / f for n, f in fractions.items() if f)), 1
            )
        shares = plan_mixture(fractions, sizes, total, allow_repeat=True)
        for name, share in shares.items():
            if share.target > share.available * self.repeat * (1 + 1e-9):
                raise ConfigError(
                    f"would be gone through {share.target / share.available:.1f} times, more than "
                    f"repeat={self.repeat:g}; lower total or its share, or raise repeat",
                    key=f"sources.{name}", value=round(share.fraction, 6),
                )  # fmt: skip
        return shares

    def _measured(self, name: str) -> Iterator[int]:
        self._bytes[name] = 0
        for document in self._pass(name, counting=True):
            text = document.text
            self._bytes[name] += PARTICULARS + (len(text) if text.isascii() else len(text.encode("utf-8", "replace")))
            yield self.size(document)

    def documents(self, shares: dict[str, Share], kept: _Kept | None = None) -> Iterator[Document]:
        """The mixed documents in their order; ``shares`` then hold what each gave."""
        given_by = mix({n: _Again(self, n) for n in shares}, shares, self.size)
        mixed = self._named((d.provenance[-1]["from"], d) for d in given_by)
        if not self.shuffle:
            return mixed
        expected = round(sum(self._bytes.get(n, 0) * s.target / s.available for n, s in shares.items()))
        if kept is None:
            return shuffle(mixed, self.seed, self.work_dir, expected)

        def spread() -> tuple[dict[str, Share], int]:
            shutil.rmtree(kept.buckets, ignore_errors=True)
            kept.buckets.mkdir()
            scatter(mixed, kept.buckets, self.seed, expected)
            return shares, self.renamed

        given, self.renamed = kept.once("mixed", spread)
        shares.update(given)
        return gather(kept.buckets)

    def _named(self, documents: Iterable[tuple[str, Document]]) -> Iterator[Document]:
        """Documents, each with the name of where it comes from, under ids that are each their own."""
        seen = SeenHashes()
        for source, document in documents:
            if not seen.add(document.id):
                self.renamed += 1
                name = new = f"{source}:{document.id}"
                number = 2
                while not seen.add(new):
                    new, number = f"{name}#{number}", number + 1
                provenance = [*document.provenance, {"step": "mix", "was": document.id}]
                document = dataclasses.replace(document, id=new, provenance=provenance)
            yield document

    def write(self, out: Path, writing: Mapping[str, Any], watch: Watcher | None = None) -> dict[str, Any]:
        """The corpus with its manifest; with a held-out part in folders ``train`` and ``validation``.

        It is written into a hidden folder first, so that ``out`` never holds a part of it. A call that was killed goes
        on by the same call: what was counted, mixed and written whole is not done again, where the sources are readers
        whose files have not changed, and nothing else has.
        """
        draft, key = out / ".mixing", self._key(writing)
        there_before = out.exists()
        held = lock(draft)
        kept = None
        try:
            made = Made(out)
            if made.by(key):
                shutil.rmtree(draft)
                return made.statistics()
            kept = _Kept(draft, key)
            there = [p.name for p in out.iterdir() if p.name not in (draft.name, FOLDER)]
            if there and not kept.has("whole"):
                raise DataError(f"{out} is not empty ({sorted(there)[0]}, ...); name another folder, or empty it")
            corpus = draft / "corpus"
            found: dict[str, Any] = kept.once("whole", lambda: self._write(corpus, kept, writing, watch))
            for path in sorted(corpus.iterdir()):
                path.replace(out / path.name)
            made.note(key, _files(out, ("train", "validation") if self.holdout else ("",)))
            shutil.rmtree(draft)
        except BaseException:
            if kept is None or not kept.begun():  # nothing was done that another call could go on from
                shutil.rmtree(draft, ignore_errors=True)
                if not there_before:
                    with contextlib.suppress(OSError):
                        out.rmdir()
            raise
        finally:
            os.close(held)
        return found

    def _key(self, writing: Mapping[str, Any]) -> str | None:
        """What has to be the same for a call to go on; None: that cannot be told."""
        settings = {
            k: v
            for k, v in vars(self).items()
            if k not in ("sources", "statistics", "held", "clean", "size", "work_dir", "renamed", "_bytes")
        }
        try:
            sources = [(name, operator_hashes(source, [])) for name, source in self.sources.items()]
        except ConfigError:
            return None
        clean = None if self.clean is None else operator_hashes(None, [self.clean], "")
        return hash_values(
            "sorted by keys", sources, settings, clean, {k: str(v) for k, v in writing.items()}, self._counts
        )

    def _write(self, corpus: Path, kept: _Kept, writing: Mapping[str, Any], watch: Watcher | None) -> dict[str, Any]:
        started = time.monotonic()
        progress = Progress()
        sources: dict[str, dict[str, int]] = {}
        shares, self.statistics, self.held, dropped, self._bytes = kept.once("plan", self._planned)
        if self.clean is not None:
            self.clean.statistics = dropped
        progress.read = self.statistics.documents_in
        train = corpus / "train" if self.holdout else corpus
        told = started
        writer = Writer(train, **writing)
        written = writer.go_on(kept.shards())
        kept.clear(writer, train)
        writer.on_shard = lambda: kept.save("shards", writer.compositions)
        with writer:
            for document in self.documents(shares, kept):
                if progress.written >= written:
                    writer.write(document)
                progress.written += 1
                progress.characters += len(document.text)
                row = sources.setdefault(document.source, {"documents": 0, "characters": 0})
                row["documents"] += 1
                row["characters"] += len(document.text)
                if watch is not None and (now := time.monotonic()) - told >= 1.0:
                    told, progress.seconds = now, now - started
                    watch(progress)
        if off := differing(shares):
            asked = ", ".join(f"{n} {p:.1%} instead of {shares[n].fraction:.1%}" for n, p in off.items())
            log.warning(
                "data mix: documents are large beside the total, so that shares are not those asked (%s); raise total, "
                "or cut the documents into smaller ones",
                asked,
            )
        held_out = 0
        if self.holdout:
            shutil.rmtree(corpus / "validation", ignore_errors=True)
            with Writer(corpus / "validation", **writing) as other:
                apart = ((n, d) for n in self.sources for d in self._pass(n, counting=False, held_out=True))
                for document in self._named(apart):
                    other.write(document)
                    held_out += 1
            write_manifest(corpus / "validation", other.compositions, settings={"held_out_of": list(self.sources)})
        about: dict[str, Any] = {
            "unit": self.unit,
            "total": sum(s.given for s in shares.values()),
            "temperature": self.temperature,
            "seed": self.seed,
            "shuffled": self.shuffle,
            "holdout": self.holdout,
            "held_out": held_out,
            "renamed_ids": self.renamed,
            "contaminated": sum(self.clean.statistics.dropped.values()) if self.clean else 0,
            "sources": {n: {**dataclasses.asdict(s), "epochs": round(s.epochs, 6)} for n, s in sorted(shares.items())},
        }
        write_manifest(train, writer.compositions, settings={"mixture": about})
        stages = [
            self.statistics,
            *([self.held] if self.holdout else []),
            *([self.clean.statistics] if self.clean else []),
        ]
        found = {
            "documents": progress.written,
            "characters": progress.characters,
            "seconds": round(time.monotonic() - started, 3),
            "settings": {"mixture": about},
            "mixture": about,
            "sources": dict(sorted(sources.items())),
            "stages": [s.to_json() for s in stages],
            "files": writer.files,
        }
        save_statistics(found, corpus)
        return found

    def _planned(self) -> tuple[dict[str, Share], Statistics, Statistics, Statistics | None, dict[str, int]]:
        shares = self.plan()
        dropped = None if self.clean is None else self.clean.statistics
        return shares, self.statistics, self.held, dropped, self._bytes


def _files(out: Path, parts: Iterable[str]) -> list[str]:
    """Manifests and shards of the corpora in ``out``."""
    names = []
    for part in parts:
        manifest = read_manifest(out / part) or {"shards": []}
        names += [(Path(part) / n).as_posix() for n in (MANIFEST, *(s["file"] for s in manifest["shards"]))]
    return names


class _Kept:
    """What a mix that is not whole has done already, under the hidden folder that it is written into."""

    def __init__(self, draft: Path, key: str | None):
        self.folder = draft / "kept"
        self.buckets = self.folder / "buckets"
        about = self.folder / "key"
        if key is None or not about.exists() or about.read_text() != key:
            for path in draft.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.folder.mkdir()
            if key is not None:
                write_whole(about, lambda file: file.write(key.encode()))

    def begun(self) -> bool:
        return self.has("plan")

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def save(self, name: str, value: Any) -> None:
        write_whole(self.folder / name, lambda file: pickle.dump(value, file, protocol=5))

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """What ``work`` gives, or gave."""
        if not self.has(name):
            self.save(name, work())
        return pickle.loads((self.folder / name).read_bytes())

    def shards(self) -> list[dict[str, Any]]:
        return pickle.loads((self.folder / "shards").read_bytes()) if self.has("shards") else []

    def clear(self, writer: Writer, folder: Path) -> None:
        """Shards that were not finished go."""
        whole = {f["file"] for f in writer.files}
        for path in [*folder.glob("*"), *(folder / "data").glob("*")]:
            name = path.relative_to(folder).as_posix()
            if name not in whole and name != "data":
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class _Again:
    """A source that may be gone through several times; ids of a later time end in ``#2`` and so on."""

    def __init__(self, blend: Blend, name: str):
        self.blend, self.name, self.times = blend, name, 0

    def __iter__(self) -> Iterator[Document]:
        self.times += 1
        step = {"step": "mix", "from": self.name, **({"time": self.times} if self.times > 1 else {})}
        mark = f"#{self.times}" if self.times > 1 else ""
        for document in self.blend._pass(self.name, counting=False):
            yield dataclasses.replace(document, id=document.id + mark, provenance=[*document.provenance, step])


def _size(unit: str, tokenizer: str | Path | None) -> Callable[[Document], int]:
    if unit == "tokens":
        if tokenizer is None:
            raise ConfigError("counts by a tokenizer; give its folder", key="unit", value="tokens")
        from trainwright.data.tokenizers import load_tokenizer

        loaded = load_tokenizer(Path(tokenizer))
        return lambda d: len(loaded.encode(d.text)) + 1  # and the EOS that ends each document
    if tokenizer is not None:
        raise ConfigError(f"counts {unit}, which takes no tokenizer; set it to tokens", key="unit", value=unit)
    if unit not in UNITS:
        raise ConfigError(f"unknown; {nearest(unit, [*UNITS, 'tokens'])}", key="unit", value=unit)
    return UNITS[unit]
