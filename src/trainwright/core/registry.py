"""The one registry: every method is a config class registered under a slot and a name.

A method's file calls :func:`register` on its config class; the recipe slot, ``trainwright methods``, the JSON
Schema and docs/methods.md all read from here. Files are imported when their slot is first looked at, so a
command that needs one slot does not pay for the others. Third parties register through the entry-point group
``trainwright.methods`` (an entry point names a module, or a function called without arguments).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from trainwright.core.errors import ConfigError, nearest

# Slot -> the packages whose modules hold its methods. Order is the order of `trainwright methods`.
SLOTS: dict[str, tuple[str, ...]] = {
    "model": ("trainwright.models",),
    "transform": ("trainwright.models.transforms",),
    "source": ("trainwright.data.sources",),
    "batcher": ("trainwright.data.batchers",),
    "mixer": ("trainwright.data.mixers",),
    "selector": ("trainwright.data.selectors",),
    "weighter": ("trainwright.data.weighters",),
    "tokenizer": ("trainwright.data.tokenizers",),
    "objective": ("trainwright.objectives",),
    "optimizer": ("trainwright.optim",),
    "schedule": ("trainwright.optim.schedules",),
    "clip": ("trainwright.optim.clipping",),
    "average": ("trainwright.optim.averaging",),
    "precision": ("trainwright.precision",),
    "memory": ("trainwright.memory",),
    "context": ("trainwright.parallel.context", "trainwright.parallel.sppo.sppo"),
    "tensor": ("trainwright.parallel.domino",),
    "sharding": ("trainwright.parallel.amsp.config",),
    "comm": ("trainwright.parallel.comm",),
    "monitor": ("trainwright.resilience",),
    "logger": ("trainwright.train.loggers",),
}
ENTRY_POINTS = "trainwright.methods"


class MethodConfig(BaseModel):
    """Base of every method's config. Unknown keys are refused; ``name`` is filled in by :func:`register`."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)
    name: str = ""

    @classmethod
    def info(cls) -> MethodInfo:
        return _info(cls)

    def excludes(self) -> dict[str, str]:
        """What cannot be combined with the method as it is set, and why: as ``conflicts`` of :class:`MethodInfo`."""
        return self.info().conflicts


@dataclass(frozen=True)
class MethodInfo:
    """What the registry knows of one method."""

    slot: str
    name: str
    config: type[MethodConfig]
    paper: str = ""  # e.g. "arXiv:2501.06842"
    seed_id: str = ""  # id of the method's card, e.g. "B075"
    # {"clip.global_norm": "why they exclude each other and what to do"}; a key is "slot" or "slot.name", and of
    # requires also several of them with "|" between, of which any one will do.
    conflicts: dict[str, str] = field(default_factory=dict)
    requires: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        return (self.config.__doc__ or "").strip().split("\n")[0]


_methods: dict[str, dict[str, MethodInfo]] = {slot: {} for slot in SLOTS}
_by_class: dict[type, MethodInfo] = {}
_loaded: set[str] = set()
C = TypeVar("C", bound=type[MethodConfig])


def _info(cls: type[MethodConfig]) -> MethodInfo:
    try:
        return _by_class[cls]
    except KeyError:
        raise TypeError(f"{cls.__name__} is not a registered method") from None


def register(
    slot: str,
    name: str,
    *,
    paper: str = "",
    seed_id: str = "",
    conflicts: dict[str, str] | None = None,
    requires: dict[str, str] | None = None,
) -> Callable[[C], C]:
    """Class decorator: put a :class:`MethodConfig` subclass into ``slot`` under ``name``.

    ``conflicts`` and ``requires`` map ``"slot"`` or ``"slot.name"`` to the reason and the way out.
    Raises ValueError for an unknown slot or a name that another class holds.
    """
    if slot not in SLOTS:
        raise ValueError(f"unknown slot {slot!r}; {nearest(slot, SLOTS)}")

    def decorate(cls: C) -> C:
        old = _methods[slot].get(name)
        if old is not None and old.config.__qualname__ != cls.__qualname__:
            raise ValueError(f"{slot} {name!r} is registered twice: {old.config} and {cls}")
        fields: dict[str, FieldInfo] = cls.__pydantic_fields__
        fields["name"] = FieldInfo(annotation=Literal[name], default=name)  # type: ignore[arg-type]
        cls.model_rebuild(force=True)
        info = MethodInfo(slot, name, cls, paper, seed_id, dict(conflicts or {}), dict(requires or {}))
        _methods[slot][name] = info
        _by_class[cls] = info
        return cls

    return decorate


@functools.cache
def _load_plugins() -> None:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        loaded = point.load()
        if callable(loaded):
            loaded()


def _load(slot: str) -> None:
    if slot in _loaded:
        return
    _loaded.add(slot)  # before the imports, which may look the slot up themselves
    try:
        for package_name in SLOTS[slot]:
            _import_methods(package_name)
        _load_plugins()
    except BaseException:
        _loaded.discard(slot)  # the next lookup says again what is wrong, and not that there is no such method
        raise


def _import_methods(package_name: str) -> None:
    try:
        package = importlib.import_module(package_name)
    except ModuleNotFoundError as error:
        if error.name and package_name.startswith(error.name):
            return  # a room that is not built yet
        raise
    for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
        if not module.ispkg and not module.name.startswith("_"):
            importlib.import_module(f"{package_name}.{module.name}")


def methods(slot: str | None = None) -> list[MethodInfo]:
    """All methods, or those of one slot, sorted by name within a slot."""
    slots = list(SLOTS) if slot is None else [slot]
    out = []
    for s in slots:
        _load(s)
        out += [_methods[s][name] for name in sorted(_methods[s])]
    return out


def get(slot: str, name: str) -> MethodInfo:
    """The method ``name`` of ``slot``; a ConfigError with the nearest valid name when there is none."""
    _load(slot)
    if name not in _methods[slot]:
        raise ConfigError(f"no such {slot}; {nearest(str(name), _methods[slot])}", key="name", value=name)
    return _methods[slot][name]


def build(slot: str, spec: Any, default: str | None = None) -> MethodConfig:
    """A validated config from ``spec``: a config, a name, or a mapping with ``name``.

    Raises ConfigError with the key relative to the slot (``lr``, ``inner.rank``).
    """
    if isinstance(spec, MethodConfig):
        if _info(type(spec)).slot != slot:
            raise ConfigError(f"is a {_info(type(spec)).slot}, not a {slot}", value=type(spec).__name__)
        return spec
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, dict):
        raise ConfigError(f"expected a name or a mapping with a name, got {type(spec).__name__}", value=spec)
    name = spec.get("name", default)
    if name is None:
        raise ConfigError(f"name is missing; {nearest('', [m.name for m in methods(slot)])}", key="name")
    config = get(slot, name).config
    try:
        return config.model_validate({**spec, "name": name})
    except ValidationError as error:
        raise config_error(error, config) from None


# In the words of a recipe, not of the library that checks it.
_PLAIN = {
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "string_type": "should be text",
}


def config_error(error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """The first of a pydantic error's findings, as one line that names key, value and the way out."""
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    key, value = ".".join(loc), first["input"]
    if first["type"] == "extra_forbidden":
        owner = _model_at(model, loc[:-1])
        fields = owner.model_fields if owner else {}
        return ConfigError(f"unknown key; {nearest(loc[-1], fields)}", key=key)
    if first["type"] == "missing":
        return ConfigError("is required", key=key)
    message = _PLAIN.get(first["type"]) or first["msg"]
    message = message.removeprefix("Value error, ").replace("Input should be", "should be")
    owner = _model_at(model, loc[:-1])
    default = owner.model_fields[loc[-1]].default if owner and loc and loc[-1] in owner.model_fields else None
    if first["type"] != "value_error" and isinstance(default, bool | int | float | str):
        message += f"; the default is {str(default).lower() if isinstance(default, bool) else default}"
    return ConfigError(message, key=key, value=None if isinstance(value, dict | BaseModel) else value)


def _model_at(model: type[BaseModel], loc: Sequence[str]) -> type[BaseModel] | None:
    for part in loc:
        info = model.model_fields.get(part)
        annotation = info.annotation if info else None
        # A section that may be null.
        annotation = next((a for a in get_args(annotation) if isinstance(a, type) and a is not type(None)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        model = annotation
    return model


class Slot:
    """Annotation that makes a pydantic field one slot: ``optimizer: Annotated[OptimizerConfig, Slot("optimizer")]``.

    With ``many=True`` the field is a list; a single entry is taken as a list of one. ``optional=True`` admits null.
    Methods are looked up when the field is validated, so methods registered later (plugins) are found, and a
    method may nest its own slot (``inner``).
    """

    def __init__(self, slot: str, *, many: bool = False, optional: bool = False, default: str | None = None):
        self.slot, self.many, self.optional, self.default = slot, many, optional, default

    def _validate(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        field_name = info.field_name or self.slot
        if value is None and (self.optional or self.many):
            return [] if self.many else None
        if not self.many:
            return self._one(value, field_name)
        items = value if isinstance(value, list | tuple) else [value]
        return [self._one(item, f"{field_name}.{i}") for i, item in enumerate(items)]

    def _one(self, value: Any, key: str) -> MethodConfig:
        try:
            return build(self.slot, value, self.default)
        except ConfigError as error:
            raise error.under(key) from None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        def dump(value: Any) -> Any:
            if isinstance(value, list):
                return [item.model_dump(mode="json") for item in value]
            return None if value is None else value.model_dump(mode="json")

        return core_schema.with_info_plain_validator_function(
            self._validate, serialization=core_schema.plain_serializer_function_ser_schema(dump)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        one: dict[str, Any] = {"$ref": f"{_SLOT_REF}{self.slot}"}
        if self.many:
            return {"anyOf": [one, {"type": "array", "items": one}]}
        return {"anyOf": [one, {"type": "null"}]} if self.optional else one


# pydantic resolves local references itself, and a slot's union is not known to it; see with_slots.
_SLOT_REF = "https://trainwright/slots/"


def with_slots(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` of a model that has slots, with the union of methods of each slot added to its ``$defs``."""

    def local(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: local(v) for k, v in value.items()}
        if isinstance(value, list):
            return [local(v) for v in value]
        if isinstance(value, str) and value.startswith(_SLOT_REF):
            return f"#/$defs/slot_{value.removeprefix(_SLOT_REF)}"
        return value

    return local({**schema, "$defs": {**schema.get("$defs", {}), **slot_definitions()}})


def slot_definitions() -> dict[str, Any]:
    """Per slot the union of its methods, told apart by ``name``; a name alone will do."""
    defs: dict[str, Any] = {}
    for slot in SLOTS:
        options: list[dict[str, Any]] = []
        for method in methods(slot):
            schema = method.config.model_json_schema(ref_template="#/$defs/{model}")
            defs.update(schema.pop("$defs", {}))
            schema["required"] = sorted({*schema.get("required", []), "name"})
            defs[f"{slot}_{method.name}"] = schema
            options.append({"$ref": f"#/$defs/{slot}_{method.name}"})
        names: dict[str, Any] = {"type": "string", "enum": [m.name for m in methods(slot)]}
        defs[f"slot_{slot}"] = {"oneOf": [names, *options]}
    return defs
