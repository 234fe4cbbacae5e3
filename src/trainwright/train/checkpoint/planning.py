"""Storing sharded tensors with torch.distributed.checkpoint (DCP), in safetensors files: plan, snapshot, write.

DCP's planner decides who writes which shard, each once, so that DTensors of any layout are saved without gathering
and can be loaded onto any other layout. What is ours is the storage:

- DCP's ``FileSystemWriter`` keeps its index as a pickle (``.metadata``) and reads it back with ``pickle.load``: a
  checkpoint from elsewhere could run code that way. Here the index is JSON and all tensors, optimizer state
  included, are safetensors: there is nothing to unpickle.
- DCP's ``HuggingFaceStorageWriter`` writes safetensors, but holds a second copy of all data while it does, keeps no
  global shapes (its reader infers them from the shards), no checksums, and loses a shard where a rank writes two of
  one tensor. Its header format is kept, so torch's ``HuggingFaceStorageReader`` and
  ``consolidate_safetensors_files`` take our files.
- The save is split in three, which ``dcp.async_save`` does not allow: only the shards that the plan gives to this
  rank are copied, where DCP stages all of a replicated model on every rank.

Below the checkpoint's folder: ``weights/*.safetensors`` (keys are parameter names), ``state/*.safetensors`` (keys
are paths in the tree), ``index.json`` (dtype, global shape and shards of every tensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint.codec import dumps
from trainwright.train.checkpoint.files import DTYPES, FileRecord, write_safetensors
from trainwright.train.checkpoint.ranks import Ranks

INDEX = "index.json"
INDEX_VERSION = 1
WEIGHTS, STATE = "weights", "state"


def split_name(fqn: str) -> tuple[str, str]:
    """``weights/model.norm.weight`` -> ``("weights", "model.norm.weight")``."""
    group, _, name = fqn.partition("/")
    return group, name


def check_storable(tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError naming the first tensor that a safetensors file cannot hold."""
    for fqn, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{fqn} has dtype {tensor.dtype}, which safetensors cannot store; convert it first")
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "on the meta device" if tensor.is_meta else f"a {tensor.layout} tensor"
            raise CheckpointError(f"{fqn} is {kind}; only dense tensors with data can be stored")


@dataclass
class FilePlan:
    """One file of this rank: its name below the checkpoint and the shards in it."""

    name: str
    items: list[WriteItem]


@dataclass
class WritePlan:
    """What one rank writes; on rank 0 also the small files that describe the whole."""

    files: list[FilePlan]
    total_bytes: int  # tensor data of all ranks
    index_files: dict[str, bytes] = field(default_factory=dict)

    @property
    def items(self) -> list[WriteItem]:
        return [item for file in self.files for item in file.items]


class Planner:
    """Makes the write plan and keeps it while no rank's tensors change in name, shape, dtype or layout."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._local: list[WriteItem] | None = None
        self._plan: WritePlan | None = None
        self._dcp = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan(self, collect: Callable[[], dict[str, Tensor]]) -> WritePlan:
        """Collective. ``collect`` gives this rank's tensors by ``group/name``; its error reaches all ranks."""
        error: Exception | None = None
        items: list[WriteItem] = []
        try:
            tensors = collect()
            check_storable(tensors)
            self._dcp.set_up_planner(tensors, is_coordinator=self._ranks.leads)
            items = self._dcp.create_local_plan().items
        except Exception as caught:  # raised below, where the other ranks hear of it
            error = caught
        unchanged = error is None and self._plan is not None and items == self._local
        if self._ranks.agree(unchanged) and self._plan is not None:
            return self._plan
        self._local = self._plan = None

        def local() -> list[WriteItem]:
            if error is not None:
                raise error
            return items

        self._plan = self._ranks.deal(local, lambda all_items: _share_out(self._dcp, all_items))
        self._local = items
        return self._plan

    def tensor(self, item: WriteItem) -> Tensor:
        """The live data behind an item of the last plan."""
        return self._dcp.resolve_data(item)  # type: ignore[return-value]

    def release(self) -> None:
        """Drop the references to the tensors of the last save."""
        self._dcp.set_up_planner({}, is_coordinator=self._ranks.leads)


def _data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    return item.tensor_data


def _whole(item: WriteItem) -> bool:
    return _data(item).chunk.sizes == _data(item).size


def _check_same(all_items: list[list[WriteItem]]) -> None:
    """One name must be one tensor on all ranks; DCP would keep whichever comes first."""
    seen: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
    for rank, items in enumerate(all_items):
        for item in items:
            size, dtype = _data(item).size, _data(item).properties.dtype
            first, known_size, known_dtype = seen.setdefault(item.index.fqn, (rank, size, dtype))
            if (size, dtype) != (known_size, known_dtype):
                raise CheckpointError(
                    f"{item.index.fqn} is {list(known_size)} {known_dtype} on rank {first} and {list(size)} {dtype} "
                    f"on rank {rank}; state that differs between ranks goes into per_rank"
                )


def _share_out(planner: DefaultSavePlanner, all_items: list[list[WriteItem]]) -> list[WritePlan]:
    """On rank 0: DCP's global plan (each shard once, replicas spread evenly over ranks), then names of files."""
    _check_same(all_items)
    try:
        shared, metadata = planner.create_global_plan([SavePlan(items) for items in all_items])
    except ValueError as error:
        raise CheckpointError(f"the shards of the ranks do not make up whole tensors: {error}") from error

    plans = [WritePlan([], 0) for _ in shared]
    index: dict[str, Any] = {"version": INDEX_VERSION, WEIGHTS: {}, STATE: {}}
    for fqn, info in metadata.state_dict_metadata.items():
        if isinstance(info, TensorStorageMetadata):
            group, name = split_name(fqn)
            index[group][name] = {"dtype": DTYPES[info.properties.dtype], "shape": list(info.size), "shards": []}
    for group in (WEIGHTS, STATE):
        files = [(rank, items) for rank, plan in enumerate(shared) for items in _by_file(plan.items, group)]
        # Only a set of whole weights may be called model*.safetensors: other programs take such files for a model.
        whole = group == WEIGHTS and all(_whole(item) for _, items in files for item in items)
        for number, (rank, items) in enumerate(files, start=1):
            count = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 or not whole else ""
            name = f"{group}/{'model' if whole else 'shard'}{count}.safetensors"
            plans[rank].files.append(FilePlan(name, items))
            for item in items:
                chunk = _data(item).chunk
                entry = index[group][split_name(item.index.fqn)[1]]
                entry["shards"].append({"file": name, "offsets": list(chunk.offsets), "shape": list(chunk.sizes)})
        if whole and len(files) > 1:
            plans[0].index_files[f"{WEIGHTS}/model.safetensors.index.json"] = _hugging_face_index(plans, index)
    plans[0].index_files[INDEX] = dumps(index)
    total = sum(_bytes(item) for plan in plans for item in plan.items)
    for plan in plans:
        plan.total_bytes = total
    return plans


def _bytes(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize


def _by_file(items: list[WriteItem], group: str) -> list[list[WriteItem]]:
    """One rank's items of a group. A file's keys are names, so a second shard of one tensor takes a second file."""
    files: list[dict[str, WriteItem]] = []
    for item in items:
        data = _data(item)
        # A rank beyond a tensor's last row holds an empty shard of it; it would stand for nothing.
        empty = math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0
        if split_name(item.index.fqn)[0] != group or empty:
            continue
        file = next((f for f in files if item.index.fqn not in f), None)
        if file is None:
            files.append(file := {})
        file[item.index.fqn] = item
    return [list(file.values()) for file in files]


def _hugging_face_index(plans: list[WritePlan], index: dict[str, Any]) -> bytes:
    """The file that tells Hugging Face loaders which of several files holds a weight."""
    weights = {name: entry["shards"][0]["file"].removeprefix(f"{WEIGHTS}/") for name, entry in index[WEIGHTS].items()}
    size = sum(_bytes(i) for p in plans for f in p.files if f.name.startswith(f"{WEIGHTS}/") for i in f.items)
    return dumps({"metadata": {"total_size": size}, "weight_map": weights})


class HostBuffers:
    """Copies of this rank's shards in host memory, kept between saves so that a save allocates nothing."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def snapshot(self, plan: WritePlan, live: Callable[[WriteItem], Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copy every shard; returns when the copies are complete, so the caller may change the tensors at once."""
        copies: dict[MetadataIndex, Tensor] = {}
        on_gpu = False
        with torch.no_grad():
            for item in plan.items:
                source = live(item).detach()
                buffer = self._buffers.get(item.index)
                if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                    # Pinned memory lets copies from a GPU run at full speed, queued one behind the other.
                    buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
                buffer.copy_(source, non_blocking=source.is_cuda)
                on_gpu |= source.is_cuda
                copies[item.index] = buffer
        if on_gpu:
            torch.cuda.synchronize()
        self._buffers = copies  # buffers of tensors that are gone are freed here
        return copies


def write_plan(folder: Path, plan: WritePlan, data: Callable[[WriteItem], Tensor]) -> dict[str, FileRecord]:
    """Write and fsync this rank's tensor files. Raises OSError."""
    records = {}
    for file in plan.files:
        named = [(split_name(item.index.fqn)[1], data(item).detach()) for item in file.items]
        offsets = {split_name(item.index.fqn)[1]: list(_data(item).chunk.offsets) for item in file.items}
        whole = all(_whole(item) for item in file.items)
        records[file.name] = write_safetensors(folder / file.name, named, None if whole else offsets)
    return records
