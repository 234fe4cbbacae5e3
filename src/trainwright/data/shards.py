"""Token shards on disk: memory-mapped files of ids with an index of documents.

A folder holds

- ``tokens-00000.bin``, ...: ids of whole documents one after the other, little-endian uint16 or uint32; a file is at
  most ``shard_bytes`` long, or one document;
- ``lengths.bin`` int32 [N], ``starts.bin`` int64 [N] (in tokens, over all shards), ``bytes.bin`` int64 [N] (UTF-8
  bytes of each document's text);
- ``ids.bin`` (document ids, UTF-8) and ``id_ends.bin`` int64 [N];
- ``meta.json``: dtype, sizes and checksums of all of these, and what the tokens were made from. It is written last.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.core.errors import DataError
from trainwright.data.cache import DamagedCache
from trainwright.data.dataset import TokenDataset

FORMAT = 1
SHARD_BYTES = 256 << 20
INDEX: dict[str, np.dtype[Any]] = {
    "lengths.bin": np.dtype("<i4"),
    "starts.bin": np.dtype("<i8"),
    "bytes.bin": np.dtype("<i8"),
    "id_ends.bin": np.dtype("<i8"),
    "ids.bin": np.dtype("u1"),
}
# A mapping holds a file descriptor, and a process often has 1024 of those.
OPEN_SHARDS = 128


class _File:
    """A file that knows its size and hash; on the disk when closed."""

    def __init__(self, path: Path):
        import xxhash

        self.path, self.size, self.hash = path, 0, xxhash.xxh3_64()
        self._handle = path.open("wb", buffering=1 << 20)

    def write(self, data: bytes | memoryview) -> None:
        self._handle.write(data)
        self.hash.update(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        return {"file": self.path.name, "bytes": self.size, "xxh3": self.hash.hexdigest()}

    def abandon(self) -> None:
        self._handle.close()


class ShardWriter:
    """Writes documents into a folder, in order; memory does not grow with their number.

    ``vocab_size`` decides between uint16 and uint32. Ids outside of it raise DataError.
    """

    def __init__(self, folder: Path, vocab_size: int, shard_bytes: int = SHARD_BYTES):
        import xxhash

        self.folder, self.vocab_size, self.shard_bytes = folder, vocab_size, shard_bytes
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.num_docs = self.num_tokens = 0
        self._content = xxhash.xxh3_128()
        self._shards: list[dict[str, Any]] = []
        self._shard: _File | None = None
        self._index = {name: _File(folder / name) for name in INDEX}

    def write(self, docs: Sequence[np.ndarray], ids: Sequence[str], text_bytes: Sequence[int]) -> None:
        """Append documents: int32 ids each, their names, and the UTF-8 length of their texts."""
        if not docs:
            return
        lengths = np.array([len(d) for d in docs], dtype=np.int64)
        if lengths.max() > np.iinfo(np.int32).max:
            raise DataError(
                f"document {ids[int(lengths.argmax())]} has {lengths.max()} tokens; at most 2**31 - 1 are possible"
            )
        flat = np.concatenate(docs) if len(docs) > 1 else docs[0]
        if len(flat) and not (flat.min() >= 0 and flat.max() < self.vocab_size):
            raise DataError(
                f"the tokenizer made an id outside 0..{self.vocab_size - 1} (its vocab_size is {self.vocab_size})"
            )
        ends = np.cumsum(lengths)
        self._hash(flat, lengths, ends)
        self._write_tokens(flat.astype(self.dtype), ends)
        names = [i.encode("utf-8", "surrogateescape") for i in ids]
        name_ends = self._index["ids.bin"].size + np.cumsum([len(n) for n in names], dtype=np.int64)
        columns = {
            "lengths.bin": lengths,
            "starts.bin": self.num_tokens + ends - lengths,
            "bytes.bin": np.array(text_bytes, dtype=np.int64),
            "id_ends.bin": name_ends,
        }
        for name, values in columns.items():
            self._index[name].write(values.astype(INDEX[name]).tobytes())
        self._index["ids.bin"].write(b"".join(names))
        self.num_docs += len(docs)
        self.num_tokens += int(ends[-1])

    def _hash(self, flat: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> None:
        # As ArrayDataset does, so that equal documents have equal fingerprints wherever they are held.
        data = memoryview(np.ascontiguousarray(flat, dtype="<i4").data).cast("B")
        start = 0
        for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
            self._content.update(length.to_bytes(8, "little"))
            self._content.update(data[4 * start : 4 * end])
            start = end

    def _write_tokens(self, flat: np.ndarray, ends: np.ndarray) -> None:
        """Documents go whole into one shard, which is closed when the next would not fit."""
        at, first, count = 0, 0, len(ends)
        while first < count:
            room = (self.shard_bytes - (self._shard.size if self._shard else 0)) // self.dtype.itemsize
            fitting = int(np.searchsorted(ends, at + room, side="right"))
            if fitting <= first:
                if self._shard is not None and self._shard.size:
                    self._close_shard()
                    continue
                fitting = first + 1  # longer than a shard: a shard of its own
            if self._shard is None:
                self._shard = _File(self.folder / f"tokens-{len(self._shards):05d}.bin")
            end = int(ends[fitting - 1])
            self._shard.write(flat[at:end].tobytes())
            at, first = end, fitting

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shards.append(self._shard.close())
            self._shard = None

    def close(self, **meta: Any) -> None:
        """Finish the files; ``meta`` goes into meta.json."""
        self._close_shard()
        record = {
            "format": FORMAT,
            "dtype": self.dtype.str,
            "vocab_size": self.vocab_size,
            "num_docs": self.num_docs,
            "num_tokens": self.num_tokens,
            "fingerprint": self._content.hexdigest(),
            "index": {name: file.close() for name, file in self._index.items()},
            "shards": self._shards,
            **meta,
        }
        file = _File(self.folder / "meta.json")
        file.write((json.dumps({**record, "xxh3": _meta_hash(record)}, indent=1) + "\n").encode())
        file.close()

    def abandon(self) -> None:
        """Close the files of a folder that will not be used."""
        for file in (*self._index.values(), *([self._shard] if self._shard else [])):
            file.abandon()


def _meta_hash(record: dict[str, Any]) -> str:
    import xxhash

    return xxhash.xxh3_64(json.dumps(record, sort_keys=True).encode()).hexdigest()


class ShardedDataset(TokenDataset):
    """Documents from a folder of token shards, memory-mapped.

    A pickle holds path and name only; whoever unpickles it maps the files anew. ``check`` compares the sizes of all
    files and the checksums of the index, and raises DamagedCache where they differ; :meth:`verify` reads the tokens
    too.
    """

    def __init__(self, folder: str | Path, check: bool = True):
        self.folder = Path(folder)
        self.meta = self._read_meta()
        try:
            if check:
                self._check()
            self._open()
        except FileNotFoundError as error:
            raise DamagedCache(f"{Path(error.filename).name} is missing") from error

    def _read_meta(self) -> dict[str, Any]:
        try:
            meta = json.loads((self.folder / "meta.json").read_text())
        except FileNotFoundError as error:
            raise DamagedCache("meta.json is missing") from error
        except ValueError as error:
            raise DamagedCache("meta.json cannot be parsed") from error
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise DamagedCache("meta.json is of another format")
        if meta.pop("xxh3", None) != _meta_hash(meta):
            raise DamagedCache("meta.json does not match its checksum")
        return meta

    def _check(self) -> None:
        import xxhash

        for entry in [*self.meta["index"].values(), *self.meta["shards"]]:
            size = (self.folder / entry["file"]).stat().st_size
            if size != entry["bytes"]:
                raise DamagedCache(f"{entry['file']} has {size} bytes instead of {entry['bytes']}")
        for name, entry in self.meta["index"].items():
            values = self._map(name, np.dtype("u1"))
            if xxhash.xxh3_64(values.data).hexdigest() != entry["xxh3"]:
                raise DamagedCache(f"{name} does not match its checksum")

    def verify(self) -> None:
        """Read every token file and compare checksums. Raises DataError naming the first that differs."""
        import xxhash

        for entry in self.meta["shards"]:
            digest = xxhash.xxh3_64()
            with (self.folder / entry["file"]).open("rb") as handle:
                while block := handle.read(1 << 22):
                    digest.update(block)
            if digest.hexdigest() != entry["xxh3"]:
                raise DataError(
                    f"{self.folder / entry['file']} does not match its checksum; remove the folder to rebuild it"
                )

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        path = self.folder / name
        if not path.stat().st_size:
            return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
        # As a plain ndarray: slicing a np.memmap costs several times as much.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))

    def _open(self) -> None:
        self.name = str(self.meta.get("name", self.folder.name))
        self.fingerprint = self.meta["fingerprint"]
        self.dtype = np.dtype(self.meta["dtype"])
        self.vocab_size = int(self.meta["vocab_size"])
        self.lengths = self._map("lengths.bin", INDEX["lengths.bin"])
        self.byte_counts = self._map("bytes.bin", INDEX["bytes.bin"])  # int64 [num_docs], UTF-8 bytes of each text
        self._starts = self._map("starts.bin", INDEX["starts.bin"])
        self._id_ends = self._map("id_ends.bin", INDEX["id_ends.bin"])
        self._ids = self._map("ids.bin", INDEX["ids.bin"])
        sizes = [s["bytes"] // self.dtype.itemsize for s in self.meta["shards"]]
        self._shard_starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self._maps: OrderedDict[int, np.ndarray] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "name": self.name, "columns": self.columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder = state["folder"]
        try:
            self.meta = self._read_meta()
            self._open()
        except (DamagedCache, OSError) as error:
            raise DataError(f"token cache {self.folder} went away or changed while in use ({error})") from error
        self.name = state["name"]
        self.columns = state.get("columns")

    @property
    def num_tokens(self) -> int:
        return int(self.meta["num_tokens"])

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.byte_counts.sum())

    @property
    def empty_documents(self) -> int:
        """Documents of the source without text, which were skipped (over both splits)."""
        return int(self.meta.get("empty_documents", 0))

    def doc_id(self, doc: int) -> str:
        """The source's id of document ``doc``."""
        doc = range(self.num_docs)[doc]
        start = int(self._id_ends[doc - 1]) if doc else 0
        return self._ids[start : int(self._id_ends[doc])].tobytes().decode("utf-8", "surrogateescape")

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ids ``[start:stop]`` of document ``doc``: a read-only view of the mapped file, uint16 or uint32."""
        first, length = int(self._starts[doc]), int(self.lengths[doc])
        shard = int(np.searchsorted(self._shard_starts, first, side="right")) - 1
        offset = first - int(self._shard_starts[shard])
        return self._shard(shard)[offset : offset + length][start:stop]

    def _shard(self, shard: int) -> np.ndarray:
        found = self._maps.get(shard)
        if found is None:
            found = self._map(self.meta["shards"][shard]["file"], self.dtype)
            self._maps[shard] = found
            if len(self._maps) > OPEN_SHARDS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(shard)
        return found
