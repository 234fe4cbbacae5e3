"""``trainwright data mix``: sources in the shares one wants, held-out and contaminated documents left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError


def mix(
    inputs: Sequence[str],
    out: Path,
    *,
    weights: Sequence[str] = (),
    total: str | None = None,
    contaminants: Sequence[str] = (),
    reading: dict[str, Any] | None = None,
    writing: dict[str, Any] | None = None,
    json: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Mix ``inputs`` (``NAME=PATH``) into ``out``; settings are those of ``blend.Blend``."""
    from trainwright.cli.data import _Bar, _brief, open_inputs
    from trainwright.cli.data_page import write_samples
    from trainwright.cli.output import out as console
    from trainwright.cli.output import print_json
    from trainwright.data.build.blend import Blend

    sources = {}
    for item in inputs:
        name, _, path = item.partition("=")
        name = name if path else Path(item).name
        if name in sources:
            raise ConfigError("is given twice; name each input: NAME=PATH", key="inputs", value=name)
        sources[name] = open_inputs([item], reading or {})
    held = (d for c in contaminants for d in open_inputs([c], reading or {})) if contaminants else ()
    blend = Blend(sources, weights=_weights(weights), total=_number(total), contaminants=held, **settings)
    with _Bar() as bar:
        found = blend.write(out, writing or {}, watch=bar)
    idle = found.pop("operators_run", None) == 0
    page = write_samples(found, out)
    if json:
        print_json({**found, "stages": [_brief(s) for s in found["stages"]]})
        return found
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    view.add_column("source")
    for heading in ("asked", "share", found["mixture"]["unit"], "documents", "has", "epochs"):
        view.add_column(heading, justify="right")
    whole = found["mixture"]["total"] or 1
    for name, row in found["mixture"]["sources"].items():
        view.add_row(
            name, f"{row['fraction']:.2%}", f"{row['given'] / whole:.2%}", f"{row['given']:,}",
            f"{row['documents']:,}", f"{row['available']:,}", f"{row['epochs']:.2f}",
        )  # fmt: skip
    console().print(view)
    print(f"{out}: {found['documents']:,} documents", end="")
    print(f", {found['mixture']['held_out']:,} held out" if found["mixture"]["held_out"] else "", end="\n")
    print(page)
    if found["mixture"]["renamed_ids"]:
        print(f"{found['mixture']['renamed_ids']:,} ids came twice; the later documents are called SOURCE:ID")
    if idle:
        print("inputs and settings are those of the corpus that is there: nothing was done")
    return found


def _weights(given: Sequence[str]) -> dict[str, float] | None:
    found: dict[str, float] = {}
    for item in given:
        name, equals, value = item.rpartition("=")
        try:
            if not equals or not name:
                raise ValueError
            if name in found:
                raise ConfigError("is given twice", key="--weight", value=item)
            found[name] = float(value)
        except ValueError:
            raise ConfigError("should look like NAME=0.3", key="--weight", value=item) from None
    return found or None


def _number(given: str | None) -> int | None:
    """``20M`` as 20,000,000."""
    if given is None:
        return None
    scale = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}.get(given[-1:].lower(), 1)
    try:
        return int(float(given[:-1] if scale > 1 else given) * scale)
    except ValueError:
        raise ConfigError("should be a number, such as 20M", key="--total", value=given) from None
