"""``trainwright delta``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

delta_app = typer.Typer(help="Release what fine-tuning changed, without the base model.", no_args_is_help=True)

Base = Annotated[Path, typer.Argument(metavar="BASE", help="Hugging Face folder of the base model.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]


@delta_app.command("make")
def make(
    base: Base,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder of the tuned model.")],
    out: Out,
) -> None:
    """Write what turns BASE into MODEL, exactly."""
    from trainwright.models.delta import make_delta

    tensors = make_delta(base, model, out)["tensors"].values()
    whole = sum(t["base_hash"] is None for t in tensors)
    same = sum(t["hash"] == t["base_hash"] for t in tensors)
    print(f"{out}: {len(tensors)} weights, {same} of them unchanged, {whole} stored whole")


@delta_app.command("apply")
def apply(
    base: Base,
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="Folder that `delta make` wrote.")],
    out: Out,
) -> None:
    """Write the model that DELTA was made from; another base is refused."""
    from trainwright.models.delta import apply_delta

    print(apply_delta(base, delta, out))
