"""Stages that compare all documents with each other, as jobs of ray_jobs: one shuffle by hash for equal ids and texts,
MinHash signatures mapped, bands shuffled by their keys and pairs shuffled to be verified for near copies.

The rules are those of dedup and filters, on the same numbers, so the results are theirs:

    chunk -> entries (signatures, keys of bands, shingles), kept in the object store
    entries -> (band, range of keys) -> candidate pairs
    pairs + entries -> similarity of each pair
    pairs that hold -> clusters (in this process: 75 bytes a document, 100 a pair) -> chunks without copies
"""

from __future__ import annotations

import copy
import heapq
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainwright.data.build.clusters import Clusters, Pairs, bucket_pairs, cluster, pair_codes
from trainwright.data.build.dedup import ExactDedup, NearDedup, _Beside, _Dedup
from trainwright.data.build.documents import Document
from trainwright.data.build.filters import UniqueIds
from trainwright.data.build.index import Entries, Index, hash_texts, verified
from trainwright.data.build.minhash import jaccard
from trainwright.data.build.stage import Stage
from trainwright.data.build.statistics import Drop, Statistics

if TYPE_CHECKING:
    from trainwright.data.build.ray_jobs import Chunks, Piece, Run

KEYS_IN_A_GROUP = 1 << 22  # of one band, sorted by one task
PAIRS_IN_A_GROUP = 1 << 14  # verified by one task
CHUNKS_IN_A_BATCH = 32
_NUMBERED = re.compile(r"#\d+\Z")


# -- equal ids, equal texts --------------------------------------------------------------------------------------------


def _later_copies(run: Run, data: Chunks, key: Callable[[Document], str]) -> NDArray[np.int64]:
    """Positions of documents whose key another document had before, ascending; an empty key counts for none."""
    if not data.count:
        return np.zeros(0, np.int64)
    groups = max(run.width, -(-data.count // KEYS_IN_A_GROUP))
    starts = run.share(data.starts)
    rows = data.dataset.flat_map(partial(_hash_rows, key=key, starts=starts, groups=groups))
    found = rows.groupby("group", num_partitions=min(groups, run.width)).map_groups(_repeated, batch_format="pyarrow")
    return np.sort(np.concatenate([_int64(r["places"]) for r in found.iter_rows()] or [np.zeros(0, np.int64)]))


def _hash_rows(row: Any, key: Callable[[Document], str], starts: Any, groups: int) -> list[dict[str, Any]]:
    import ray

    documents = pickle.loads(row["documents"])
    start = ray.get(starts)[row["part"], row["chunk"]]
    keys = [key(d) for d in documents]
    places = np.array([start + i for i, k in enumerate(keys) if k], np.int64)
    hashes = hash_texts([k for k in keys if k])
    group = (hashes % np.uint64(groups)).astype(np.int64)
    held = np.unique(group).tolist() or [0]  # a row at least: an empty dataset has no columns
    return [{"group": g, "keys": hashes[group == g].tobytes(), "places": places[group == g].tobytes()} for g in held]


def _repeated(group: Any) -> Any:
    import pyarrow as pa

    keys, places = _joined(group, "keys", np.uint64), _joined(group, "places", np.int64)
    order = np.lexsort((places, keys))
    keys, places = keys[order], places[order]
    return pa.table({"places": [places[1:][keys[1:] == keys[:-1]].tobytes()]})


def unique_ids(run: Run, stage: UniqueIds, data: Chunks) -> Chunks:
    again = _later_copies(run, data, _id)
    if stage.on_duplicate == "refuse" and len(again):
        (document,) = _at(run, data, again[:1]).values()
        raise stage._refusal(document)
    names = _new_names(run, data, again) if stage.on_duplicate == "rename" else {int(p): None for p in again}
    blank = UniqueIds(stage.on_duplicate)
    apply = partial(_apply_names, stage=blank, names=run.share(names))
    return data.map(apply, stage.statistics.merge, data.starts)


def _apply_names(documents: list[Document], piece: Piece, stage: UniqueIds, names: Any) -> tuple[list[Document], Any]:
    import ray

    stage.statistics = Statistics(stage.name)
    given: Mapping[int, str | None] = ray.get(names)
    kept = []
    for place, document in enumerate(documents, piece.start):
        stage.statistics.see(document.text)
        if place in given:
            stage.statistics.counts["duplicate ids"] += 1
            name = given[place]
            if name is None:
                stage.statistics.drop(document, Drop("duplicate id"))
                continue
            document = stage._renamed(document, name)
        stage.statistics.keep(document)
        kept.append(document)
    return kept, stage.statistics


def _new_names(run: Run, data: Chunks, again: NDArray[np.int64]) -> dict[int, str | None]:
    """Names for documents whose id was there before: ``id#2``, or the next number that no document before it has.

    An id that looks like such a name matters as well, since a new name may take it first.
    """
    wanted = run.share((data.starts, again))
    rows = data.dataset.map(partial(_id_row, wanted=wanted))
    waiting: list[tuple[int, str]] = []  # documents that need a name, by place
    first: dict[int, tuple[int, str]] = {}  # hash of an id that looks like a new name -> where it comes first
    for row in rows.iter_rows():
        ids, named = pickle.loads(row["ids"])
        waiting += ids
        for place, name in named:
            first.setdefault(_hash(name), (place, name))
    heapq.heapify(waiting)
    given: dict[int, str | None] = {}
    taken: set[int] = set()
    while waiting:
        place, name = heapq.heappop(waiting)
        number = 2
        while (h := _hash(new := f"{name}#{number}")) in taken or first.get(h, (place,))[0] < place:
            number += 1
        taken.add(h)
        given[place] = new
        if h in first:  # the document of that id comes later, and too late now
            heapq.heappush(waiting, first[h])
    return given


def _id_row(row: Any, wanted: Any) -> dict[str, Any]:
    import ray

    starts, again = ray.get(wanted)
    start = starts[row["part"], row["chunk"]]
    documents = pickle.loads(row["documents"])
    here = again[np.searchsorted(again, start) : np.searchsorted(again, start + len(documents))]
    ids = [(int(p), documents[int(p) - start].id) for p in here]
    named = [(start + i, d.id) for i, d in enumerate(documents) if _NUMBERED.search(d.id)]
    return {"ids": pickle.dumps((ids, named))}


def _id(document: Document) -> str:
    return document.id


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def exact_dedup(run: Run, stage: ExactDedup, data: Chunks) -> Chunks:
    if stage.keep != "first" or stage.priority:
        return _dedup(run, stage, data)
    again = _later_copies(run, data, stage._compared)
    apply = partial(_drop_copies, name=stage.name, reason=stage._reason, again=run.share(again))
    return data.map(apply, stage.statistics.merge, data.starts)


def _drop_copies(
    documents: list[Document], piece: Piece, name: str, reason: str, again: Any
) -> tuple[list[Document], Any]:
    import ray

    statistics = Statistics(name)
    places = ray.get(again)
    gone = set(places[np.searchsorted(places, piece.start) : np.searchsorted(places, piece.start + len(documents))])
    kept = []
    for place, document in enumerate(documents, piece.start):
        statistics.see(document.text)
        if place in gone:
            statistics.drop(document, Drop(reason))
        else:
            statistics.keep(document)
            kept.append(document)
    return kept, statistics


# -- copies by an index ------------------------------------------------------------------------------------------------


def near_dedup(run: Run, stage: NearDedup, data: Chunks) -> Chunks:
    return _dedup(run, stage, data)


def _dedup(run: Run, stage: _Dedup, data: Chunks) -> Chunks:
    starts = run.share(data.starts)
    make = partial(_entry_row, make=stage._entries(), local=stage.scope == "local", starts=starts)
    entries = data.dataset.map(make).materialize()
    if stage.work_dir is not None:
        stage.work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dedup-", dir=stage.work_dir or run.work_dir) as folder:
        with Index(Path(folder), 0, 0, False) as index:
            for row in entries.select_columns(["about"]).iter_rows():
                index.add(*pickle.loads(row["about"]))
        job = partial(_clusters, run=run, stage=stage, rows=entries)
        keeper, similarity, sizes = stage._decide(index, job)
        beside = _Beside(stage.statistics.samples_each, keeper, np.array(index.table()["text"]))
    apply = partial(_apply, stage=_blank(stage), decision=run.share((keeper, sizes, beside.wanted)))
    done = data.map(apply, partial(_read_applied, stage=stage, beside=beside), data.starts).settled()
    stage._show(beside, similarity)
    return done


def _entry_row(row: Any, make: Callable[[list[str]], Entries], local: bool, starts: Any) -> dict[str, Any]:
    """What is remembered of a chunk, and apart from it what this process is to know (``about``)."""
    import ray

    documents = pickle.loads(row["documents"])
    texts, sources = [d.text for d in documents], [d.source for d in documents]
    if not documents:
        return {"start": -1, "keys": b"", "signatures": b"", "shingles": b"", "counts": b"", "about": pickle.dumps(
            (Entries(*(np.zeros((0, 0), np.uint64), np.zeros((0, 0), np.uint32)), np.zeros(0, np.uint32),
                     np.zeros(0, np.int64), np.zeros(0, np.uint64), 0), np.zeros(0, np.uint64), [], []))}  # fmt: skip
    made = make(texts)
    keys = made.keys
    if local:
        salt = hash_texts(sources)[:, None]
        keys = (keys ^ salt) * np.uint64(0x9FB21C651E98DF25)
    lengths = np.array([len(t) for t in texts], np.int64)
    none = np.zeros(0, np.uint32)
    about = Entries(np.zeros((len(texts), 0), np.uint64), none, none, made.counts, made.text, made.short)
    return {
        "start": ray.get(starts)[row["part"], row["chunk"]],
        "keys": np.ascontiguousarray(keys).tobytes(),
        "signatures": made.signatures.tobytes(),
        "shingles": made.shingles.tobytes(),
        "counts": made.counts.astype(np.int64).tobytes(),
        "about": pickle.dumps((about, hash_texts([d.id for d in documents]), sources, lengths)),
    }


def _clusters(
    index: Index, order: NDArray[np.int64], eligible: NDArray[np.bool_], run: Run, stage: _Dedup, rows: Any
) -> Clusters:
    rank = np.empty(index.count, np.int64)
    rank[order] = np.arange(index.count)
    verify = partial(_verify, run=run, stage=stage, order=order, rows=rows)
    steps = stage.max_steps if isinstance(stage, NearDedup) else None
    find = partial(_candidates, run=run, bands=stage._bands, rank=run.share(rank), rows=rows)
    return cluster(index.count, lambda: (), verify, steps, eligible, find)


def _candidates(
    alive: NDArray[np.bool_], run: Run, bands: int, rank: Any, rows: Any
) -> tuple[NDArray[np.uint64], bool]:
    if not alive.any():
        return np.zeros(0, np.uint64), False
    parts = max(1, -(-int(alive.sum()) // KEYS_IN_A_GROUP))
    split = partial(_band_rows, bands=bands, parts=parts, shared=run.share((rank, run.share(alive))))
    found = (
        rows.select_columns(["start", "keys"])
        .map_batches(split, batch_size=CHUNKS_IN_A_BATCH, batch_format="pyarrow")
        .groupby("group", num_partitions=min(bands * parts, run.width))
        .map_groups(_group_pairs, batch_format="pyarrow")
    )
    codes, cut = [np.zeros(0, np.uint64)], False
    for row in found.iter_rows():
        codes.append(np.frombuffer(row["codes"], np.uint64))
        cut = cut or bool(row["cut"])
    return np.unique(np.concatenate(codes)), cut


def _band_rows(batch: Any, bands: int, parts: int, shared: Any) -> Any:
    """Keys of some chunks by band and range of the key."""
    import pyarrow as pa
    import ray

    rank, alive = (ray.get(ref) for ref in ray.get(shared))
    members: list[NDArray[np.int64]] = []
    keys: list[NDArray[np.uint64]] = []
    for start, data in zip(batch.column("start").to_pylist(), batch.column("keys").to_pylist(), strict=True):
        if start < 0:
            continue
        here = np.frombuffer(data, np.uint64).reshape(-1, bands)
        number = rank[start : start + len(here)]
        held = alive[number]
        members.append(number[held])
        keys.append(here[held])
    member = np.concatenate([np.zeros(0, np.int64), *members])
    key = np.concatenate([np.zeros((0, bands), np.uint64), *keys])
    wide = np.uint64((1 << 64) // parts + 1) if parts > 1 else None
    rows: dict[str, list[Any]] = {"group": [], "keys": [], "members": []}
    for band in range(bands):
        mine = np.ascontiguousarray(key[:, band])
        part = np.zeros(len(mine), np.int64) if wide is None else (mine // wide).astype(np.int64)
        for p in np.unique(part).tolist():
            rows["group"].append(band * parts + p)
            rows["keys"].append(mine[part == p].tobytes())
            rows["members"].append(member[part == p].tobytes())
    return pa.table(rows, schema=pa.schema([("group", pa.int64()), ("keys", pa.binary()), ("members", pa.binary())]))


def _group_pairs(group: Any) -> Any:
    import pyarrow as pa

    members, keys = _joined(group, "members", np.int64), _joined(group, "keys", np.uint64)
    order = np.argsort(members, kind="stable")
    pairs, cut = bucket_pairs(keys[order], members[order])
    return pa.table({"codes": [np.unique(pair_codes(pairs)).tobytes()], "cut": [cut]})


def _verify(pairs: Pairs, run: Run, stage: _Dedup, order: NDArray[np.int64], rows: Any) -> NDArray[np.float64]:
    """Similarity of each pair: both documents' entries are brought to the task that compares them."""
    if not isinstance(stage, NearDedup) or not len(pairs):
        return np.ones(len(pairs))
    sides = order[pairs].ravel()  # [2 x pairs] positions; side s belongs to pair s // 2
    by_place = np.argsort(sides, kind="stable")
    shared = run.share((sides[by_place], by_place))
    groups = -(-len(pairs) // PAIRS_IN_A_GROUP)
    width = stage._permutations
    found = (
        rows.select_columns(["start", "signatures", "shingles", "counts"])
        .map_batches(partial(_side_rows, width=width, shared=shared, exact=stage.verify == "exact"),
                     batch_size=1, batch_format="pyarrow")
        .groupby("group", num_partitions=min(groups, run.width))
        .map_groups(partial(_compare, width=width, threshold=stage.threshold, how=stage.verify),
                    batch_format="pyarrow")
    )  # fmt: skip
    out = np.full(len(pairs), np.nan)
    for row in found.iter_rows():
        out[_int64(row["pairs"])] = np.frombuffer(row["found"], np.float64)
    if np.isnan(out).any():
        raise RuntimeError("pairs were lost on their way through Ray")
    return out


def _side_rows(batch: Any, width: int, shared: Any, exact: bool) -> Any:
    """Signatures and shingle sets of a chunk's documents, by the group of the pair that asks for them."""
    import pyarrow as pa
    import ray

    places, side_at = ray.get(shared)
    kinds = [("group", pa.int64()), ("sides", pa.binary()), ("signatures", pa.binary()), ("shingles", pa.binary()),
             ("counts", pa.binary())]  # fmt: skip
    rows: dict[str, list[Any]] = {name: [] for name, _ in kinds}
    start = batch.column("start")[0].as_py()
    if start >= 0:
        signatures = np.frombuffer(batch.column("signatures")[0].as_py(), np.uint32).reshape(-1, width)
        shingles = np.frombuffer(batch.column("shingles")[0].as_py(), np.uint32)
        ends = np.cumsum(np.frombuffer(batch.column("counts")[0].as_py(), np.int64))
        low, high = np.searchsorted(places, [start, start + len(signatures)])
        local, sides = places[low:high] - start, side_at[low:high]
        group = sides // (2 * PAIRS_IN_A_GROUP)
        empty = np.zeros(0, np.uint32)
        for g in np.unique(group).tolist():
            mine = np.flatnonzero(group == g)
            sets = [np.unique(shingles[(ends[d - 1] if d else 0) : ends[d]]) if exact else empty for d in local[mine]]
            rows["group"].append(g)
            rows["sides"].append(sides[mine].astype(np.int64).tobytes())
            rows["signatures"].append(signatures[local[mine]].tobytes())
            rows["shingles"].append(np.concatenate(sets).tobytes())
            rows["counts"].append(np.array([len(s) for s in sets], np.int64).tobytes())
    return pa.table(rows, schema=pa.schema(kinds))


def _compare(group: Any, width: int, threshold: float, how: str) -> Any:
    import pyarrow as pa

    sides, counts = _joined(group, "sides", np.int64), _joined(group, "counts", np.int64)
    signatures = _joined(group, "signatures", np.uint32).reshape(-1, width)
    shingles, ends = _joined(group, "shingles", np.uint32), np.cumsum(counts)
    order = np.argsort(sides, kind="stable")  # first, second, first, second, ...
    first, second = order[::2], order[1::2]

    def exactly(k: int) -> float:
        a, b = (shingles[ends[i] - counts[i] : ends[i]] for i in (first[k], second[k]))
        return jaccard(a, b)

    found = verified(signatures[first], signatures[second], threshold, how, exactly)
    return pa.table({"pairs": [(sides[first] // 2).tobytes()], "found": [found.tobytes()]})


def _blank(stage: _Dedup) -> _Dedup:
    """The stage for a task that applies its decision."""
    blank = copy.copy(stage)
    blank.statistics = Statistics(stage.name)
    return blank


def _apply(documents: list[Document], piece: Piece, stage: _Dedup, decision: Any) -> tuple[list[Document], Any]:
    import ray

    keeper, sizes, wanted = ray.get(decision)
    stage.statistics = Statistics(stage.name)
    shown, kept = [], []
    for place, document in enumerate(documents, piece.start):
        if place in wanted:
            shown.append((place, document))
        passed = stage._passed(document, place, keeper, sizes)
        if passed is not None:
            kept.append(passed)
    return kept, (stage.statistics, shown)


def _read_applied(note: tuple[Statistics, Iterable[tuple[int, Document]]], stage: _Dedup, beside: _Beside) -> None:
    stage.statistics.merge(note[0])
    for place, document in note[1]:
        beside.see(place, document)


def _at(run: Run, data: Chunks, places: NDArray[np.int64]) -> dict[int, Document]:
    """Documents by position, few of them."""
    found: dict[int, Document] = {}
    wanted = set(places.tolist())
    for at, document in enumerate(run.documents(data)):
        if at in wanted:
            found[at] = document
            if len(found) == len(wanted):
                break
    return found


def _joined(group: Any, name: str, kind: Any) -> NDArray[Any]:
    return np.frombuffer(b"".join(group.column(name).to_pylist()), kind)


def _int64(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, np.int64)


Job = Callable[["Run", Any, "Chunks"], "Chunks"]
JOBS: dict[type[Stage], Job] = {UniqueIds: unique_ids, ExactDedup: exact_dedup, NearDedup: near_dedup}
