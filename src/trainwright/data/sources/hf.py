"""Datasets of the Hugging Face `datasets` library: saved folders, data repositories on disk, or hub ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.sources._files import SourceFile, _walk, find_files, hash_json, need, stat_files
from trainwright.data.sources._rows import RowOptions, missing_key
from trainwright.data.sources.base import Document, Split

BATCH_ROWS = 256
# What load_dataset calls the reader of a file type.
_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}


@register("source", "hf")
class HfSource(RowOptions):
    """A Hugging Face `datasets` folder (save_to_disk or a data repository), data files, or a hub id.

    Ids are ``split:row``. Rows come from memory-mapped Arrow or as a stream; nothing is loaded whole.
    """

    path: str | list[str] = Field(
        description="Folder written by save_to_disk, folder or files (globs) that load_dataset reads, or a hub id "
        "(owner/name)."
    )
    split: str = Field("train", min_length=1, description="Split of the dataset to read.")
    validation_split: str | None = Field(
        None, description="Split of the dataset that is our validation split; null: held out of `split` by hash."
    )
    config_name: str | None = Field(None, description="Configuration (subset) of a hub dataset or data repository.")
    revision: str | None = Field(None, description="Commit, tag or branch of a hub dataset; pin it to be reproducible.")
    streaming: bool = Field(True, description="Stream a hub dataset instead of downloading it first.")

    @field_validator("path", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [os.fspath(v) if isinstance(v, os.PathLike) else v for v in value]
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @property
    def label(self) -> str:
        return f"{self.name}:{self.path if isinstance(self.path, str) else ','.join(self.path)}"

    def _has_validation(self) -> bool:
        return self.validation_split is not None

    def _folder(self) -> Path | None:
        folder = Path(self.path).expanduser() if self.path and isinstance(self.path, str) else None
        return folder if folder is not None and folder.is_dir() else None

    def _is_hub_id(self) -> bool:
        """Whether the path can be a hub id: ``name`` or ``owner/name``, and nothing of that name is here."""
        if not isinstance(self.path, str) or Path(self.path).expanduser().exists():
            return False
        parts = self.path.split("/")
        plain = all(p and p.replace("-", "").replace("_", "").replace(".", "").isalnum() for p in parts)
        return len(parts) == 2 and plain and not parts[0].startswith(".") and Path(self.path).suffix not in _BUILDERS

    def _files(self) -> list[SourceFile]:
        folder = self._folder()
        if folder is not None:
            files = sorted(_walk(folder))
            if not files:
                raise DataError(f"path: folder {folder} is empty")
            return [SourceFile(f, f.relative_to(folder).as_posix()) for f in files]
        return find_files(self.path, tuple(_BUILDERS))

    def on_disk(self) -> tuple[int, int] | None:
        if self._is_hub_id():
            return None
        files = self._files()
        return len(files), sum(size for _, _, size, _ in stat_files(files))

    def _dataset(self, split: str) -> Any:
        try:
            import datasets
        except ModuleNotFoundError:
            raise need("datasets", "hf") from None
        folder = self._folder()
        try:
            if folder is not None and (folder / "dataset_dict.json").exists():
                return self._pick(datasets.load_from_disk(str(folder)), split)
            if folder is not None and (folder / "state.json").exists():
                return datasets.load_from_disk(str(folder))
            if folder is not None:
                self._files()
                return datasets.load_dataset(str(folder), self.config_name, split=split, streaming=True)
            if self._is_hub_id():
                return datasets.load_dataset(
                    self.path, self.config_name, split=split, revision=self.revision, streaming=self.streaming
                )
            paths = [str(f.path) for f in find_files(self.path, tuple(_BUILDERS))]
            return datasets.load_dataset(self._builder(paths), data_files={split: paths}, split=split, streaming=True)
        except DataError:
            raise
        except Exception as error:  # datasets raises a type of its own for nearly every cause
            if self._is_hub_id():
                raise DataError(
                    f"path: {self.path} is no folder here and could not be loaded from the hub ({_first_line(error)})"
                ) from error
            raise DataError(f"{self.label}: cannot be read as a dataset ({_first_line(error)})") from error

    def other_splits(self, split: str) -> dict[str, int]:
        """Rows of the other splits that a folder of save_to_disk holds."""
        folder = self._folder()
        if folder is None or not (folder / "dataset_dict.json").exists():
            return {}
        import datasets

        found = datasets.load_from_disk(str(folder))
        return {str(name): len(rows) for name, rows in found.items() if name != split}

    def _pick(self, found: Any, split: str) -> Any:
        if split not in found:
            raise DataError(f"{self.label}: no split {split!r}; its splits: {', '.join(found)} (set split)")
        return found[split]

    def _builder(self, paths: list[str]) -> str:
        kinds = {next((s for s in Path(p).suffixes if s in _BUILDERS), Path(p).suffix) for p in paths}
        if len(kinds) != 1 or not kinds <= set(_BUILDERS):
            raise DataError(
                f"{self.label}: files should be of one type among {', '.join(_BUILDERS)}, "
                f"got {', '.join(sorted(kinds))}"
            )
        return _BUILDERS[kinds.pop()]

    def _stream(self, split: Split | None) -> Iterator[Document]:
        name = self.validation_split if split == "validation" and self.validation_split else self.split
        where = f"{self.label} split {name}"
        dataset = self._dataset(name)
        names = dataset.column_names
        if names is not None:
            if self.text_key not in names:
                raise missing_key(self.text_key, names, where)
            dataset = dataset.select_columns(dict.fromkeys([self.text_key, *(k for k in self.meta_keys if k in names)]))
        number = 0
        for batch in self._batches(dataset, where):
            columns = list(batch)
            for values in zip(*batch.values(), strict=True):
                row = dict(zip(columns, values, strict=True))
                row_where, doc_id = f"{where}: row {number}", f"{name}:{number}"
                number += 1
                text = self._usable(row, row_where)
                if text is not None:
                    yield Document(text, doc_id, self._meta(row))

    def _batches(self, dataset: Any, where: str) -> Iterator[dict[str, list[Any]]]:
        batches = iter(dataset.iter(batch_size=BATCH_ROWS))
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"{where}: cannot be read ({_first_line(error)})") from error
            yield batch

    def fingerprint(self) -> str:
        settings = self.model_dump(mode="json", exclude={"path", "streaming", *self.outside, *self.not_content})
        if self._is_hub_id():
            return hash_json(settings, self.path, self._hub_commit())
        return hash_json(settings, stat_files(self._files()))

    def _hub_commit(self) -> str:
        """Commit that the hub has now; without a network, the one that was last seen here."""
        try:
            import huggingface_hub
            from huggingface_hub import constants
        except ModuleNotFoundError:
            raise need("datasets", "hf") from None
        hub_id = str(self.path)
        revision = self.revision or "main"
        try:
            return str(huggingface_hub.HfApi().dataset_info(hub_id, revision=revision, timeout=10).sha)
        except Exception as error:  # no network, offline mode, or no such dataset: told apart by what is cached
            ref = Path(constants.HF_HUB_CACHE) / f"datasets--{hub_id.replace('/', '--')}" / "refs" / revision
            if ref.exists():
                return ref.read_text().strip()
            raise DataError(
                f"path: {hub_id} is no folder or file here, and the hub did not answer for it ({_first_line(error)}); "
                f"give a folder, or an id that exists"
            ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
