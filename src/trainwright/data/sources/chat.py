"""Conversations, instructions, completions and preferences, with loss on the answers alone.

Rows are told apart by their keys (data/chat/conversation.py), rendered by the tokenizer's chat template and masked
(data/chat/masks.py). What does not fit, is cut or cannot be used is counted and said, never passed over.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field, PositiveInt, PrivateAttr

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.chat.conversation import Format, parse_row
from trainwright.data.chat.files import read_rows
from trainwright.data.chat.masks import Masker, TooLong, TrainOn
from trainwright.data.chat.source import ExampleSource
from trainwright.data.chat.template import DATE
from trainwright.data.sources._files import FileSource, SourceFile, checked_text
from trainwright.data.sources.base import Document, Split
from trainwright.data.tokenizers.base import Tokenizer


@register("source", "chat")
class ChatSource(ExampleSource, FileSource):
    """Chat and instruction data (messages, ShareGPT, Alpaca, prompt/completion, preferences), loss on answers alone."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")

    format: Format = Field(
        "auto",
        description="messages, sharegpt, alpaca, prompt_completion or preference (its chosen side); auto: by the keys "
        "of each row.",
    )
    train_on: TrainOn = Field("all", description="Answers that are targets: all, or the last of each conversation.")
    train_end_of_turn: bool = Field(
        True,
        description="Train on the end of an answer also where the template's marks leave it out, and put EOS behind "
        "the last one where the template ends it with nothing.",
    )
    date: dt.date = Field(
        DATE,
        description="What day it is to a chat template that writes the date; fixed, so that the same rows give the "
        "same tokens every day.",
    )
    max_length: PositiveInt | None = Field(
        None, description="Most tokens of a conversation; null: what a row holds (train.seq_len)."
    )
    too_long: TooLong = Field(
        "drop",
        description="What happens to longer ones: drop, truncate_left or truncate_right. Each is counted; one that is "
        "cut before its answer is dropped.",
    )
    skip_bad_rows: bool = Field(
        False, description="Skip and count rows that cannot be used, instead of stopping at the first."
    )
    max_bad_rows: float = Field(
        0.1, ge=0, le=1, description="Share of unusable rows above which skip_bad_rows stops all the same."
    )

    _bad: list[str] = PrivateAttr(default_factory=list)
    _formats: Counter[str] = PrivateAttr(default_factory=Counter)

    # -- documents ----------------------------------------------------------------------------------------------

    def _read(self, file: SourceFile) -> Iterator[Document]:
        for number, row in read_rows(file):
            where = f"{file.path}:{number}"
            try:
                if isinstance(row, DataError):
                    raise row
                try:
                    name, example = parse_row(row, self.format)
                    text = checked_text(example.text, where)
                except DataError as error:
                    raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from None
            except DataError as error:
                if not self.skip_bad_rows:
                    raise DataError(f"{error} (mend the row, or set skip_bad_rows: true)") from None
                self._bad_rows += 1
                self._bad.append(str(error))
                continue
            yield Document(text, f"{file.id}:{number}", {"example": example, "format": name, "where": where})

    def _filled(self, split: Split | None) -> Iterator[Document]:
        self._bad = []
        yield from super()._filled(split)

    def _masker(self, tokenizer: Tokenizer) -> Masker:
        return Masker(tokenizer, self.train_on, self.train_end_of_turn, self.date)
