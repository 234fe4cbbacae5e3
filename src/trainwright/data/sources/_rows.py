"""Sources made of rows with a text field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from trainwright.core.errors import DataError, nearest
from trainwright.data.sources._files import checked_text


class RowOptions(BaseModel):
    """Fields that all row-wise sources share."""

    text_key: str = Field("text", min_length=1, description="Field or column that holds the document's text.")
    meta_keys: list[str] = Field(
        [], description="Further fields to carry along in Document.meta; missing ones are left out."
    )
    skip_bad_rows: bool = Field(
        False, description="Skip and count rows that are malformed or have no text, instead of stopping at the first."
    )

    def _text(self, row: Any, where: str) -> str:
        """The row's text; DataError where there is none."""
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object with the field {self.text_key!r}, got {_kind(row)}")
        if self.text_key not in row:
            raise missing_key(self.text_key, row, where)
        text = row[self.text_key]
        if not isinstance(text, str):
            raise DataError(
                f"{where}: field {self.text_key!r} is {_kind(text)}, not a string; choose another text_key, mend the "
                f"row, or set skip_bad_rows: true"
            )
        return checked_text(text, where)

    def _meta(self, row: dict[str, Any]) -> dict[str, Any]:
        return {k: row[k] for k in self.meta_keys if k in row}


def missing_key(key: str, available: Iterable[str], where: str) -> DataError:
    names = [str(a) for a in available]
    guess = nearest(key, names)
    hint = f"; {guess}" if guess.startswith("did you mean") else ""
    return DataError(f"{where}: no field {key!r}; available fields: {', '.join(names) or 'none'}{hint} (set text_key)")


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
