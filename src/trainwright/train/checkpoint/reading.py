"""Reading a checkpoint's tensors: onto any layout through DCP's load planner, or whole into host memory."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint import codec
from trainwright.train.checkpoint.files import DTYPE_OF, read_json
from trainwright.train.checkpoint.manifest import VALUES
from trainwright.train.checkpoint.planning import INDEX, INDEX_VERSION, STATE, WEIGHTS, split_name
from trainwright.train.checkpoint.ranks import Ranks

logger = logging.getLogger(__name__)

NAMED_AT_MOST = 8  # names per kind of mismatch in one message


@dataclass(frozen=True)
class TensorSpec:
    """Global shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Shard:
    file: str
    key: str
    shape: tuple[int, ...]
    dtype: str


class CheckpointReader(StorageReader):
    """Storage reader for DCP; tensors are named ``weights/NAME`` and ``state/PATH``.

    ``torch.distributed.checkpoint.load(..., storage_reader=CheckpointReader(path))`` works too. Nothing is
    unpickled. ``files`` are the names that may be read (those that the manifest vouches for); None: any.
    """

    def __init__(self, path: str | os.PathLike[str], files: Iterable[str] | None = None):
        super().__init__()
        self.path = Path(path)
        self._files = None if files is None else set(files)
        self._shards: dict[MetadataIndex, _Shard] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / INDEX).is_file()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self._shards = {}

    def read_metadata(self, *args: Any) -> Metadata:
        """DCP's description of the checkpoint, from index.json. Raises CheckpointError if that makes no sense."""
        index = read_json(self.path / INDEX)
        described: dict[str, Any] = {}
        self._shards = {}
        try:
            if index["version"] != INDEX_VERSION:
                raise ValueError(f"version {index['version']!r} is unknown")
            for group in (WEIGHTS, STATE):
                for name, entry in index[group].items():
                    described[f"{group}/{name}"] = self._describe(f"{group}/{name}", entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{self.path / INDEX} is damaged: {type(error).__name__}: {error}") from error
        return Metadata(state_dict_metadata=described, storage_data=self._shards)

    def _describe(self, fqn: str, entry: dict[str, Any]) -> TensorStorageMetadata:
        size, chunks = torch.Size(entry["shape"]), []
        for shard in entry["shards"]:
            offsets, sizes, file = torch.Size(shard["offsets"]), torch.Size(shard["shape"]), shard["file"]
            if self._files is not None and file not in self._files:
                raise ValueError(f"it names {file!r}, which is not in the manifest")
            if any(o < 0 or n < 0 or o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)):
                raise ValueError(f"a shard of {fqn} lies outside of it")
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            self._shards[MetadataIndex(fqn, offsets)] = _Shard(file, split_name(fqn)[1], tuple(sizes), entry["dtype"])
        if sum(math.prod(c.sizes) for c in chunks) != math.prod(size):
            raise ValueError(f"the shards of {fqn} do not cover it")
        if _overlap(chunks):  # then something else is missing: no layout is like this
            raise ValueError(f"two shards of {fqn} lie on each other")
        return TensorStorageMetadata(TensorProperties(dtype=DTYPE_OF[entry["dtype"]]), size, chunks)

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every stored tensor by ``group/name``."""
        stored = self.read_metadata().state_dict_metadata
        return {
            fqn: TensorSpec(tuple(info.size), info.properties.dtype)
            for fqn, info in stored.items()
            if isinstance(info, TensorStorageMetadata)
        }

    def check_headers(self, part: int = 0, parts: int = 1) -> None:
        """Compare the header of every ``parts``-th file with the index. Raises CheckpointError."""
        by_file: dict[str, list[_Shard]] = {}
        for shard in self._shards.values():
            by_file.setdefault(shard.file, []).append(shard)
        for name in sorted(by_file)[part::parts]:
            with open_safetensors(self.path / name) as file:
                keys = set(file.keys())
                for shard in by_file[name]:
                    found = file.get_slice(shard.key) if shard.key in keys else None
                    if found is None or (found.get_dtype(), tuple(found.get_shape())) != (shard.dtype, shard.shape):
                        has = "nothing" if found is None else f"{found.get_dtype()} {list(found.get_shape())}"
                        says = f"{shard.dtype} {list(shard.shape)}"
                        raise CheckpointError(f"{self.path / name} has {has} for {shard.key}, {INDEX} says {says}")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._shards = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, _Shard]]] = {}
        for item in plan.items:
            shard = self._shards[item.storage_index]
            by_file.setdefault(shard.file, []).append((item, shard))
        for name, reads in by_file.items():
            with open_safetensors(self.path / name) as file, torch.no_grad():
                for item, shard in reads:
                    target = planner.resolve_tensor(item).detach()
                    if tuple(item.lengths) == shard.shape:
                        data = file.get_tensor(shard.key)
                    else:
                        spans = zip(item.storage_offsets, item.lengths, strict=True)
                        data = file.get_slice(shard.key)[tuple(slice(o, o + n) for o, n in spans)]
                    if target.shape != data.shape:
                        raise CheckpointError(
                            f"{shard.key}: a part is {list(data.shape)} instead of {list(target.shape)}"
                        )
                    target.copy_(data)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two boxes share an element. Sorted by their first rows, a box is compared with the few beside it."""
    if not chunks or not chunks[0].sizes:
        return len(chunks) > 1
    live: list[ChunkStorageMetadata] = []
    for chunk in sorted((c for c in chunks if math.prod(c.sizes)), key=lambda c: tuple(c.offsets)):
        live = [other for other in live if other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        for other in live:
            if all(
                a < c + d and c < a + b
                for a, b, c, d in zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            ):
                return True
        live.append(chunk)
    return False


def read_values(path: Path) -> dict[str, Any]:
    """The JSON leaves of a checkpoint's tensor tree by path, still encoded."""
    values = read_json(path / VALUES)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path / VALUES} is damaged: a {type(values).__name__} instead of an object")
    return values


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def load_tensors(
    path: Path,
    files: Iterable[str],
    ranks: Ranks,
    tensors: dict[str, Any] | None,
    weights: dict[str, Tensor] | None,
    strict: bool,
) -> None:
    """Fill ``tensors`` and ``weights`` in place from a verified checkpoint; see ``Checkpointer.load``. Collective."""
    reader = CheckpointReader(path, files)
    wanted: dict[str, Tensor] = {}
    places: dict[str, codec.Leaf] = {}  # JSON leaves by path
    state: dict[str, TensorSpec] = {}
    values: dict[str, Any] = {}

    def compare() -> tuple[list[str], set[str], set[str]]:
        state.update(reader.specs())
        values.update(read_values(path))
        reader.check_headers(ranks.rank, ranks.world)
        for name, weight in (weights or {}).items():
            wanted.update({f"{WEIGHTS}/{key}": tensor for key, tensor in codec.plain_tensors(name, weight)})
        for name, leaf in codec.leaves(tensors or {}):
            if isinstance(leaf.value, Tensor):
                wanted[f"{STATE}/{name}"] = leaf.value
            else:
                places[name] = leaf
        return _differences(wanted, state, strict), set(wanted), set(places)

    answers = ranks.each(compare)
    problems = list(dict.fromkeys(problem for found, _, _ in answers for problem in found))
    asked = set().union(*(names for _, names, _ in answers))
    asked_values = set().union(*(names for _, _, names in answers))
    groups = [g for g, given in ((WEIGHTS, weights), (STATE, tensors)) if given is not None]
    missing = sorted(asked - state.keys())
    extra = sorted(fqn for fqn in state.keys() - asked if split_name(fqn)[0] in groups)
    missing += sorted(f"{STATE}/{name}" for name in asked_values - values.keys())
    if tensors is not None:
        extra += sorted(f"{STATE}/{name}" for name in values.keys() - asked_values)
    if strict:
        problems += _listed("missing in the checkpoint", missing) + _listed("only in the checkpoint", extra)
    if problems:
        raise CheckpointError(
            f"checkpoint {path} does not fit, nothing was loaded: {'; '.join(problems)}. "
            "Parameters may have been frozen, renamed or resized since it was written"
        )
    if ranks.leads and (missing or extra):
        notes = _listed("missing in the checkpoint", missing) + _listed("only in the checkpoint", extra)
        logger.warning("checkpoint %s is loaded in part: %s", path, "; ".join(notes))

    _fill({fqn: tensor for fqn, tensor in wanted.items() if fqn in state}, reader, ranks)
    for name, leaf in places.items():
        if name in values:
            leaf.container[leaf.key] = codec.decode(values[name])


def _differences(wanted: dict[str, Tensor], stored: dict[str, TensorSpec], strict: bool) -> list[str]:
    """Tensors of another shape, and if ``strict`` of another dtype, as lines."""
    shapes, dtypes = [], []
    for fqn, tensor in sorted(wanted.items()):
        spec = stored.get(fqn)
        if spec is None:
            continue
        if tuple(tensor.shape) != spec.shape:
            shapes.append(f"{fqn} ({list(spec.shape)} stored, {list(tensor.shape)} here)")
        elif strict and tensor.dtype != spec.dtype:
            dtypes.append(f"{fqn} ({spec.dtype} stored, {tensor.dtype} here)")
    return _listed("of another shape", shapes) + _listed("of another dtype", dtypes)


def _listed(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return [f"{kind}: {', '.join(names[:NAMED_AT_MOST])}{more}"]


def _fill(tensors: dict[str, Tensor], reader: CheckpointReader, ranks: Ranks) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        # DCP says so on every load in one process, where it is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(
                dict(tensors),
                storage_reader=reader,
                planner=planner,
                process_group=ranks.group,
                no_dist=ranks.world == 1,
            )
        except dcp.CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {wrapped[0]}" for rank, wrapped in sorted(error.failures.items()))
            raise CheckpointError(
                f"reading {reader.path} failed half-way, after its files had been found whole ({reasons}); "
                "the tensors are partly filled: do not train on, load again or start anew"
            ) from error


def read_group(path: Path, files: Iterable[str], group: str) -> dict[str, Tensor]:
    """All tensors of ``weights`` or ``state`` by name, whole, on the CPU. One process; for checkpoints that fit."""
    reader = CheckpointReader(path, files)
    specs = {fqn: spec for fqn, spec in reader.specs().items() if split_name(fqn)[0] == group}
    reader.check_headers()
    tensors = {fqn: torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for fqn, spec in specs.items()}
    alone = Ranks.alone()
    _fill(tensors, reader, alone)
    return {split_name(fqn)[1]: tensor for fqn, tensor in tensors.items()}
