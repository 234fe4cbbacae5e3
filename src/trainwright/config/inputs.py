"""Whether what a recipe reads is there: the files of its sources, the folders of its model and tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainwright.config.run_config import RunConfig
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import MethodConfig, build
from trainwright.data.sources.base import Document, SourceConfig

T = TypeVar("T")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.*", "tekken.json")


def check_inputs(config: RunConfig) -> None:
    """Looks and reads nothing. Raises ConfigError or DataError with the recipe's key for what is missing."""
    _check_model(config)
    for number, source in enumerate(config.data.sources):
        _named(number, source.on_disk)


def look(config: RunConfig) -> list[str]:
    """As :func:`check_inputs`, and reads the first document of each source of files, and the tokenizer of a folder.

    Returns a line for each: what was found.
    """
    check_inputs(config)
    lines = []
    spec = _folder_tokenizer(config)
    if spec is not None:
        ids = spec.build(lambda: iter(()), config.data.cache()).vocab_size  # type: ignore[attr-defined]
        lines.append(f"tokenizer: {ids:,} ids, of {spec.path}")  # type: ignore[attr-defined]
    for number, source in enumerate(config.data.sources):
        label = getattr(source, "label", source.name)
        disk = source.on_disk()
        if disk is None:
            lines.append(f"data.sources.{number} ({label}): not looked at before training")
            continue
        first = _named(number, partial(_first, source))
        files, size = disk
        found = f"{files:,} file{'s' if files != 1 else ''}, {_bytes(size)}"
        lines.append(f"data.sources.{number} ({label}): {found}" + (f"; first document {first.id}" if first else ""))
    return lines


def _first(source: SourceConfig) -> Document | None:
    return next(iter(source.documents("train", 0.0)), None)


def _check_model(config: RunConfig) -> None:
    path = getattr(config.model, "path", None)
    if isinstance(path, str) and not (Path(path) / "config.json").is_file():
        there = Path(path)
        if there.is_dir():
            why = "is not a Hugging Face model folder: it has no config.json"
        elif there.exists():
            why = "is a file; give the Hugging Face model folder that holds it"
        elif path.startswith("~"):
            why = "does not exist: ~ is the shell's; write the folder in full"
        elif path.count("/") == 1 and not path.startswith((".", "/")):
            name = path.rpartition("/")[2]
            why = (
                f"does not exist (looked in {Path.cwd()}). Of the Hugging Face hub: "
                f"`hf download {path} --local-dir models/{name}`, then model.path: models/{name}"
            )
        else:
            why = f"does not exist (looked in {Path.cwd()}); give a Hugging Face model folder"
        raise ConfigError(why, key="model.path", value=path)
    spec = _folder_tokenizer(config)
    if spec is None:
        return
    path = str(spec.path)  # type: ignore[attr-defined]
    folder = Path(path).expanduser()
    own = config.tokenizer is not None
    if not folder.is_dir():
        raise ConfigError(
            f"is not a folder (looked in {Path.cwd()}); give one that holds tokenizer.json",
            key="tokenizer.path" if own else "model.path",
            value=path,
        )
    if not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"{path} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); "
            + ("name another folder" if own else "name one: {name: hf, path: FOLDER}, or {name: bpe}"),
            key="tokenizer",
        )


def _folder_tokenizer(config: RunConfig) -> MethodConfig | None:
    """The tokenizer where it is that of a folder; see :func:`tokenizer_spec`."""
    spec = tokenizer_spec(config)
    return spec if spec.name == "hf" else None


def tokenizer_spec(config: RunConfig) -> MethodConfig:
    """The recipe's tokenizer: as named there, else that of the model's folder, else a BPE trained on the data."""
    if config.tokenizer is not None:
        return config.tokenizer
    path = config.model.tokenizer_path()
    return build("tokenizer", {"name": "hf", "path": path} if path else {"name": "bpe"})


def _named(number: int, look: Callable[[], T]) -> T:
    """What ``look()`` returns; its errors carry the key of the source."""
    key = f"data.sources.{number}"
    try:
        return look()
    except ConfigError as error:
        raise error.under(key) from None
    except DataError as error:
        message = str(error)
        if not message.startswith(("path:", "validation_path:")):
            raise DataError(f"{key}: {message}") from None
        raise DataError(f"{key}.{message}") from None


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
