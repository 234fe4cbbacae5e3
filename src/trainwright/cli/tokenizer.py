"""``trainwright tokenizer``: train one, study many at several sizes, compare those that exist."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError, InputError
from trainwright.data.tokenizer_study import ModelDims, Proxy, Report, Row, measure, tokenizer_report, train_tokenizers
from trainwright.data.tokenizers.base import Tokenizer

LENGTHS = ("steps", "tokens", "epochs", "seconds")


class SourceTexts:
    """The texts of one split of a file or folder; reads it anew each time."""

    def __init__(self, source: Any, split: str, validation_fraction: float):
        self.source, self.split, self.validation_fraction = source, split, validation_fraction

    def __iter__(self) -> Iterator[str]:
        for document in self.source.documents(self.split, self.validation_fraction):
            yield document.text


def train(recipe: Path | None, overrides: list[str], out: Path) -> None:
    """Train the recipe's tokenizer on the recipe's data and write it to ``out``."""
    from trainwright.cli.output import figures
    from trainwright.config import RunConfig
    from trainwright.core import registry
    from trainwright.data.module import build_tokenizer

    if out.exists():
        raise ConfigError("exists already; give a folder that does not", key="--out", value=str(out))
    config = RunConfig.load(recipe, overrides)
    tokenizer = build_tokenizer(config.data, config.tokenizer or registry.build("tokenizer", "bpe"))
    tokenizer.save(out)
    found: dict[str, Any] = {"folder": out, "vocab_size": tokenizer.vocab_size}
    held_out = [SourceTexts(s, "validation", config.data.validation_fraction) for s in config.data.sources]
    texts = (text for source in held_out for text in source)
    first = next(texts, None)
    if first is not None:
        own, _ = measure(tokenizer, itertools.chain([first], texts), "the validation split")
        found |= {"held-out bytes per token": own.bytes_per_token, f"tokens per {own.word_unit}": own.fertility}
    figures(found)


def study(
    texts: list[str],
    algorithms: list[str],
    vocab_sizes: list[int],
    dims: dict[str, Any],
    *,
    validation_fraction: float,
    mono: bool,
    parallel: list[str],
    segmentation: str | None,
    proxy: Path | None,
    proxy_bytes: int,
    out: Path,
    json: bool,
) -> None:
    """Train every algorithm at every size on the texts, keep the tokenizers in ``out`` and show the report."""
    sources = {language: source_of(path) for language, path in _pairs(texts, "--text").items()}
    train_texts = {k: SourceTexts(s, "train", validation_fraction) for k, s in sources.items()}
    held_out = {k: SourceTexts(s, "validation", validation_fraction) for k, s in sources.items()}
    mixes: dict[str, Sequence[str]] | None = None
    if mono:
        mixes = {**{k: [k] for k in sources}, "all": list(sources)}
    extra = {"segmentation": segmentation} if segmentation else {}
    specs = [{"name": name, **(extra if name == "morph_bpe" else {})} for name in algorithms]
    small = None
    if proxy is not None:
        small = proxy_training(proxy, list(sources.values()), validation_fraction, held_out, proxy_bytes, out)

    def work() -> Report:
        settings = _extras(parallel, segmentation)  # what is wrong with them is said before the work
        tokenizers = train_tokenizers(train_texts, specs, vocab_sizes, out / "cache", held_out=held_out, mixes=mixes)
        for name, tokenizer in tokenizers.items():
            tokenizer.save(out / name)
        return tokenizer_report(tokenizers, held_out, ModelDims(**dims), proxy=small, **settings)

    report = _judged(work)
    show(report, json)


def compare(
    folders: list[Path],
    texts: list[str],
    dims: dict[str, Any],
    *,
    parallel: list[str],
    segmentation: str | None,
    json: bool,
) -> None:
    """Tokenizers that exist, on the same texts."""
    from trainwright.data.tokenizers import load_tokenizer

    tokenizers = {name: load_tokenizer(f) for name, f in _short_names(folders).items()}
    corpora = {k: SourceTexts(source_of(p), "train", 0.0) for k, p in _pairs(texts, "--text").items()}
    show(
        _judged(lambda: tokenizer_report(tokenizers, corpora, ModelDims(**dims), **_extras(parallel, segmentation))),
        json,
    )


def _short_names(folders: list[Path]) -> dict[str, Path]:
    """Folders by the end of their path that tells them apart."""
    unique = list(dict.fromkeys(f.expanduser().resolve() for f in folders))
    for parts in range(1, max(len(f.parts) for f in unique) + 1):
        names = {"/".join(f.parts[-parts:]): f for f in unique}
        if len(names) == len(unique):
            break
    return names


def source_of(path: str) -> Any:
    """The data source that reads ``path``: by its suffix, and text otherwise."""
    from trainwright.core import registry

    name = {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(path.removesuffix(".gz")).suffix, "text")
    return registry.build("source", {"name": name, "path": path})


def proxy_training(
    recipe: Path,
    sources: list[Any],
    validation_fraction: float,
    held_out: dict[str, Any],
    num_bytes: int,
    out: Path,
) -> Proxy:
    """Bits per byte of a small training by ``recipe`` on the texts; each tokenizer sees ``num_bytes`` of them."""
    from trainwright.config import RunConfig
    from trainwright.config.run_config import read_recipe
    from trainwright.train import Trainer

    def run(name: str, tokenizer: Tokenizer) -> float:
        figures = [measure(tokenizer, texts, k)[0] for k, texts in held_out.items()]
        tokens = sum(f.tokens for f in figures)
        data = read_recipe(recipe)
        section = {k: v for k, v in (data.get("train") or {}).items() if k not in LENGTHS}
        # Equal text, not equal tokens, for every tokenizer.
        section["tokens"] = max(round(num_bytes * tokens / sum(f.bytes for f in figures)), 1)
        data["train"] = section
        data["tokenizer"] = {"name": "hf", "path": str(out / name)}
        data["data"] = {
            **(data.get("data") or {}),
            "sources": [s.model_dump(mode="json") for s in sources],
            "validation_fraction": validation_fraction,
            "cache_dir": str(out / "cache"),
        }
        data["run"] = {**(data.get("run") or {}), "dir": str(out / "proxy"), "name": name}
        summary = Trainer(RunConfig.load(data)).fit()
        if "val_bits_per_byte" not in summary:
            raise DataError("the proxy's training measured no bits per byte; its recipe has to evaluate")
        return float(summary["val_bits_per_byte"])

    return run


def show(report: Report, json: bool) -> None:
    """The report as JSON, or as a table with a line a language."""
    from trainwright.cli.output import out, print_json

    if json:
        print_json(report.as_dict())
        return
    from rich.table import Table
    from rich.text import Text

    lines = [cells for row in report.rows for cells in _lines(row)]
    view = Table(box=None, pad_edge=False, header_style="bold")
    filled = [h for h in lines[0] if any(line[h] for line in lines)]
    for heading in filled:
        view.add_column(heading, no_wrap=True, justify="left" if heading in ("tokenizer", "language") else "right")
    for line in lines:
        view.add_row(*(Text(line[h]) for h in filled))
    console = out()
    console.print(view)
    console.print("compute: training FLOPs on the same text, relative to the first tokenizer")
    if report.best is None:
        console.print(
            "Fertility and parity do not tell which model will be better: measure bits per byte with a small training "
            "(trainwright tokenizer study --proxy RECIPE, or trainwright compare --vary tokenizer=...)."
        )
    else:
        console.print(f"fewest bits per byte of the proxy: {report.best}")


def _lines(row: Row) -> Iterator[dict[str, str]]:
    """Cells by heading, a line a language; what is of the tokenizer stands in its first."""
    first = True
    for language, f in row.languages.items():
        of_language = {
            "language": f"{language} (characters)" if f.word_unit == "character" else language,
            "fertility": f"{f.fertility:.3f}",
            "bytes/token": f"{f.bytes_per_token:.3f}",
            "parity": _number(row.parity.get(language)),
            "FLOPs/word": f"{row.flops_per_word[language]:.3g}",
        }
        of_tokenizer = {
            "compute": f"{row.relative_compute:.3f}",
            "unused": f"{row.unused_share:.1%}",
            "Renyi": f"{row.renyi_efficiency:.3f}",
            "edit dist.": _number(row.morphology.get("edit_distance")),
            "consistency": _number(row.morphology.get("consistency")),
            "crossing": _number(row.morphology.get("crossing_rate")),
            "bits/byte": _number(row.bits_per_byte),
        }
        head = {"tokenizer": row.name, "ids": str(row.vocab_size)}
        if not first:
            head, of_tokenizer = dict.fromkeys(head, ""), dict.fromkeys(of_tokenizer, "")
        yield {**head, **of_language, **of_tokenizer}
        first = False


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _pairs(entries: list[str], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in entries:
        language, mark, path = entry.partition("=")
        if not (mark and path and re.fullmatch(r"[\w-]+", language)):
            raise ConfigError("should look like en=PATH", key=option, value=entry)
        if language in found:
            raise ConfigError(f"{language} is given twice; put its files into one folder", key=option, value=entry)
        found[language] = path
    return found


def _extras(parallel: list[str], segmentation: str | None) -> dict[str, Any]:
    from trainwright.data.tokenizers.segmentation import load_segmentation

    sentences: dict[str, list[str]] = {}
    for language, path in _pairs(parallel, "--parallel").items():
        try:
            sentences[language] = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--parallel {language}: {path} cannot be read ({error})") from None
    return {
        "parallel": sentences,
        "segmentation": None if segmentation is None else load_segmentation(segmentation),
    }


def _judged(work: Callable[[], Report]) -> Report:
    try:
        return work()
    except ValueError as error:  # what the study refuses; pydantic's errors are ours by then
        raise InputError(str(error)) from None
