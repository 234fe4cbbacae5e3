"""Tokenizers compared before a model is trained: what they do to text, and what that costs.

Figures of a tokenizer on held-out text of a language::

    fertility           F = tokens / words                   (words between white space, see below)
    bytes per token     UTF-8 bytes / tokens, and characters per token likewise
    parity(A, B)        tokens of language A / tokens of language B, on the same sentences; 1 is fair
    Renyi efficiency    H_2.5(unigram distribution of the tokens) / log V   (arXiv:2306.16842)
    unused              share of the vocabulary that the text never uses

Training FLOPs of a dense GPT with l layers of width h, s tokens a sequence, B sequences a step, V ids::

    C = 96 B s l h^2 (1 + s / 6h + V / 16lh)   activations recomputed   (Megatron's form, arXiv:2104.04473)
    C = 72 B s l h^2 (1 + s / 6h + V / 12lh)   activations kept
    cost per word = C / (B s) * F

A token of one tokenizer is not a token of another, so costs are compared at equal text, and losses only as
bits per byte: nats per token * tokens / (bytes * ln 2).

Ali et al., "Tokenizer Choice For LLM Training: Negligible or Crucial?", arXiv:2310.08754. As there, fertility and
parity do not tell which model will be better: a report names a best tokenizer only by bits per byte that ``proxy``, a
small training of the user's choice, measured. Chinese, Japanese, Thai, Lao, Khmer, Burmese and Tibetan put no spaces
between words; where most letters are of their scripts, characters are counted in the place of words.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.tokenizers.base import Tokenizer, TokenizerConfig
from trainwright.data.tokenizers.morph_metrics import (
    crossing_rate,
    morphological_consistency,
    morphological_edit_distance,
)
from trainwright.data.tokenizers.segmentation import Segmentation

RENYI_ORDER = 2.5
BATCH_BYTES = 1 << 20
# Tibetan, Thai, Lao, Burmese, Khmer; kana; Han with its extensions.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003134f]"
)
_LETTER = re.compile(r"[^\W\d_]")
# Fewer sentences say little about whether their lengths go together.
_ENOUGH_SENTENCES = 30
_LEAST_CORRELATION = 0.2

Texts = Iterable[str]
Proxy = Callable[[str, Tokenizer], float]


@dataclass(frozen=True)
class ModelDims:
    """The dense model whose training cost is predicted."""

    hidden: int = 2048
    layers: int = 24
    seq_len: int = 2048
    recompute: bool = False  # activations recomputed in the backward pass
    tied: bool = True  # one matrix for input and output embeddings

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError("should be at least 1", key=name, value=getattr(self, name))


def flops_per_token(dims: ModelDims, vocab_size: int) -> float:
    """C / (B s) of the module's formulas: training FLOPs of one token. ``vocab_size`` 0 leaves out the V term."""
    passes = 4 if dims.recompute else 3
    h, depth = dims.hidden, dims.layers
    return passes * 24 * depth * h**2 * (1 + dims.seq_len / (6 * h) + vocab_size / (4 * passes * depth * h))


def flops_per_word(dims: ModelDims, vocab_size: int, fertility: float) -> float:
    return flops_per_token(dims, vocab_size) * fertility


def embedding_parameters(dims: ModelDims, vocab_size: int) -> int:
    return vocab_size * dims.hidden * (1 if dims.tied else 2)


def bits_per_byte(nats_per_token: float, tokens: int, num_bytes: int) -> float:
    """Loss on a text in bits per byte of it: the same however the text was cut into tokens."""
    if num_bytes < 1 or tokens < 1:
        raise ValueError(f"bits per byte of {tokens} tokens and {num_bytes} bytes is undefined")
    return nats_per_token * tokens / (num_bytes * math.log(2))


@dataclass(frozen=True)
class Loss:
    """A model's loss on a text. ``tokenizer`` is the fingerprint of the one that it was measured with."""

    nats_per_token: float
    tokens: int
    num_bytes: int
    tokenizer: str

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nats_per_token, self.tokens, self.num_bytes)


def loss_difference(a: Loss, b: Loss, unit: Literal["bits_per_byte", "nats_per_token"] = "bits_per_byte") -> float:
    """``a`` minus ``b``. Raises ValueError for token losses of two tokenizers, and for losses on texts of two sizes."""
    if a.num_bytes != b.num_bytes:
        raise ValueError(f"losses on texts of {a.num_bytes} and {b.num_bytes} bytes: measure both on the same text")
    if unit == "bits_per_byte":
        return a.bits_per_byte - b.bits_per_byte
    if a.tokenizer != b.tokenizer:
        raise ValueError("a loss per token means another thing with another tokenizer; compare bits_per_byte")
    return a.nats_per_token - b.nats_per_token


@dataclass(frozen=True)
class Figures:
    """What a tokenizer does to the text of one language."""

    texts: int
    bytes: int
    characters: int
    words: int
    word_unit: Literal["word", "character"]
    tokens: int

    @property
    def fertility(self) -> float:
        return self.tokens / self.words

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens

    @property
    def characters_per_token(self) -> float:
        return self.characters / self.tokens


def measure(tokenizer: Tokenizer, texts: Texts, name: str = "texts") -> tuple[Figures, np.ndarray]:
    """Figures of ``texts``, and how often each id occurs, int64 ``[vocab_size]``. Streams.

    Raises DataError where there is no word in them.
    """
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    number = size = characters = words = marks = unspaced = letters = 0
    for batch in _batches(texts):
        for ids in tokenizer.encode_batch(batch):
            counts += np.bincount(ids, minlength=len(counts))
        for text in batch:
            own = text.split()
            number += 1
            size += len(text.encode())
            characters += len(text)
            words += len(own)
            marks += sum(map(len, own))
            unspaced += len(_UNSPACED.findall(text))
            letters += len(_LETTER.findall(text))
    by_character = 2 * unspaced > letters
    tokens = int(counts.sum())
    if not words or not tokens:
        raise DataError(f"tokenizer study: {name} holds no word to measure on; give text")
    unit: Literal["word", "character"] = "character" if by_character else "word"
    return Figures(number, size, characters, marks if by_character else words, unit, tokens), counts


def parity(tokenizer: Tokenizer, a: Sequence[str], b: Sequence[str]) -> float:
    """Tokens of the sentences ``a`` over those of ``b``, their translations in the same order.

    Raises ValueError where they are not parallel: not as many, none, or empty in one language only. Warns where many
    sentences hardly agree in length, which translations do.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"parity is of the same sentences in two languages, but there are {len(a)} and {len(b)}")
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if bool(x.strip()) != bool(y.strip()):
            raise ValueError(f"sentence {i} is empty in one language only: the texts are not parallel")
    lengths = np.log1p(np.array([[len(x) for x in a], [len(y) for y in b]], dtype=np.float64))
    if len(a) >= _ENOUGH_SENTENCES and lengths.std(axis=1).min() > 0.1:
        correlation = float(np.corrcoef(lengths)[0, 1])
        if correlation < _LEAST_CORRELATION:
            warnings.warn(
                f"lengths of the sentences correlate by {correlation:.2f} only: are they translations, in one order?",
                stacklevel=2,
            )
    tokens = [sum(map(len, tokenizer.encode_batch(list(side)))) for side in (a, b)]
    if not all(tokens):
        raise ValueError("parity of texts without tokens is undefined")
    return tokens[0] / tokens[1]


def renyi_efficiency(counts: np.ndarray, vocab_size: int, order: float = RENYI_ORDER) -> float:
    """Renyi entropy of the tokens' distribution over its largest value, log V."""
    p = counts[counts > 0] / counts.sum()
    return float(np.log((p**order).sum()) / (1 - order) / math.log(vocab_size))


@dataclass
class Row:
    """One tokenizer in a report. Costs are of training on all the report's texts, so at equal text."""

    name: str
    vocab_size: int
    languages: dict[str, Figures]
    tokens: int
    bytes_per_token: float
    renyi_efficiency: float
    unused_share: float
    flops: float
    flops_per_word: dict[str, float]
    relative_compute: float  # to the report's first tokenizer
    embedding_parameters: int
    parity: dict[str, float] = field(default_factory=dict)  # language -> tokens over those of the first language
    morphology: dict[str, float] = field(default_factory=dict)
    bits_per_byte: float | None = None  # by the proxy

    def as_dict(self) -> dict[str, Any]:
        out = asdict(self)
        for language, figures in self.languages.items():
            out["languages"][language] |= {
                "fertility": figures.fertility,
                "bytes_per_token": figures.bytes_per_token,
                "characters_per_token": figures.characters_per_token,
            }
        return out


@dataclass
class Report:
    rows: list[Row]
    dims: ModelDims

    @property
    def best(self) -> str | None:
        """The tokenizer with the fewest bits per byte of the proxy; None without one. Never chosen by fertility."""
        measured = [row for row in self.rows if row.bits_per_byte is not None]
        return min(measured, key=lambda r: r.bits_per_byte or 0.0).name if measured else None

    def as_dict(self) -> dict[str, Any]:
        return {"dims": asdict(self.dims), "best": self.best, "rows": [row.as_dict() for row in self.rows]}


def tokenizer_report(
    tokenizers: Mapping[str, Tokenizer],
    corpora: Mapping[str, Texts],
    dims: ModelDims | None = None,
    *,
    parallel: Mapping[str, Sequence[str]] | None = None,
    segmentation: Segmentation | None = None,
    proxy: Proxy | None = None,
) -> Report:
    """Every tokenizer on the held-out texts of every language, with the cost of training a model of ``dims``.

    ``corpora`` maps a language to texts, read once for each tokenizer. ``parallel`` maps languages to the same
    sentences, in the same order; parity is against its first language. With a ``segmentation`` the morphological
    metrics are added. ``proxy(name, tokenizer)`` trains something small and returns its bits per byte.
    Raises DataError for a language without words, ValueError for texts that can be read only once and for sentences
    that are not parallel.
    """
    dims = dims or ModelDims()
    if not tokenizers or not corpora:
        raise ValueError("a report needs at least one tokenizer and one language")
    _read_again(corpora)
    rows: list[Row] = []
    for name, tokenizer in tokenizers.items():
        counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        languages: dict[str, Figures] = {}
        for language, texts in corpora.items():
            languages[language], own = measure(tokenizer, texts, language)
            counts += own
        tokens = int(counts.sum())
        flops = flops_per_token(dims, tokenizer.vocab_size) * tokens
        rows.append(
            Row(
                name,
                tokenizer.vocab_size,
                languages,
                tokens,
                sum(f.bytes for f in languages.values()) / tokens,
                renyi_efficiency(counts, tokenizer.vocab_size),
                float((counts == 0).mean()),
                flops,
                {k: flops_per_word(dims, tokenizer.vocab_size, f.fertility) for k, f in languages.items()},
                flops / rows[0].flops if rows else 1.0,
                embedding_parameters(dims, tokenizer.vocab_size),
                _parities(tokenizer, parallel or {}),
                _morphology(tokenizer, segmentation),
                None if proxy is None else float(proxy(name, tokenizer)),
            )
        )
    return Report(rows, dims)


def train_tokenizers(
    train: Mapping[str, Texts],
    specs: Sequence[Mapping[str, Any]],
    vocab_sizes: Sequence[int],
    cache_dir: Path,
    *,
    held_out: Mapping[str, Texts] | None = None,
    mixes: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Tokenizer]:
    """Every tokenizer of ``specs`` (as in a recipe) at every size, trained on every mix of languages.

    ``mixes`` names groups of the languages of ``train``; default: one of all. Languages of a mix take turns, text by
    text. Names are ``algorithm-size``, with the mix in front where there are several.
    Raises DataError where one of the ``held_out`` texts is also trained on, and ConfigError for a size that the
    tokenizer refuses.
    """
    mixes = mixes or {"all": list(train)}
    for mix, languages in mixes.items():
        unknown = [k for k in languages if k not in train]
        if unknown or not languages:
            raise ConfigError(f"names {unknown or 'no language'}; known: {', '.join(train)}", key=f"mixes.{mix}")
    _read_again(train)
    kept_out = {text for texts in (held_out or {}).values() for text in texts}
    for language, texts in train.items():
        if kept_out and any(text in kept_out for text in texts):
            raise DataError(f"tokenizer study: a held-out text is among the training texts of {language}")
    tokenizers: dict[str, Tokenizer] = {}
    for (mix, languages), spec, size in itertools.product(mixes.items(), specs, vocab_sizes):
        config = registry.build("tokenizer", {**spec, "vocab_size": size})
        assert isinstance(config, TokenizerConfig)
        name = f"{config.name}-{size}" if len(mixes) == 1 else f"{mix}-{config.name}-{size}"
        while name in tokenizers:  # one algorithm twice, with other settings
            name += "'"
        tokenizers[name] = config.build(partial(_in_turn, [train[k] for k in languages]), cache_dir)
    return tokenizers


def vocabulary_study(
    train: Mapping[str, Texts],
    held_out: Mapping[str, Texts],
    specs: Sequence[Mapping[str, Any]],
    vocab_sizes: Sequence[int],
    cache_dir: Path,
    dims: ModelDims | None = None,
    *,
    mixes: Mapping[str, Sequence[str]] | None = None,
    **report: Any,
) -> Report:
    """:func:`train_tokenizers`, then :func:`tokenizer_report` on ``held_out``, to which ``report`` goes."""
    _read_again(held_out)
    tokenizers = train_tokenizers(train, specs, vocab_sizes, cache_dir, held_out=held_out, mixes=mixes)
    return tokenizer_report(tokenizers, held_out, dims, **report)


def _read_again(corpora: Mapping[str, Texts]) -> None:
    for language, texts in corpora.items():
        if isinstance(texts, Iterator):
            raise ValueError(
                f"the texts of {language} can be read only once; give a list, or an object to iterate anew"
            )


def _in_turn(streams: Iterable[Texts]) -> Iterator[str]:
    waiting = [iter(texts) for texts in streams]
    while waiting:
        for stream in list(waiting):
            text = next(stream, None)
            if text is None:
                waiting.remove(stream)
            else:
                yield text


def _batches(texts: Texts) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parities(tokenizer: Tokenizer, parallel: Mapping[str, Sequence[str]]) -> dict[str, float]:
    languages = list(parallel)
    return {k: parity(tokenizer, parallel[k], parallel[languages[0]]) for k in languages}


def _morphology(tokenizer: Tokenizer, segmentation: Segmentation | None) -> dict[str, float]:
    if segmentation is None:
        return {}
    return {
        "edit_distance": morphological_edit_distance(tokenizer, segmentation),
        "consistency": morphological_consistency(tokenizer, segmentation).f1,
        "crossing_rate": crossing_rate(tokenizer, segmentation),
    }
