"""``trainwright methods``: list, search, explain."""

from __future__ import annotations

from typing import Any

from trainwright.cli.output import out, print_json
from trainwright.core import registry
from trainwright.core.errors import InputError, nearest
from trainwright.core.registry import MethodInfo


def show(word: str | None, json: bool) -> None:
    """Print the methods that ``word`` means: all, a slot's, one by name, or those whose name or summary has it."""
    found, exact = select(word)
    if json:
        print_json([record(m) for m in found])
    elif exact:
        for i, method in enumerate(found):
            if i:
                print()
            explain(method)
    else:
        table(found)


def select(word: str | None) -> tuple[list[MethodInfo], bool]:
    """The methods meant by ``word``, and whether they were named exactly. Raises InputError when there are none."""
    if word is None:
        return registry.methods(), False
    if word in registry.SLOTS or word.removesuffix("s") in registry.SLOTS:
        return registry.methods(word if word in registry.SLOTS else word.removesuffix("s")), False
    everything = registry.methods()
    slot, _, name = word.rpartition(".")
    exact = [m for m in everything if m.name == name and slot in ("", m.slot)]
    if exact:
        return exact, True
    low = word.lower()
    close = [m for m in everything if low in f"{m.slot} {m.name} {m.summary} {m.paper} {m.seed_id}".lower()]
    if not close:
        raise InputError(
            f"no slot or method {word!r}; {nearest(word, {*registry.SLOTS, *(m.name for m in everything)})}"
        )
    return close, False


def record(method: MethodInfo) -> dict[str, str]:
    return {
        "slot": method.slot,
        "name": method.name,
        "paper": method.paper,
        "seed_id": method.seed_id,
        "summary": method.summary,
    }


def table(found: list[MethodInfo]) -> None:
    from rich.table import Table
    from rich.text import Text

    view = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("slot", "name", "paper", "summary"):
        view.add_column(heading, no_wrap=heading in ("slot", "name", "paper"))
    slot = None
    for m in found:
        view.add_row(*map(Text, (m.slot if m.slot != slot else "", m.name, m.paper, m.summary)))
        slot = m.slot
    out().print(view)


def explain(method: MethodInfo) -> None:
    """Everything of one method: what it does, its paper, its settings with type, default and meaning."""
    import inspect

    from rich.table import Table
    from rich.text import Text

    console = out()
    console.print(Text(f"{method.slot}: {method.name}", style="bold"))
    for label, value in (("paper", method.paper), ("card", method.seed_id)):
        if value:
            console.print(Text(f"{label}: {value}"))
    module = inspect.getmodule(method.config)
    text = inspect.getdoc(method.config) or ""
    if module is not None and module.__doc__:
        text += "\n\n" + inspect.cleandoc(module.__doc__)
    console.print(Text("\n" + text.strip() + "\n"))
    view = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("setting", "type", "default", "meaning"):
        view.add_column(heading, no_wrap=heading == "setting")
    for name, type_name, default, meaning in settings(method):
        view.add_row(Text(name), Text(type_name), Text(default), Text(meaning))
    if view.row_count:
        console.print(view)
    else:
        console.print(Text("It has no settings."))
    for label, others in (("cannot be combined with", method.conflicts), ("needs", method.requires)):
        for other, reason in others.items():
            console.print(Text(f"{label} {other.replace('|', ' or ')}: {reason}"))


def settings(method: MethodInfo) -> list[tuple[str, str, str, str]]:
    """``(name, type, default, meaning)`` of each field but ``name``."""
    rows = []
    for name, field in method.config.model_fields.items():
        if name == "name":
            continue
        if field.is_required():
            default = "(required)"
        else:
            default = plain(field.get_default(call_default_factory=True, validated_data={}))
        rows.append((field.alias or name, type_text(field.annotation), default, field.description or ""))
    return rows


def plain(value: Any) -> str:
    """A default as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    if isinstance(value, dict) and set(value) == {"name"}:
        return str(value["name"])
    return str(value)


def type_text(annotation: Any) -> str:
    """A type as the field calls it: ``int``, ``float or null``, ``'skip' | 'stop'``, or a class's name."""
    import types
    from typing import Annotated, Literal, Union, get_args, get_origin

    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return type_text(args[0])
    if origin is Literal:
        return " | ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(a) for a in args)
    if origin is not None:
        inner = ", ".join("..." if a is Ellipsis else type_text(a) for a in args)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    name = getattr(annotation, "__name__", str(annotation))
    return f"a method ({name.removesuffix('Config').lower()})" if name.endswith("Config") else name
