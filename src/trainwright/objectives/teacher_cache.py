"""A teacher's top-K labels of every token of a dataset, kept beside its token shards.

A folder holds ``ids.bin`` (uint16 or uint32 ``[num_tokens, K]``), ``probs.bin`` (uint16 ``[num_tokens, K]`` in units
of ``1 / PROB_UNIT``, rounded down, softened by ``rho``) and ``meta.json``. Row t of a document is the teacher's
distribution of token t + 1. Rounding down leaves what is cut off to the bucket of the other ids, so that the bound on
the gradient's error, twice the mass that the K do not hold, is of what is stored and counts the rounding in.

Documents are shown to the teacher whole; those longer than a row in pieces of a row.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.batchers.best_fit import BestFitConfig
from trainwright.data.cache import DamagedCache, build_once
from trainwright.data.dataset import TokenDataset
from trainwright.data.packing import Segments, assemble
from trainwright.models.base import Hidden, LanguageModel
from trainwright.models.decoder import head_logits
from trainwright.objectives.distillation import PROB_UNIT, soften
from trainwright.objectives.linear_cross_entropy import chunk_rows

log = logging.getLogger("trainwright")
FORMAT = 1
BATCH_TOKENS = 8192


def passes(
    model: LanguageModel, dataset: TokenDataset, seq_len: int, pad_id: int
) -> Iterator[tuple[list[Segments], Batch, Hidden]]:
    """All documents of ``dataset`` through ``model``, in batches of packed rows: what lies in each row, the batch on
    the model's device, and the final hidden states. Memory does not grow with the dataset but for the plan, 16 bytes a
    document."""
    plan = BestFitConfig().plan(dataset.lengths, seq_len, None)
    device = next(model.parameters()).device
    step = max(1, BATCH_TOKENS // seq_len)
    for start in range(0, plan.num_rows, step):
        rows = [plan.segments(r) for r in range(start, min(start + step, plan.num_rows))]
        batch = assemble([(dataset, s) for s in rows], seq_len, pad_id).to(device)
        with torch.no_grad():
            hidden = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids, head_fn=lambda h: h)
        yield rows, batch, hidden


def spread(rows: list[Segments], firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each token of ``rows`` lies: its row and slot in the batch ``[n, 2]``, and its number among all tokens of
    the dataset ``[n]``, whose documents begin at ``firsts``."""
    here: list[np.ndarray] = []
    there: list[np.ndarray] = []
    for r, (docs, starts, stops) in enumerate(rows):
        at = 0
        for doc, start, stop in zip(docs.tolist(), starts.tolist(), stops.tolist(), strict=True):
            n = stop - start
            here.append(np.stack([np.full(n, r), np.arange(at, at + n)], 1))
            there.append(np.arange(firsts[doc] + start, firsts[doc] + stop))
            at += n
    return np.concatenate(here), np.concatenate(there)


def first_tokens(dataset: TokenDataset) -> np.ndarray:
    """int64 ``[num_docs]``: where each document begins, of all tokens laid end to end."""
    ends = np.cumsum(dataset.lengths, dtype=np.int64)
    return ends - dataset.lengths


def chunks(hidden: Hidden, rows: Tensor, slots: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Float32 logits ``[C, V]`` of the positions ``(rows, slots)``, a chunk at a time."""
    vocab = hidden.head.weight.shape[0]
    step = chunk_rows(len(rows), vocab)
    for start in range(0, len(rows), step):
        part = slice(start, min(start + step, len(rows)))
        states = hidden.states[rows[part], slots[part]]
        with torch.no_grad():
            yield part, head_logits(Hidden(states, hidden.head)).float()


class TopKColumns:
    """Kept labels of one dataset, memory-mapped: what :meth:`TokenDataset.attach` takes."""

    def __init__(self, folder: Path, dataset_lengths: np.ndarray | None = None):
        self.folder = folder
        try:
            self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
            tokens, k = self.meta["tokens"], self.meta["top_k"]
            self._map(tokens, k)
        except (OSError, ValueError, KeyError) as error:
            raise DamagedCache(f"the kept labels cannot be read ({error})") from error
        self.firsts = np.zeros(0, np.int64) if dataset_lengths is None else self._first(dataset_lengths)

    @staticmethod
    def _first(lengths: np.ndarray) -> np.ndarray:
        return np.cumsum(lengths, dtype=np.int64) - lengths

    def _map(self, tokens: int, k: int) -> None:
        self.ids = np.memmap(self.folder / "ids.bin", np.dtype(self.meta["dtype"]), "r", shape=(tokens, k))
        self.probs = np.memmap(self.folder / "probs.bin", np.dtype("<u2"), "r", shape=(tokens, k))

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        k = self.meta["top_k"]
        return {"teacher_ids": ((k,), np.dtype(np.int32)), "teacher_probs": ((k,), np.dtype(np.float32))}

    def read(self, doc: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Labels of tokens ``start:stop`` of a document: ids int32 and probabilities float32, ``[n, K]`` each."""
        at = slice(int(self.firsts[doc]) + start, int(self.firsts[doc]) + stop)
        return {
            "teacher_ids": self.ids[at].astype(np.int32),
            "teacher_probs": self.probs[at].astype(np.float32) / PROB_UNIT,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "firsts": self.firsts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            TopKColumns.__init__(self, state["folder"])
        except DamagedCache as error:
            raise DataError(f"{state['folder']}: {error}") from error
        self.firsts = state["firsts"]


def keep_labels(
    teacher: LanguageModel,
    dataset: TokenDataset,
    top_k: int,
    rho: float,
    seq_len: int,
    pad_id: int,
    cache_dir: Path,
) -> TopKColumns:
    """The labels of ``dataset``, read from the cache or made there. Of several processes one works, the others wait."""
    if top_k > teacher.vocab_size:
        raise ConfigError(f"is more than the teacher's {teacher.vocab_size} ids; lower it", key="top_k", value=top_k)
    key = json.dumps([FORMAT, dataset.fingerprint, fingerprint(teacher), top_k, rho, seq_len])
    folder = Path(cache_dir) / f"labels-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}"

    def build(target: Path) -> None:
        log.info("the teacher labels the %d tokens of %s", dataset.num_tokens, dataset.name)
        _write(teacher, dataset, top_k, rho, seq_len, pad_id, target)

    return build_once(folder, build, lambda found: TopKColumns(found, dataset.lengths))


def _write(
    teacher: LanguageModel, dataset: TokenDataset, top_k: int, rho: float, seq_len: int, pad_id: int, folder: Path
) -> None:
    dtype = np.dtype("<u2" if teacher.vocab_size <= 1 << 16 else "<u4")
    shape = (dataset.num_tokens, top_k)
    ids = np.memmap(folder / "ids.bin", dtype, "w+", shape=shape)
    probs = np.memmap(folder / "probs.bin", np.dtype("<u2"), "w+", shape=shape)
    firsts = first_tokens(dataset)
    missing = 0.0
    for rows, batch, hidden in passes(teacher, dataset, seq_len, pad_id):
        here, there = spread(rows, firsts)
        row, slot = (torch.from_numpy(x).to(batch.tokens.device) for x in here.T)
        for part, logits in chunks(hidden, row, slot):
            values, index = soften(logits, rho).topk(top_k, -1)
            units = (values.double() * PROB_UNIT).floor().clamp_(max=PROB_UNIT)
            missing += float((1 - units.sum(-1) / PROB_UNIT).sum())
            ids[there[part]] = index.cpu().numpy().astype(dtype)
            probs[there[part]] = units.cpu().numpy().astype(np.uint16)
    ids.flush()
    probs.flush()
    meta = {
        "format": FORMAT,
        "tokens": dataset.num_tokens,
        "top_k": top_k,
        "rho": rho,
        "dtype": dtype.str,
        "missing_mass": missing / max(dataset.num_tokens, 1),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def attach_labels(
    teacher: LanguageModel,
    datasets: Mapping[str, TokenDataset],
    top_k: int,
    rho: float,
    seq_len: int,
    pad_id: int,
    cache_dir: Path,
) -> Callable[[], None]:
    """Give every dataset its labels, which batches carry from then on; the returned function takes them away."""
    for name, dataset in datasets.items():
        columns = keep_labels(teacher, dataset, top_k, rho, seq_len, pad_id, cache_dir)
        dataset.attach(columns)
        held = 1 - columns.meta["missing_mass"]
        log.info("source %s: the %d likeliest ids hold %.2f%% of the teacher's probability", name, top_k, 100 * held)

    def detach() -> None:
        for dataset in datasets.values():
            dataset.attach(None)

    return detach


def fingerprint(model: torch.nn.Module) -> str:
    """Hash of all weights."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
