"""A tokenizer run by the `tokenizers` library, and what its kinds have in common."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.core.errors import DataError
from trainwright.data.tokenizers.base import Tokenizer

SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token")


def token_content(entry: Any) -> str | None:
    """A token of tokenizer_config.json, which may be a string or an object with ``content``."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


class FastTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer`` with its special tokens and chat template.

    ``config`` is the content of tokenizer_config.json: it names ``eos_token`` (required), ``bos_token`` and
    ``pad_token`` (EOS pads where it is missing). ``files`` are further files of the folder, kept for :meth:`save`.
    Raises DataError where there is no EOS, or a special token is not in the vocabulary.
    """

    def __init__(self, backend: Any, config: Mapping[str, Any], files: Mapping[str, bytes] | None = None):
        self._files = dict(files or {})
        self._config = dict(config)
        self._take(backend)
        eos = self._special_id("eos_token")
        if eos is None:
            raise DataError(
                "tokenizer: has no eos_token, which must end every document; name one with tokenizer.eos_token"
            )
        self.eos_id = eos
        self.bos_id = self._special_id("bos_token")
        pad = self._special_id("pad_token")
        self.pad_id = eos if pad is None else pad
        self.chat_template = self._config.get("chat_template")
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1

    def _take(self, backend: Any) -> None:
        backend.no_truncation()
        backend.no_padding()
        # Text that spells a special token is text: data cannot end a document or open a chat turn.
        backend.encode_special_tokens = True
        self.backend = backend

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "backend": self.backend.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import tokenizers

        self.__dict__.update(state)
        self._take(tokenizers.Tokenizer.from_str(state["backend"]))

    def _special_id(self, key: str) -> int | None:
        token = token_content(self._config.get(key))
        if token is None:
            return None
        found = self.backend.token_to_id(token)
        if found is None:
            raise DataError(f"tokenizer: {key} {token!r} is not in its vocabulary; name another with tokenizer.{key}")
        return int(found)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The _fast variant leaves out character offsets, which nobody reads here.
        return [
            np.array(e.ids, dtype=np.int32)
            for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_byte_lengths(self) -> np.ndarray:
        """int32 ``[vocab_size]``, from the tokenizer's decoder; see :func:`byte_lengths`."""
        return byte_lengths(json.loads(self.backend.to_str()), self.vocab_size)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.backend.to_str().encode(), digest_size=16)
        digest.update(json.dumps([self.eos_id, self.bos_id, self.pad_id, self.chat_template]).encode())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._check_model_type(folder)
        for name, data in self._files.items():
            (folder / name).write_bytes(data)
        if "tokenizer.json" not in self._files:
            self.backend.save(str(folder / "tokenizer.json"))
        config = dict(self._config)
        for key, entry in self._config.items():
            # Some classes of transformers refuse objects here; tokenizer.json knows the tokens' options anyway.
            if key.endswith("_token") and isinstance(entry, Mapping):
                config[key] = token_content(entry)
        if self.chat_template is not None and "chat_template.jinja" not in self._files:
            config["chat_template"] = self.chat_template
        else:
            config.pop("chat_template", None)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def _check_model_type(self, folder: Path) -> None:
        """Warn where ``folder`` is that of a model for which transformers 5 rebuilds the tokenizer in another way."""
        try:
            kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        except (OSError, ValueError):
            return
        parts = type(self.backend.model).__name__, type(self.backend.decoder).__name__
        if kind == "qwen2" and parts != ("BPE", "ByteLevel"):
            warnings.warn(
                f"tokenizer: transformers makes a byte-level BPE of every tokenizer of a model of type qwen2, but this "
                f"is a {parts[0]}: AutoTokenizer will give other ids; load it with PreTrainedTokenizerFast",
                stacklevel=4,
            )


def hf_config(eos: str, bos: str | None, pad: str | None, chat_template: str | None) -> dict[str, Any]:
    """tokenizer_config.json for a tokenizer of our own, such that transformers takes tokenizer.json as it stands."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        # Never made from text on bytes. Where it is missing, transformers' Qwen2 class adds a token of its own.
        "unk_token": eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    return {k: v for k, v in config.items() if v is not None}


def byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (GPT-2's map)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def _types(part: Any) -> list[Mapping[str, Any]]:
    """A pipeline part of tokenizer.json and, where it is a Sequence, its members."""
    if not isinstance(part, Mapping):
        return []
    members = part.get("decoders") or part.get("pretokenizers") or part.get("normalizers") or []
    return [part, *(m for member in members for m in _types(member))]


def byte_lengths(spec: Mapping[str, Any], size: int) -> np.ndarray:
    """UTF-8 bytes that each id stands for in running text, int32 ``[size]``, from a parsed tokenizer.json.

    Special tokens and unused ids count 0. The rest follows the decoder:

    - byte level (GPT-2, Llama 3, Qwen): one byte a character of the token; exact.
    - SentencePiece style (Llama 2, Mistral, Gemma): the space mark counts as the one byte of a space, a ``<0xNN>``
      byte token as one byte, all else by its UTF-8 length. Sums are exact but for the space that some of these put
      before a text (one byte a document too many) and for what their normaliser changed.
    - WordPiece and word tokenizers: UTF-8 length without the continuation mark. Spaces between words belong to no
      token, so sums fall short by them.

    Added tokens that are not special stand in the text as they are written and count so.
    """
    lengths = np.zeros(size, dtype=np.int32)
    decoders = _types(spec.get("decoder"))
    pre = _types(spec.get("pre_tokenizer"))
    kinds = {d.get("type") for d in decoders}
    byte_level = "ByteLevel" in kinds or any(p.get("type") == "ByteLevel" for p in pre)
    byte_tokens = "ByteFallback" in kinds or bool(spec["model"].get("byte_fallback"))
    marks = {d["replacement"] for d in [*decoders, *pre] if d.get("type") == "Metaspace"}
    marks |= {d["pattern"]["String"] for d in decoders if d.get("type") == "Replace" and d.get("content") == " "}
    continuing = spec["model"].get("continuing_subword_prefix") or ""
    word_end = spec["model"].get("end_of_word_suffix") or ""
    letters = set(byte_alphabet().values())
    for token, index in _vocab(spec["model"]).items():
        if byte_level and letters.issuperset(token):
            lengths[index] = len(token)
        elif byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            lengths[index] = 1
        else:
            for mark in marks:
                token = token.replace(mark, " ")
            if continuing:
                token = token.removeprefix(continuing)
            if word_end and token.endswith(word_end):
                token = token.removesuffix(word_end) + " "
            lengths[index] = len(token.encode())
    unknown = spec["model"].get("unk_token")
    for added in spec.get("added_tokens") or []:
        hidden = added["special"] or added["content"] == unknown
        lengths[added["id"]] = 0 if hidden else len(added["content"].encode())
    return lengths


def _vocab(model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [[piece, score], ...]
        return {entry[0]: i for i, entry in enumerate(vocab)}
    return dict(vocab)
