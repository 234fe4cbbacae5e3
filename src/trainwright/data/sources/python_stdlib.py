"""The standard library of the running Python: real code and English that needs no download."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.sources._files import SourceFile, hash_json, stat_files
from trainwright.data.sources._split import SplitSource
from trainwright.data.sources.base import Document, Split

_TESTS = {"test", "tests", "idle_test"}
# A tenth of the library are generated code pages, near-copies of each other. A model knows them by heart at once, and
# the few that fall into the validation split would make its loss look far better than it is on code.
_TABLE = "Character Mapping Codec"
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@register("source", "python_stdlib")
class PythonStdlibSource(SplitSource):
    """Sources and docstrings of the running Python's own standard library, some 11 MB; a file is a document.

    Ids are paths below the library's folder. What differs between builds of one version (site-packages, configuration
    modules made by the build, site customisation) is left out, and so are the generated code pages in encodings/.
    """

    include_tests: bool = Field(False, description="Also the library's own test-suites: some 20 MB more.")

    def files(self) -> list[SourceFile]:
        """The modules, sorted by path. Raises DataError where this Python has no library of source files."""
        root = Path(sysconfig.get_path("stdlib"))
        files = []
        for current, folders, names in os.walk(root):
            folders[:] = [f for f in folders if self._wanted_folder(f)]
            for name in names:
                if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize")):
                    path = Path(current, name)
                    files.append(SourceFile(path, path.relative_to(root).as_posix()))
        if not files:
            raise DataError(
                f"source python_stdlib: {root} holds no .py files; this Python comes without its library's sources: "
                f"use another Python or another source (text, jsonl, parquet, hf)"
            )
        return sorted(files, key=lambda f: f.id)

    def on_disk(self) -> tuple[int, int]:
        files = self.files()
        return len(files), sum(size for _, _, size, _ in stat_files(files))

    def _wanted_folder(self, name: str) -> bool:
        if name in _NOT_THE_LIBRARY or name.startswith(("config-", ".")):
            return False
        return self.include_tests or name not in _TESTS

    def _stream(self, split: Split | None) -> Iterator[Document]:
        for file in self.files():
            try:
                data = file.path.read_bytes()
            except OSError as error:
                raise DataError(f"{file.path}: cannot be read ({error.strerror})") from error
            try:
                encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
                text = data.decode(encoding)
            except (SyntaxError, UnicodeDecodeError):
                # The test-suites hold modules with a deliberately wrong encoding.
                self._bad_rows += 1
                continue
            if file.id.startswith("encodings/") and _TABLE in text[:200]:
                continue
            yield Document(text, file.id)

    def fingerprint(self) -> str:
        return hash_json("python_stdlib", 2, sys.version, self.include_tests, stat_files(self.files()))
