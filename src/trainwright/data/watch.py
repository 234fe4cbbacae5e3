"""Who is told how far the preparation of data is."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Hears of each piece of work. A piece that is found in the cache begins and never advances."""

    def begin(self, what: str, size: int | None = None) -> None:
        """``what`` begins; ``size`` is that of its files in bytes, where it is known."""

    def advance(self, done: int) -> None:
        """So many bytes of text are done of the piece at hand."""
