"""RunConfig: one field per slot. Reads YAML, applies overrides, refuses what cannot run before any work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainwright.config.sections import (
    CheckpointSection,
    EvaluateSection,
    LogSection,
    RecoverySection,
    RunSection,
    Section,
    TrainSection,
)
from trainwright.core.errors import ConfigError, InputError, nearest
from trainwright.core.registry import MethodConfig, MethodInfo, Slot, config_error, with_slots
from trainwright.data.module import DataConfig
from trainwright.memory.base import MemoryConfig
from trainwright.models.base import ModelConfig
from trainwright.objectives.base import ObjectiveConfig
from trainwright.optim.base import AverageConfig, ClipConfig, OptimizerConfig, ScheduleConfig
from trainwright.parallel.config import ParallelConfig
from trainwright.precision.base import PrecisionConfig
from trainwright.resilience.base import MonitorConfig


class RunConfig(BaseModel):
    """Everything that decides a run. ``RunConfig.load("recipe.yaml", ["optimizer.lr=0.01"])``."""

    model_config = ConfigDict(extra="forbid", validate_default=True, validate_by_name=True, validate_by_alias=True)

    run: RunSection = Field(default_factory=RunSection)
    model: Annotated[ModelConfig, Slot("model", default="decoder")] = cast(ModelConfig, {"name": "decoder"})
    transforms: Annotated[list[MethodConfig], Slot("transform", many=True)] = Field(default_factory=list)
    data: DataConfig = Field(default_factory=DataConfig)
    tokenizer: Annotated[MethodConfig | None, Slot("tokenizer", optional=True)] = Field(
        None, description="null: the tokenizer that belongs to the model's folder, else a BPE trained on the data."
    )
    objective: Annotated[ObjectiveConfig, Slot("objective", default="next_token")] = cast(
        ObjectiveConfig, {"name": "next_token"}
    )
    optimizer: Annotated[OptimizerConfig, Slot("optimizer", default="adamw")] = cast(OptimizerConfig, {"name": "adamw"})
    schedule: Annotated[ScheduleConfig, Slot("schedule", default="cosine")] = cast(ScheduleConfig, {"name": "cosine"})
    clip: Annotated[ClipConfig, Slot("clip", default="global_norm")] = cast(ClipConfig, {"name": "global_norm"})
    average: Annotated[AverageConfig | None, Slot("average", optional=True)] = None
    precision: Annotated[PrecisionConfig, Slot("precision", default="auto")] = cast(PrecisionConfig, {"name": "auto"})
    memory: Annotated[list[MemoryConfig], Slot("memory", many=True)] = Field(default_factory=list)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    comm: Annotated[MethodConfig | None, Slot("comm", optional=True)] = None
    monitors: Annotated[list[MonitorConfig], Slot("monitor", many=True)] = Field(
        default_factory=lambda: cast(list[MonitorConfig], [{"name": "non_finite"}, {"name": "loss_spike"}])
    )
    recovery: RecoverySection = Field(default_factory=RecoverySection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    log: LogSection = Field(default_factory=LogSection)
    train: TrainSection = Field(default_factory=TrainSection)

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, data: Any) -> Any:
        """Validate the plain sections here, so that their errors carry the full key."""
        if not isinstance(data, dict):
            return data
        out = dict(data)
        for key, value in data.items():
            info = cls.model_fields.get(key)
            section = info.annotation if info else None
            if not (isinstance(section, type) and issubclass(section, BaseModel)) or isinstance(value, BaseModel):
                continue
            if issubclass(section, MethodConfig):
                continue  # a slot: it names its own key
            if not isinstance(value, dict) and not (section is ParallelConfig and value == "auto"):
                raise ConfigError(
                    f"should be a mapping with keys like {', '.join(list(section.model_fields)[:4])}",
                    key=key,
                    value=value,
                )
            try:
                out[key] = section.model_validate(value)
            except ConfigError as error:
                raise error.under(key) from None
            except ValidationError as error:
                raise config_error(error, section).under(key) from None
        return out

    @model_validator(mode="after")
    def _compatible(self) -> RunConfig:
        _check_compatible(list(self.chosen_methods()))
        return self

    # -- reading ------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, recipe: str | Path | dict[str, Any] | None = None, overrides: Sequence[str] = ()) -> RunConfig:
        """From a YAML file, a mapping, or the built-in quickstart (None), with ``key=value`` overrides.

        A file without ``run.name`` gives its own name, less the suffix. Raises ConfigError for anything wrong, naming
        the key, the value and the way out.
        """
        data = read_recipe(recipe)
        for override in overrides:
            apply_override(data, override)
        if isinstance(recipe, str | Path):
            section = data.get("run") or {}
            if isinstance(section, dict) and section.get("name") is None:
                data["run"] = {**section, "name": Path(recipe).stem}
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunConfig:
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            found = error.errors()[0]
            if found["type"] == "extra_forbidden" and len(found["loc"]) == 1:
                raise _unknown_top_level(str(found["loc"][0]), cls) from None
            raise config_error(error, cls) from None

    # -- what it says -------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def checkpoint_dir(self) -> Path:
        return self.checkpoint.dir or self.run_dir / "checkpoints"

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of a recipe, every slot a union of its methods; for editors."""
        schema = with_slots(cls.model_json_schema(by_alias=True))
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        schema["title"] = "Trainwright recipe"
        return schema

    def chosen_methods(self) -> Iterator[tuple[str, MethodConfig]]:
        """Every method in the recipe with its key, nested ones included."""
        for key in type(self).model_fields:
            yield from _walk(key, getattr(self, key))


def _walk(key: str, value: Any) -> Iterator[tuple[str, MethodConfig]]:
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _walk(f"{key}.{i}", item)
    elif isinstance(value, BaseModel):
        if isinstance(value, MethodConfig):
            yield key, value
        for field in type(value).model_fields:
            yield from _walk(f"{key}.{field}", getattr(value, field))


def _check_compatible(chosen: list[tuple[str, MethodConfig]]) -> None:
    present: dict[str, tuple[str, MethodInfo]] = {}
    for key, method in chosen:
        info = method.info()
        present.setdefault(info.slot, (key, info))
        present.setdefault(f"{info.slot}.{info.name}", (key, info))
    for key, method in chosen:
        info = method.info()
        for other, reason in method.excludes().items():
            if other in present and present[other][0] != key:
                other_key, other_info = present[other]
                raise ConfigError(f"{key}={info.name} cannot be combined with {other_key}={other_info.name}: {reason}")
        for other, reason in info.requires.items():
            if not any(one in present for one in other.split("|")):
                wanted = other.replace(".", "=").replace("|", " or ")
                raise ConfigError(f"{key}={info.name} needs {wanted}: {reason}")


class _Loader(yaml.SafeLoader):
    """YAML with ``1e-3`` as a number (as in YAML 1.2) and duplicate keys refused."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"
    ),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"is given twice (line {node.start_mark.line + 1} and below); keep one", key=str(key))
    return {loader.construct_object(k): loader.construct_object(v, deep=True) for k, v in node.value}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None


def read_recipe(recipe: str | Path | dict[str, Any] | None) -> dict[str, Any]:
    """The recipe as a mapping; None is the built-in quickstart."""
    if isinstance(recipe, dict):
        return _copy(recipe)
    if recipe is None:
        text, where = (
            resources.files("trainwright").joinpath("recipes/quickstart.yaml").read_text("utf-8"),
            "quickstart",
        )
    else:
        path = Path(recipe)
        if not path.is_file():
            raise ConfigError(
                f"no recipe at {path}; give a YAML file, or none for the quickstart (`trainwright init` writes one)"
            )
        try:
            text, where = path.read_text("utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read as a recipe: {error}") from None
    data = parse_yaml(text, where)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a recipe is a mapping of sections, got {type(data).__name__}")
    return data


def _copy(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _copy(v) for k, v in data.items()}
    return [_copy(v) for v in data] if isinstance(data, list) else data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set ``a.b.0.c=value`` in ``data``. Choosing a method anew (``optimizer=muon``) drops the old one's settings."""
    key, sep, text = override.partition("=")
    key = key.strip()
    if not sep or not key:
        raise ConfigError(f"override {override!r} should look like key=value, e.g. optimizer.lr=1e-3")
    value = parse_yaml(text, f"override {key}")
    parts = key.split(".")
    node: Any = data
    for i, part in enumerate(parts[:-1]):
        child = _child(node, part, parts[: i + 1])
        if isinstance(child, str):  # a method given by its name alone
            child = {"name": child}
        elif child is None:
            child = {}
        _assign(node, part, child)
        node = child
    last = parts[-1]
    _child(node, last, parts)  # checks that the index exists
    if last == "name" and isinstance(node, dict) and node.get("name") not in (None, value) and parts[0] != "run":
        node.clear()
    _assign(node, last, value)


def _child(node: Any, part: str, path: list[str]) -> Any:
    if isinstance(node, dict):
        return node.get(part)
    if isinstance(node, list):
        if not part.isdigit() or int(part) >= len(node):
            raise ConfigError(
                f"{'.'.join(path[:-1])} is a list of {len(node)}; use an index below that", key=".".join(path)
            )
        return node[int(part)]
    raise ConfigError(f"{'.'.join(path[:-1])} is {node!r}, which has no keys", key=".".join(path))


def _assign(node: Any, part: str, value: Any) -> None:
    if isinstance(node, list):
        node[int(part)] = value
    else:
        node[part] = value


def _unknown_top_level(key: str, cls: type[RunConfig]) -> ConfigError:
    """Names the right home of a key that stands in the wrong section (``lr`` -> ``optimizer.lr``)."""
    homes = []
    for name, info in cls.model_fields.items():
        section = info.annotation
        if (
            isinstance(section, type)
            and issubclass(section, Section | DataConfig | ParallelConfig)
            and key in section.model_fields
        ):
            homes.append(f"{name}.{key}")
    if key in OptimizerConfig.model_fields and key != "name":
        homes.append(f"optimizer.{key}")
    hint = f"did you mean {' or '.join(homes)}?" if homes else nearest(key, cls.model_fields)
    return ConfigError(f"unknown key; {hint}", key=key)
