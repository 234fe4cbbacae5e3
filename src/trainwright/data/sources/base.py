"""What every data source offers: a stream of documents with stable ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from trainwright.core.registry import MethodConfig

Split = Literal["train", "validation"]


@dataclass
class Document:
    text: str
    id: str  # stable over runs: path, or path:line
    meta: dict[str, Any] = field(default_factory=dict)


class SourceConfig(MethodConfig):
    """Base of data-source configs."""

    weight: PositiveFloat | None = Field(
        None, description="Share of training rows relative to the other sources; unset everywhere = natural sizes."
    )
    up_sample: PositiveFloat = Field(
        1.0,
        description="Uses of each training document in an epoch; 2.5: two or three, 0.1: a tenth of them is used.",
    )

    licence: str | None = Field(
        None,
        min_length=1,
        description="Licence of those documents that name none themselves, as an SPDX identifier such as CC-BY-4.0; "
        "data.licences and `trainwright data card` go by it.",
    )

    # Settings that say how much of a source is used and not what its documents are: fingerprint() leaves them out.
    outside: ClassVar[frozenset[str]] = frozenset({"weight", "up_sample", "licence"})

    @abstractmethod
    def documents(self, split: Split, validation_fraction: float) -> Iterator[Document]:
        """Stream one split in a fixed order. The split of a document depends on its id alone, so it never moves.

        Raises DataError naming file and line for missing, empty, binary or malformed input.
        """

    def on_disk(self) -> tuple[int, int] | None:
        """Number and bytes of the files that it reads, by looking and without reading; None where it reads none.

        Raises DataError for a path that is not there.
        """
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Cheap hash that changes when the input changes (files: path, size, mtime_ns), or a setting that matters."""
