"""Anything that gives a text a number, behind one call: ``scorer(texts) -> one float each``.

``load_scorer`` takes a callable as it is, or a name:

    FOLDER                  a model of ours, or a Hugging Face folder of a sequence classifier
    FILE.bin, FILE.ftz      a fastText model, such as the published ones (package fasttext-predict)
    module:function         a callable that can be imported
    hf:NAME, fasttext:FILE  the same, said outright; ``#LABEL`` behind chooses the class whose probability is the score

A scorer may say the scale of its scores by ``low`` and ``high``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.quality.hashed import CONFIG, load_hashed
from trainwright.data.build.quality.normalize import normalize_line
from trainwright.data.sources._files import need

Scorer = Callable[[Sequence[str]], Sequence[float]]


class FastTextScorer:
    """Probability of one label of a fastText model; texts get the same normal form as for our own classifier.

    label: without ``__label__``; None: the only one, or the one named 1, pos, positive, hq or good. split: the
    tokenizer that the model was trained behind, None for words. Needs one of the packages that are imported as
    ``fasttext``; ``fasttext-predict`` has wheels and needs nothing else.
    """

    low, high = 0.0, 1.0

    def __init__(self, path: str | Path, label: str | None = None, split: Callable[[str], list[str]] | None = None):
        try:
            import fasttext
        except ModuleNotFoundError:
            raise need("fasttext-predict", "data") from None
        if not Path(path).is_file():
            raise DataError(f"{path}: there is no such fastText model")
        fasttext.FastText.eprint = lambda *a: None
        try:
            self._model = fasttext.load_model(str(path))
        except ValueError as error:
            raise DataError(f"{path}: is no fastText model ({error})") from None
        self.split = split
        # Asked by predicting, since the package that only predicts has no other way to name them.
        known = sorted(name.removeprefix("__label__") for _, name in self._ask("a"))
        if not known:
            raise DataError(f"{path}: predicts no label; it is no supervised model")
        usual = [n for n in known if n.lower() in ("1", "pos", "positive", "hq", "good")]
        wanted = label if label is not None else (usual or known)[0]
        if wanted not in known or (label is None and len(known) > 1 and len(usual) != 1):
            raise ConfigError(f"should be one of {', '.join(known)}", key="label", value=label)
        self.label = wanted

    def _ask(self, line: str) -> list[tuple[float, str]]:
        # The inner call: the outer one of the older packages fails under NumPy 2.
        return list(self._model.f.predict(line + "\n", -1, 0.0, "strict"))

    def __call__(self, texts: Sequence[str]) -> list[float]:
        out = []
        for text in texts:
            found = self._ask(normalize_line(text, split=self.split))
            out.append(next((float(p) for p, name in found if name == f"__label__{self.label}"), 0.0))
        return out


class HfScorer:
    """A sequence classifier of ``transformers``: its one output, or the probability of ``label`` (default: the last).

    low, high: the scale of a single output; the usual education scorers give 0..5.
    """

    def __init__(
        self,
        path: str | Path,
        label: str | int | None = None,
        *,
        low: float = 0.0,
        high: float = 5.0,
        batch_size: int = 32,
        max_tokens: int = 512,
        device: str | None = None,
    ):
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ModuleNotFoundError:
            raise need("transformers", "hf") from None
        from trainwright.core.distributed import default_device

        self.device = device or default_device()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(path).eval().to(self.device)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: cannot be loaded as a sequence classifier ({str(error).splitlines()[0]})"
            ) from None
        self.batch_size, self.max_tokens = batch_size, max_tokens
        names = {str(v): int(k) for k, v in self._model.config.id2label.items()}
        self._single = len(names) == 1
        self.low, self.high = (low, high) if self._single else (0.0, 1.0)
        place = len(names) - 1 if label is None else names.get(str(label), label)
        if not str(place).isdigit() or int(place) >= len(names):
            raise ConfigError(f"should be one of {', '.join(names)}", key="label", value=label)
        self._place = int(place)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        import torch

        out: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(texts), self.batch_size):
                batch = self._tokenizer(
                    list(texts[start : start + self.batch_size]), return_tensors="pt", padding=True, truncation=True,
                    max_length=self.max_tokens,
                )  # fmt: skip
                logits = self._model(**batch.to(self.device)).logits.float()
                values = logits[:, 0] if self._single else logits.softmax(-1)[:, self._place]
                out += values.tolist()
        return out


def load_scorer(spec: str | Path | Scorer) -> Scorer:
    """The scorer that ``spec`` names; see the module. Raises ConfigError and DataError."""
    if callable(spec):
        return spec
    name = str(spec)
    kind, colon, rest = name.partition(":")
    if colon and kind in ("hf", "fasttext"):
        place, _, label = rest.partition("#")
        return HfScorer(place, label or None) if kind == "hf" else FastTextScorer(place, label or None)
    path = Path(name)
    if path.is_dir():
        try:
            about = json.loads((path / CONFIG).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: holds no model ({error})") from None
        return load_hashed(path) if "trainwright_quality" in about else HfScorer(path)
    if name.partition("#")[0].endswith((".bin", ".ftz")):
        file, _, label = name.partition("#")
        return FastTextScorer(file, label or None)
    if colon and rest.isidentifier() and all(p.isidentifier() for p in kind.split(".")):
        try:
            found = getattr(importlib.import_module(kind), rest)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot be imported ({error})", key="model", value=name) from None
        if not callable(found):
            raise ConfigError("is no callable", key="model", value=name)
        return found  # type: ignore[no-any-return]
    raise ConfigError(
        "names no scorer; give a folder of a model, a fastText file (.bin, .ftz), or module:function",
        key="model",
        value=name,
    )


def scored(scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """One finite number a text. Raises DataError for anything else that a scorer answers."""
    values = [float(v) for v in scorer(texts)]
    if len(values) != len(texts):
        raise DataError(f"the scorer gave {len(values)} scores for {len(texts)} texts")
    if any(v != v or abs(v) == float("inf") for v in values):
        raise DataError("the scorer gave a score that is not finite")
    return values
