"""What a checkpoint holds, for the command line and for tools; one process, no collectives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint import codec
from trainwright.train.checkpoint.files import read_json
from trainwright.train.checkpoint.manifest import META, Manifest, read_manifest
from trainwright.train.checkpoint.manifest import verify as verify_files

if TYPE_CHECKING:
    from trainwright.train.checkpoint.reading import TensorSpec


@dataclass(frozen=True)
class CheckpointInfo:
    """Everything but the tensors' data."""

    path: Path
    step: int
    run_id: str
    sequence: int  # order of writing within the folder
    world_size: int
    created: str  # ISO 8601, UTC
    torch: str  # version that wrote it
    metric: tuple[str, float] | None
    files: dict[str, int]  # bytes by name
    size: int  # bytes of all files
    meta: dict[str, Any]
    weights: dict[str, TensorSpec]  # by parameter name
    tensors: dict[str, Any]  # the tree given to save, with a TensorSpec for each tensor

    @property
    def config(self) -> Any:
        """The run's config, if the meta has one under ``config``."""
        return self.meta.get("config")


def manifest_of(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``. Raises CheckpointError that names the folder."""
    try:
        return read_manifest(Path(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error


def inspect(path: Path) -> CheckpointInfo:
    """Describe a checkpoint without reading its tensors. Raises CheckpointError if its JSON files are damaged."""
    from trainwright.train.checkpoint.planning import STATE, WEIGHTS, split_name
    from trainwright.train.checkpoint.reading import CheckpointReader, read_values

    path = Path(path)
    manifest = manifest_of(path)
    weights: dict[str, TensorSpec] = {}
    state = {name: codec.decode(value) for name, value in read_values(path).items()}
    for fqn, spec in CheckpointReader(path, manifest.files).specs().items():
        group, name = split_name(fqn)
        {WEIGHTS: weights, STATE: state}[group][name] = spec
    return CheckpointInfo(
        path=path,
        step=manifest.step,
        run_id=manifest.run_id,
        sequence=manifest.sequence,
        world_size=manifest.world_size,
        created=manifest.created,
        torch=manifest.torch,
        metric=manifest.metric,
        files={name: record.size for name, record in manifest.files.items()},
        size=manifest.size,
        meta=codec.decode(read_json(path / META)),
        weights=weights,
        tensors=codec.unflatten(state),
    )


def verify(path: Path) -> None:
    """Read every file of a checkpoint and compare checksums. Raises CheckpointError listing what is wrong."""
    manifest_of(path)
    if problems := verify_files(Path(path)):
        raise CheckpointError(f"checkpoint {path} is not whole: {'; '.join(problems)}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights by name, whole, on the CPU, whatever layout they were saved from. Verifies the files first."""
    from trainwright.train.checkpoint.planning import WEIGHTS
    from trainwright.train.checkpoint.reading import read_group

    verify(path)
    return read_group(Path(path), manifest_of(path).files, WEIGHTS)


def read_tensors(path: Path) -> dict[str, Any]:
    """The tree given to ``save``, its tensors whole, on the CPU. Verifies the files first."""
    from trainwright.train.checkpoint.planning import STATE
    from trainwright.train.checkpoint.reading import read_group, read_values

    verify(path)
    values = {name: codec.decode(value) for name, value in read_values(Path(path)).items()}
    return codec.unflatten({**values, **read_group(Path(path), manifest_of(path).files, STATE)})
