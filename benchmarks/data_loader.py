"""The loader over token shards on disk: its share of a training step, and the time to resume in mid-corpus.

A corpus of 10,000,000 documents (mean 40 tokens, log-normal; 100,000 with --quick) is written as shards. Then, each in
a process of its own:

    first    open the shards, plan the first epoch, make the first batch
    resume   open the shards, take up a state saved in the middle of the corpus, make the next batch; imports not
             counted, the operating system's cache as the writing left it
    share    time to make a batch of 8 rows of 1024, in the training thread, over its step at 20,000 tokens/s

Processor seconds stand beside wall seconds, for machines that do other work meanwhile. memory: what the process took
from the opening on, without mapped pages of the files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN, ROWS, TOKENS_PER_S = 1024, 8, 20_000
VOCAB = 50_257
MEAN = 40
BATCHERS = ("packed", "padded", "best_fit", "multipack")


def write_corpus(folder: Path, count: int) -> None:
    from trainwright.data.shards import ShardWriter

    rng = np.random.default_rng(0)
    writer = ShardWriter(folder, VOCAB)
    pool = rng.integers(0, VOCAB, 1 << 20, dtype=np.int32)
    each = 100_000
    for first in range(0, count, each):
        size = min(each, count - first)
        lengths = np.clip(rng.lognormal(np.log(MEAN) - 0.5, 1.0, size), 2, 8000).astype(np.int64)
        starts = rng.integers(0, len(pool) - 8000, size)
        docs = [pool[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        writer.write(docs, [f"synthetic:{first + i}" for i in range(size)], (4 * lengths).tolist())
    writer.close(name="synthetic", split="train", empty_documents=0)


def contestant(task: str, batcher: str, folder: Path, steps: int) -> dict[str, Any]:
    import torch
    from peers import peak_memory

    from trainwright.core.registry import build
    from trainwright.data.loader import Loader
    from trainwright.data.rows import RowStream
    from trainwright.data.shards import ShardedDataset

    torch.set_num_threads(1)
    before = peak_memory()

    def open_loader() -> Loader:
        data = ShardedDataset(folder / "shards")
        stream = RowStream(data, build("batcher", batcher), SEQ_LEN, seed=1)  # type: ignore[arg-type]
        return Loader({"pool": stream}, global_batch_rows=ROWS, prefetch=0)

    cpu, wall = time.process_time(), time.perf_counter()
    loader = open_loader()
    if task == "resume":
        loader.load_state_dict(json.loads((folder / f"{batcher}.json").read_text()))
    batch = loader.next_batch()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    found: dict[str, Any] = {"seconds": cpu, "wall": wall, "memory": peak_memory() - before}
    if task == "first":
        state = loader.state_dict()
        rows = loader.mixture.streams["pool"].num_rows(0)
        state["position"]["rows"] = state["position"]["sources"]["pool"]["row"] = rows // 2 // ROWS * ROWS
        (folder / f"{batcher}.json").write_text(json.dumps(state))
        # What comes next there, from this loader, which has a plan already.
        loader.load_state_dict(state)
        batch = loader.next_batch()
        cpu = time.process_time()
        for _ in range(steps):
            loader.next_batch()
        found["share"] = (time.process_time() - cpu) / steps / (ROWS * SEQ_LEN / TOKENS_PER_S)
        found["tokens"] = int(loader.mixture.streams["pool"].dataset.num_tokens)
    found["checksum"] = int(batch.tokens.sum())
    return found


def run(quick: bool) -> dict[str, Any]:
    count = 100_000 if quick else 10_000_000
    result: dict[str, Any] = {"documents": count, "batchers": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        started = time.perf_counter()
        write_corpus(folder / "shards", count)
        result["written_s"] = time.perf_counter() - started
        for batcher in BATCHERS:
            first, resume = (_in_its_own_process(task, batcher, folder, 20 if quick else 200)
                             for task in ("first", "resume"))  # fmt: skip
            if first["checksum"] != resume["checksum"]:
                raise RuntimeError(f"{batcher}: the batch after resuming is another one")
            result["batchers"][batcher] = {"first": first, "resume": resume, "share_of_step": first["share"]}
            result["tokens"] = first["tokens"]
    return result


def _in_its_own_process(task: str, batcher: str, folder: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--task", task, "--batcher", batcher, "--folder", str(folder)]
    done = subprocess.run([*command, "--steps", str(steps)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{task} {batcher} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['documents']:,} documents, {result['tokens']:,} tokens in shards, written in "
        f"{result['written_s']:.0f} s; batches of {ROWS} rows of {SEQ_LEN}, {TOKENS_PER_S:,} tokens/s",
        "",
        "| batcher | resume wall s | processor s | first batch wall s | share of a step | memory MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["batchers"].items():
        resume, first = row["resume"], row["first"]
        lines.append(
            f"| {name} | {resume['wall']:.2f} | {resume['seconds']:.2f} | {first['wall']:.2f} | "
            f"{row['share_of_step']:.2%} | {resume['memory'] / 1e6:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=("first", "resume"), required=True)
    parser.add_argument("--batcher", choices=BATCHERS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    print(json.dumps(contestant(args.task, args.batcher, args.folder, args.steps)))
