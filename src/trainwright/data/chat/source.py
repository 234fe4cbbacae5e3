"""What the sources of examples share: from examples to a cached dataset of tokens and loss weights."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainwright.core.errors import ConfigError, DataError, TrainwrightError
from trainwright.data.cache import build_once
from trainwright.data.chat.build import Item, Report, describe, encode_all, text_bytes
from trainwright.data.chat.conversation import Conversation
from trainwright.data.chat.masks import Masker, TooLong, UnstableTemplate, fit
from trainwright.data.chat.shards import FractionalWeights, WeightedDataset, WeightedShardWriter
from trainwright.data.shards import FORMAT
from trainwright.data.sources._split import SplitSource, _Tail
from trainwright.data.sources.base import Split
from trainwright.data.tokenizers.base import Tokenizer

log = logging.getLogger("trainwright")
MASK_FORMAT = 3  # changes when the same rows would be given other tokens or weights
GROUP = 1024  # documents that are written at once


class ExampleSource(SplitSource, ABC):
    """A source whose documents carry ``meta["example"]``, ``meta["format"]`` and ``meta["where"]``.

    It has, as fields or fixed, ``max_length``, ``too_long``, ``skip_bad_rows`` and ``max_bad_rows``, and ``_bad`` for
    the messages of rows that could not be read.
    """

    if TYPE_CHECKING:
        max_length: int | None
        too_long: TooLong
        skip_bad_rows: bool
        max_bad_rows: float
        _bad: list[str]

    whole_documents: ClassVar[bool] = True  # an example cut at a row's end would lose its question

    @abstractmethod
    def _masker(self, tokenizer: Tokenizer) -> Masker: ...

    def _plan(self, fraction: float) -> _Tail | None:
        """Of a corpus too small for hashing a whole conversation is held out: half of one would be none."""
        tail = super()._plan(fraction)
        return None if tail is None else _Tail(tail.doc_id, 1 << 62)

    def tokenized(
        self,
        tokenizer: Tokenizer,
        split: Split,
        *,
        seq_len: int,
        validation_fraction: float,
        cache_dir: Path,
        progress: Callable[[int], None] | None = None,
        num_proc: int = 1,
    ) -> WeightedDataset:
        """The split as tokens with loss weights, cached as text is; what became of the rows is logged.

        Raises DataError for rows that cannot be used (or too many of them), a template that cannot be masked and a
        training split of which nothing is left; ModelError for a tokenizer without a template.
        """
        limit = self.max_length or seq_len
        if limit > seq_len:
            raise ConfigError(
                f"is more than a row holds (train.seq_len={seq_len}), so conversations would be cut there; "
                "raise train.seq_len or lower it",
                key="max_length",
                value=self.max_length,
            )
        before = self.fingerprint()
        key = [FORMAT, MASK_FORMAT, before, tokenizer.fingerprint(), split, validation_fraction, limit]
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=12).hexdigest()

        def build(folder: Path) -> None:
            try:
                write(WeightedShardWriter(folder, tokenizer.vocab_size))
            except FractionalWeights:
                write(WeightedShardWriter(folder, tokenizer.vocab_size, fractions=True))

        def write(writer: WeightedShardWriter) -> None:
            try:
                report = self._write(tokenizer, split, validation_fraction, limit, writer, progress, num_proc)
                if self.fingerprint() != before:
                    raise DataError(
                        f"source {self.label}: its files changed while they were read; run again when they are complete"
                    )
                writer.close(name=self.label, split=split, report=report.to_dict())
            except BaseException:
                writer.abandon()
                raise

        folder = Path(cache_dir) / f"{self.name}-{split}-{digest}"
        data = build_once(folder, build, WeightedDataset)
        data.name = self.label
        self._tell(data.report, split, limit)
        return data

    def _write(
        self,
        tokenizer: Tokenizer,
        split: Split,
        fraction: float,
        limit: int,
        writer: WeightedShardWriter,
        progress: Callable[[int], None] | None,
        num_proc: int,
    ) -> Report:
        report = Report()

        def items() -> Iterator[Item]:
            for doc in self.documents(split, fraction):
                report.rows += 1
                report.formats[doc.meta["format"]] += 1
                yield doc.id, doc.meta["where"], doc.meta["example"]

        columns: tuple[list[Any], ...] = ([], [], [], [])
        done = 0
        masker = self._masker(tokenizer)
        for (name, _, example), encoded in encode_all(items(), masker, num_proc):
            size = text_bytes(example)
            done += size
            if isinstance(encoded, TrainwrightError):
                # A template that cannot be masked, or none, is no fault of the row.
                if isinstance(encoded, UnstableTemplate) or not isinstance(encoded, DataError):
                    raise encoded
                if not self.skip_bad_rows:
                    raise DataError(f"{encoded} (mend the row, or set skip_bad_rows: true)")
                report.count_bad(encoded)
                continue
            report.spells_special += encoded.spells_special
            report.crossing += encoded.crossing
            short, fate = fit(encoded, limit, self.too_long)
            if fate != "whole":
                setattr(report, fate, getattr(report, fate) + 1)
            if short is None:
                continue
            report.conversations += 1
            report.tokens += len(short.ids)
            report.trained += short.trained
            for note in short.notes:
                setattr(report, note, getattr(report, note) + 1)
            if isinstance(getattr(example, "chosen", example), Conversation):
                report.date = masker.date_written
            for column, value in zip(columns, (short.ids, short.weights, name, size), strict=True):
                column.append(value)
            if len(columns[0]) == GROUP:
                writer.write_weighted(*columns)
                columns = ([], [], [], [])
                if progress is not None:
                    progress(done)
        writer.write_weighted(*columns)
        if progress is not None:
            progress(done)
        for message in self._bad:
            report.count_bad(DataError(message))
        self._judge(report, split, limit)
        return report

    def _judge(self, report: Report, split: Split, limit: int) -> None:
        every = report.rows + len(self._bad)
        if report.bad > self.max_bad_rows * every:
            listed = "\n  ".join(report.bad_samples)
            raise DataError(
                f"source {self.label}: {report.bad} of {every} rows cannot be used, more than "
                f"max_bad_rows={self.max_bad_rows:g}:\n  {listed}"
            )
        if split == "train" and not report.conversations:
            raise DataError(f"source {self.label}: no conversation is left ({describe(report.to_dict(), limit)})")

    def _tell(self, report: dict[str, Any], split: Split, limit: int) -> None:
        if not report.get("rows"):
            return
        lost = "cut", "dropped", "cut_before_answer", "untrained", "bad"
        odd = "empty_answer", "left_out", "parted", "prompt_guessed"
        told = any(report.get(k) for k in (*lost, *odd))
        say = log.warning if told else log.info
        say("source %s, %s: %s", self.label, split, describe(report, limit))
