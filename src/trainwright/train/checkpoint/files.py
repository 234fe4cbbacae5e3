"""Durable files: written once, hashed while written, fsynced; and the safetensors format, streamed.

``safetensors.torch.save_file`` builds or copies all data first and does not sync. Here a file goes from the tensors'
own memory to the disk in pieces, with its checksum taken on the way, so that no second copy of the model is made
and nothing has to be read back.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint.codec import loads

HASH = "xxh3_128"
PIECE = 8 << 20  # bytes per write: long enough to be fast, short enough that threads take turns

# Names of the safetensors format. uint8 views of these are written little-endian, as the format asks.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file."""

    size: int  # bytes
    checksum: str  # hex digest by HASH


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Create ``path`` (which must not exist), write ``chunks`` and fsync. Raises OSError."""
    hasher, size = xxhash.xxh3_128(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                hasher.update(piece)
                size += len(piece)
                while piece:
                    piece = piece[os.write(fd, piece) :]
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or str(path)  # write and fsync know only the descriptor
        raise
    finally:
        os.close(fd)
    return FileRecord(size, hasher.hexdigest())


def checksum_file(path: Path) -> str:
    """Digest of a file's content."""
    hasher = xxhash.xxh3_128()
    buffer = bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
    return hasher.hexdigest()


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable: a file's own fsync does not cover its name."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements as bytes, row-major; a view where it is contiguous and on the CPU."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write_safetensors(
    path: Path, tensors: Sequence[tuple[str, Tensor]], offsets: dict[str, list[int]] | None = None
) -> FileRecord:
    """Write ``(name, tensor)`` pairs as a safetensors file.

    ``offsets`` says where in its whole tensor each one lies; it goes into the header the way torch's
    ``HuggingFaceStorageWriter`` puts it, so that torch's reader and consolidation take such files too.
    """
    # Wide elements first, then by name: every tensor is aligned to its element, as the format's own writer does it.
    ordered = sorted(tensors, key=lambda item: (-item[1].dtype.itemsize, item[0]))
    metadata = {"format": "pt"}
    if offsets is not None:
        metadata["DCP_SHARDING_INFO"] = json.dumps({name: {"saved_offsets": offsets[name]} for name, _ in ordered})
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, tensor in ordered:
        end = position + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterable[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in ordered:
            yield tensor_bytes(tensor)

    return write_file(path, chunks())


def check_space(directory: Path, needed: int) -> None:
    """Raise CheckpointError if ``directory``'s file system has less than ``needed`` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"no space for a checkpoint in {directory}: {human(needed)} needed ({needed} bytes), {human(free)} free "
            f"({free} bytes); free some space, lower checkpoint.keep or set checkpoint.dir"
        )


def disk_error(error: OSError, directory: Path, needed: int) -> CheckpointError:
    """An OSError of a save as one clear message."""
    path = error.filename or directory
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = shutil.disk_usage(directory).free
            room = f"{human(needed)} needed ({needed} bytes), {human(free)} free ({free} bytes)"
        except OSError:  # the disk went away with it; what is known is said
            room = f"{human(needed)} needed ({needed} bytes)"
        return CheckpointError(
            f"the disk is full: {error.strerror} while writing a checkpoint to {path}: {room}; "
            f"older checkpoints are untouched; free some space, lower checkpoint.keep or set checkpoint.dir"
        )
    return CheckpointError(f"cannot write a checkpoint to {path}: {error.strerror or error}")


def read_json(path: Path) -> Any:
    """Parsed JSON of a file, still encoded. Raises CheckpointError that names it."""
    try:
        return loads(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def human(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
