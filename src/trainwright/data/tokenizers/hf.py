"""Tokenizers from Hugging Face folders, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.tokenizers._fast import SPECIAL_KEYS, FastTokenizer, token_content
from trainwright.data.tokenizers._slow import load_slow
from trainwright.data.tokenizers.base import Tokenizer, TokenizerConfig
from trainwright.data.tokenizers.bytes import ByteTokenizer, byte_spec

# Kept as they are when the tokenizer is saved again.
_COMPANIONS = (
    "tokenizer.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_SLOW = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json", "sentencepiece.bpe.model")


def load_tokenizer(folder: str | Path, **tokens: str | None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (a model's or one that :meth:`Tokenizer.save` wrote).

    Reads tokenizer.json through the `tokenizers` library; folders with slow files only go through transformers.
    ``eos_token``, ``bos_token``, ``pad_token`` and ``chat_template`` override the folder's.
    Raises DataError where the folder has no tokenizer, is damaged, or names no EOS.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise DataError(f"tokenizer: {folder} is not a folder; give one that holds tokenizer.json")
    overrides = {k: v for k, v in tokens.items() if v is not None}
    if not (folder / "tokenizer.json").is_file():
        if any((folder / name).is_file() for name in _SLOW) or _config(folder).get("tokenizer_class"):
            return load_slow(folder, overrides)
        raise DataError(
            f"tokenizer: {folder} holds no tokenizer.json and no slow tokenizer's files ({', '.join(_SLOW)})"
        )
    files = {n: (folder / n).read_bytes() for n in _COMPANIONS if (folder / n).is_file()}
    config = {**_config(folder), **overrides}
    small = len(files["tokenizer.json"]) < 1 << 16  # parsing the large ones takes a while
    if (
        small
        and _json(folder / "tokenizer.json") == byte_spec()
        and tuple(token_content(config.get(k)) for k in SPECIAL_KEYS) == ("<bos>", "<eos>", "<pad>")
    ):
        return ByteTokenizer(config.get("chat_template"))
    if "chat_template" in overrides:
        files.pop("chat_template.jinja", None)
    return FastTokenizer(_backend(folder, files["tokenizer.json"], config), config, files)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DataError(f"tokenizer: {path} is damaged ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"tokenizer: {path} should hold a JSON object")
    return value


def _config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed from its companion files as transformers does."""
    config = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if (folder / "special_tokens_map.json").is_file():
        config = {**_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in template}
        config["chat_template"] = named.get("default", next(iter(named.values()), None))
    if (folder / "chat_template.jinja").is_file():
        config["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif (folder / "chat_template.json").is_file():
        config["chat_template"] = _json(folder / "chat_template.json").get("chat_template")
    return config


def _backend(folder: Path, data: bytes, config: dict[str, Any]) -> Any:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"tokenizer: {folder / 'tokenizer.json'} cannot be read ({error})") from error
    # Tokens that only tokenizer_config.json names; transformers adds them on loading, in the order of their ids.
    added = config.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(i), entry) for i, entry in added.items()):
        if backend.id_to_token(index) == entry["content"]:
            continue
        options = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
        token = tokenizers.AddedToken(entry["content"], **options)
        (backend.add_special_tokens if entry.get("special") else backend.add_tokens)([token])
        if backend.token_to_id(entry["content"]) != index:
            raise DataError(
                f"tokenizer: {folder}: tokenizer_config.json gives {entry['content']!r} the id {index}, "
                f"tokenizer.json {backend.token_to_id(entry['content'])}; save it again with transformers"
            )
    return backend


@register("tokenizer", "hf")
class HfTokenizerConfig(TokenizerConfig):
    """A Hugging Face tokenizer folder (tokenizer.json, tokenizer_config.json, chat template), or a hub id."""

    path: str = Field(
        min_length=1, description="Folder of the tokenizer or of a model with one, or a hub id (owner/name)."
    )
    revision: str | None = Field(None, description="Commit, tag or branch where path is a hub id.")
    eos_token: str | None = Field(None, description="Token that ends a document, instead of the folder's own.")
    bos_token: str | None = Field(None, description="Token that opens a text, instead of the folder's own.")
    pad_token: str | None = Field(
        None, description="Padding token, instead of the folder's own; the EOS where neither is set."
    )
    chat_template: str | None = Field(None, description="Jinja chat template, instead of the folder's own.")

    def build(self, corpus: Callable[[], Iterable[str]], cache_dir: Path) -> Tokenizer:
        folder = Path(self.path).expanduser()
        if not folder.exists():
            folder = self._download(folder)
        return load_tokenizer(
            folder,
            eos_token=self.eos_token,
            bos_token=self.bos_token,
            pad_token=self.pad_token,
            chat_template=self.chat_template,
        )

    def _download(self, folder: Path) -> Path:
        if self.path.count("/") != 1 or self.path.startswith((".", "/", "~")):
            raise DataError(f"tokenizer: {folder} does not exist; give a folder that holds tokenizer.json")
        try:
            import huggingface_hub
        except ModuleNotFoundError:
            raise DataError(
                f"tokenizer: {self.path} is no folder here, and hub ids need: pip install 'trainwright[hf]'"
            ) from None
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    self.path,
                    revision=self.revision,
                    allow_patterns=["*token*", "*vocab*", "merges.txt", "*.model", "chat_template*", "tekken.json"],
                )
            )
        except Exception as error:  # no network, no such id, no access: each a type of its own
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"tokenizer: {self.path} is no folder here and could not be loaded from the hub ({first})"
            ) from error
