"""Stages by name, for recipes and commands: ``[{"language": {"keep": ["en"]}}, "exact_dedup"]``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, nearest
from trainwright.data.build.cleaning import BoilerplateLines, Language, Lengths, NormalizeUnicode, RepeatedLines
from trainwright.data.build.common_corpus.code import CodeQuality
from trainwright.data.build.common_corpus.corrections import OcrCorrect
from trainwright.data.build.common_corpus.ocr import OcrQuality
from trainwright.data.build.common_corpus.pages import RunningHeads
from trainwright.data.build.common_corpus.toxicity import Toxicity
from trainwright.data.build.dedup import ExactDedup, NearDedup
from trainwright.data.build.filters import Licences, UniqueIds, Where
from trainwright.data.build.governance.takedown import TakenOut
from trainwright.data.build.licences import LicencePolicy
from trainwright.data.build.quality.chinese import NormalizeChinese
from trainwright.data.build.quality.diversity import TrackDiversity
from trainwright.data.build.quality.filtering import QualityFilter
from trainwright.data.build.scrubbing import ScrubPersonal, ScrubSecrets
from trainwright.data.build.splice_stage import Splice
from trainwright.data.build.stage import Stage
from trainwright.data.synthetic.verify_code import VerifyCode

STAGES: dict[str, Callable[..., Stage]] = {
    cls.name: cls
    for cls in (
        NormalizeUnicode, BoilerplateLines, RepeatedLines, Lengths, Language, ScrubPersonal, ScrubSecrets, UniqueIds,
        Licences, LicencePolicy, OcrQuality, RunningHeads, Toxicity, OcrCorrect, CodeQuality, TakenOut,
        Where, ExactDedup, NearDedup, VerifyCode, NormalizeChinese,
        QualityFilter, TrackDiversity, Splice,
    )
}  # fmt: skip
# What a build does unless told otherwise: SlimPajama's steps, and ids that can be relied on.
DEFAULT_STAGES: tuple[str | dict[str, Any], ...] = (
    {"unique_ids": {"on_duplicate": "rename"}},
    {"normalize_unicode": {"mojibake": False}},
    "lengths",
    "exact_dedup",
    "near_dedup",
)


def make_stages(spec: Sequence[str | Mapping[str, Any]], work_dir: Path | None = None) -> list[Stage]:
    """New stages by a list of names and ``{name: settings}``. Raises ConfigError for unknown names and settings."""
    stages = []
    settings: Any
    for item in spec:
        if isinstance(item, str):
            name, settings = item, None
        elif isinstance(item, Mapping) and len(item) == 1:
            ((name, settings),) = item.items()
        else:
            raise ConfigError("should be a name, or one name with its settings", key="stages", value=item)
        if name not in STAGES:
            raise ConfigError(f"unknown stage; {nearest(str(name), STAGES)}", key="stages", value=name)
        settings = {} if settings is None else settings
        if not isinstance(settings, Mapping):
            raise ConfigError("should be settings with their names", key=f"stages.{name}", value=settings)
        known = inspect.signature(STAGES[name]).parameters
        for key in settings:
            if key not in known:
                raise ConfigError(f"unknown setting; {nearest(str(key), known)}", key=f"stages.{name}.{key}")
        # One name stands for a list of it: a string is a sequence too, of its letters.
        settings = {
            k: [v] if isinstance(v, str) and str(known[k].annotation).startswith("Sequence[str]") else v
            for k, v in settings.items()
        }
        extra = {"work_dir": work_dir} if "work_dir" in known and work_dir is not None else {}
        try:
            stages.append(STAGES[name](**{**extra, **settings}))
        except ConfigError as error:
            raise error.under(f"stages.{name}") from None
        except TypeError as error:
            raise ConfigError(str(error), key=f"stages.{name}") from None
    return stages
