"""Parquet files, read column-wise in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.sources._files import COMPRESSED, FileSource, SourceFile, arrow_rows, need, parquet_error
from trainwright.data.sources._rows import RowOptions, missing_key
from trainwright.data.sources.base import Document

BATCH_ROWS = 1024


@register("source", "parquet")
class ParquetSource(RowOptions, FileSource):
    """Parquet files, one document a row; ids are ``path:row`` with rows from 0."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def _read(self, file: SourceFile) -> Iterator[Document]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise need("pyarrow", "parquet") from None
        if file.path.suffix.lower() in COMPRESSED:
            raise DataError(
                f"{file.path}: parquet files are packed inside and cannot be read through {file.path.suffix}; unpack it"
            )
        try:
            with pq.ParquetFile(file.path) as reader:
                schema = reader.schema_arrow
                if self.text_key not in schema.names:
                    raise missing_key(self.text_key, schema.names, str(file.path))
                kind = schema.field(self.text_key).type
                kind = kind.value_type if pa.types.is_dictionary(kind) else kind
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                    raise DataError(
                        f"{file.path}: column {self.text_key!r} holds {kind}, not strings; choose another text_key"
                    )
                columns = [self.text_key, *(k for k in self.meta_keys if k in schema.names and k != self.text_key)]
                number = 0
                for batch in reader.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                    for row in arrow_rows(batch):
                        where = f"{file.path}: row {number}"
                        doc_id = f"{file.id}:{number}"
                        number += 1
                        if isinstance(row, UnicodeDecodeError):
                            self._bad_row(DataError(f"{where}: not UTF-8 text ({row.reason})"))
                            continue
                        text = self._usable(row, where)
                        if text is not None:
                            yield Document(text, doc_id, self._meta(row))
        except (pa.ArrowException, OSError) as error:
            raise parquet_error(file.path, error) from error
