"""What the loader costs: planning and resuming a large corpus, and its share of a training step.

    python benchmarks/loader.py [--docs 10000000] [--quick] [--json FILE]

plan    seconds from a corpus of N documents to the first rows of an epoch, per batcher, and the bytes the plan holds
resume  seconds from a saved state in the middle of the corpus to the next batch, with a new loader
share   time to make a batch of 8 rows of 1024 over the time of its step at 20,000 tokens/s; made in the training
        thread, that is without the help of prefetching

Lengths are log-normal with a mean of 200. Tokens are views of one array, so that only the loader's own work is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.core.registry import build, methods
from trainwright.data.dataset import TokenDataset
from trainwright.data.loader import Loader
from trainwright.data.rows import RowStream

SEQ_LEN = 1024
ROWS = 8
TOKENS_PER_S = 20_000


class Synthetic(TokenDataset):
    """Documents of given lengths that are views of one array."""

    def __init__(self, lengths: np.ndarray):
        self.name, self.fingerprint, self.lengths = "synthetic", f"synthetic-{len(lengths)}", lengths
        self._ids = np.arange(int(lengths.max()), dtype=np.uint16)

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._ids[: self.lengths[doc]][start:stop]


def corpus(num_docs: int) -> Synthetic:
    rng = np.random.default_rng(0)
    sigma = 1.0
    lengths = rng.lognormal(np.log(200) - sigma**2 / 2, sigma, num_docs)
    return Synthetic(np.clip(lengths, 1, 100_000).astype(np.int32))


def loader(dataset: TokenDataset, batcher: str) -> Loader:
    stream = RowStream(dataset, build("batcher", batcher), SEQ_LEN, seed=1)  # type: ignore[arg-type]
    return Loader({"pool": stream}, global_batch_rows=ROWS, prefetch=0)


def seconds(work: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def plan_bytes(plan: Any) -> int:
    """Bytes of the arrays that a plan holds, without the lengths, which are the dataset's."""
    return sum(a.nbytes for name, a in vars(plan).items() if isinstance(a, np.ndarray) and name != "lengths")


def measure(dataset: TokenDataset, batcher: str, steps: int) -> dict[str, float]:
    first = loader(dataset, batcher)
    plan_s, _ = seconds(first.next_batch)
    stream = first.mixture.streams["pool"]
    plan = stream._plan
    rows = stream.num_rows(0)
    state = json.loads(json.dumps(first.state_dict()))
    state["position"]["rows"] = state["position"]["sources"]["pool"]["row"] = rows // 2  # as after half an epoch

    def resume() -> Loader:
        again = loader(dataset, batcher)
        again.load_state_dict(state)
        again.next_batch()
        return again

    resume_s, again = seconds(resume)
    times = [seconds(again.next_batch)[0] for _ in range(steps)]
    used = dataset.num_tokens / (rows * SEQ_LEN)
    return {
        "plan_s": plan_s,
        "plan_bytes_per_doc": plan_bytes(plan) / dataset.num_docs,
        "resume_s": resume_s,
        "batch_ms": 1e3 * statistics.median(times),
        "share_of_step": statistics.median(times) / (ROWS * SEQ_LEN / TOKENS_PER_S),
        "rows_filled": used,
        "state_bytes": len(json.dumps(state)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=int, default=10_000_000)
    parser.add_argument("--quick", action="store_true", help="100,000 documents")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_docs = 100_000 if args.quick else args.docs
    dataset = corpus(num_docs)
    print(f"{num_docs:,} documents, {dataset.num_tokens:,} tokens, rows of {SEQ_LEN}, {ROWS} rows a batch")
    results: dict[str, Any] = {"documents": num_docs, "tokens": dataset.num_tokens, "seq_len": SEQ_LEN}
    results["batchers"] = {}
    for info in methods("batcher"):
        result = measure(dataset, info.name, steps=20 if args.quick else 200)
        results["batchers"][info.name] = result
        print(
            f"{info.name:10s} plan {result['plan_s']:6.2f} s ({result['plan_bytes_per_doc']:.1f} bytes a document), "
            f"resume in mid-corpus {result['resume_s']:6.2f} s, batch {result['batch_ms']:5.2f} ms = "
            f"{100 * result['share_of_step']:.2f} % of a step, rows {100 * result['rows_filled']:.1f} % full",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
