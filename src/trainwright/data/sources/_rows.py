"""Sources made of rows with a text field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from trainwright.core.errors import DataError, nearest
from trainwright.data.sources._files import checked_text
from trainwright.data.sources._split import SplitSource
from trainwright.data.sources.base import Document, Split

ENOUGH_ROWS = 1000  # before that a share of bad rows says nothing
SAMPLES = 5  # bad rows that a message quotes


class RowOptions(SplitSource):
    """Fields that all row-wise sources share."""

    text_key: str = Field("text", min_length=1, description="Field or column that holds the document's text.")
    meta_keys: list[str] = Field(
        [], description="Further fields to carry along in Document.meta; missing ones are left out."
    )
    skip_bad_rows: bool = Field(
        False, description="Skip and count rows that are malformed or have no text, instead of stopping at the first."
    )
    max_bad_rows: float = Field(
        0.1, ge=0, le=1, description="Share of unusable rows above which skip_bad_rows stops all the same."
    )

    not_content: ClassVar[frozenset[str]] = frozenset({"max_bad_rows"})
    _rows: int = PrivateAttr(0)
    _bad_samples: list[str] = PrivateAttr(default_factory=list)

    @property
    def bad_samples(self) -> list[str]:
        """What was wrong with the first rows that the last pass skipped."""
        return list(self._bad_samples)

    def _filled(self, split: Split | None) -> Iterator[Document]:
        self._rows, self._bad_samples = 0, []
        yield from super()._filled(split)
        self._judge_bad_rows()

    def _bad_row(self, error: DataError) -> None:
        """A row that cannot be used: raises ``error``, or counts it; a DataError where these are too many."""
        if not self.skip_bad_rows:
            raise error
        self._bad_rows += 1
        self._rows += 1
        if len(self._bad_samples) < SAMPLES:
            self._bad_samples.append(str(error))
        if self._rows >= ENOUGH_ROWS:
            self._judge_bad_rows()

    def _judge_bad_rows(self) -> None:
        if self._bad_rows > self.max_bad_rows * self._rows:
            listed = "\n  ".join(self._bad_samples)
            raise DataError(
                f"source {self.label}: {self._bad_rows} of {self._rows} rows cannot be used, more than "
                f"max_bad_rows={self.max_bad_rows:g}:\n  {listed}"
            )

    def _usable(self, row: Any, where: str) -> str | None:
        """The row's text; None for a row that is skipped."""
        try:
            text = self._text(row, where)
        except DataError as error:
            self._bad_row(error)
            return None
        self._rows += 1
        return text

    def _text(self, row: Any, where: str) -> str:
        """The row's text; DataError where there is none, or ``row`` is one itself."""
        if isinstance(row, DataError):
            raise row
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object with the field {self.text_key!r}, got {_kind(row)}")
        if self.text_key not in row:
            raise missing_key(self.text_key, row, where)
        text = row[self.text_key]
        if not isinstance(text, str):
            if isinstance(text, list) and (hint := _conversations([self.text_key])):
                raise DataError(f"{where}: field {self.text_key!r} is a list, not a string; {hint}")
            raise DataError(
                f"{where}: field {self.text_key!r} is {_kind(text)}, not a string; choose another text_key, mend the "
                f"row, or set skip_bad_rows: true"
            )
        return checked_text(text, where)

    def _meta(self, row: dict[str, Any]) -> dict[str, Any]:
        return {k: row[k] for k in self.meta_keys if k in row}


def missing_key(key: str, available: Iterable[str], where: str) -> DataError:
    names = [str(a) for a in available]
    if hint := _conversations(names):
        return DataError(f"{where}: no field {key!r}; available fields: {', '.join(names)}; {hint}")
    guess = nearest(key, names)
    hint = f"; {guess}" if guess.startswith("did you mean") else ""
    return DataError(f"{where}: no field {key!r}; available fields: {', '.join(names) or 'none'}{hint} (set text_key)")


def _conversations(names: Sequence[str]) -> str:
    """The way out where fields of these names look like conversations or instructions; else empty."""
    from trainwright.data.chat.conversation import KEYS

    for kind, groups in KEYS.items():
        if all(any(name in names for name in group) for group in groups):
            return f"these look like {kind} rows: read them by {{name: chat, path: ...}}, with objective: sft"
    return ""


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {
        dict: "an object",
        list: "a list",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
    }.get(type(value), type(value).__name__)
