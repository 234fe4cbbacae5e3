"""Tokenizing a source into shards against the bare tokenizers library, on one core.

The texts are the Python sources that are installed here, as JSON Lines; the tokenizer is a byte-level BPE trained on
them. Each contestant runs in a process of its own, with one thread of the library, from its texts to its ids:

    library       Tokenizer.encode_batch over the same batches, texts in memory, ids thrown away
    library_fast  encode_batch_fast, which leaves out character offsets
    trainwright   tokenize_source: JSON Lines read and parsed, split, encoded, hashed, written and synced

Figures are by processor seconds (of all the process's threads), so that other work on the machine plays no great part;
wall seconds stand beside them. share: throughput of trainwright over that of the library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

VOCAB = 16_384
BATCH_CHARACTERS = 1 << 20
CONTESTANTS = ("library", "library_fast", "trainwright")


def make_corpus(path: Path, megabytes: int) -> int:
    """Python files as rows, again from the first where they do not suffice; the UTF-8 bytes of their texts."""
    files = [p for key in ("stdlib", "purelib") for p in sorted(Path(sysconfig.get_path(key)).rglob("*.py"))]
    size = 0
    with path.open("w", encoding="utf-8") as out:
        while size < megabytes << 20:
            for file in files:
                text = file.read_text("utf-8", errors="replace")
                if not text.strip():
                    continue
                out.write(json.dumps({"text": text, "path": str(file.name)}, ensure_ascii=False) + "\n")
                size += len(text.encode())
                if size >= megabytes << 20:
                    break
    return size


def _tokenizer(folder: Path) -> Any:
    from trainwright.core import registry

    return registry.build("tokenizer", {"name": "hf", "path": str(folder)}).build(lambda: iter(()), folder)


def make_tokenizer(corpus: Path, folder: Path) -> None:
    from trainwright.core import registry

    def texts() -> Any:
        size = 0
        for line in corpus.open(encoding="utf-8"):
            text = json.loads(line)["text"]
            size += len(text)
            if size > 8 << 20:
                return
            yield text

    texts.fingerprint = "benchmark"  # type: ignore[attr-defined]
    registry.build("tokenizer", {"name": "bpe", "vocab_size": VOCAB}).build(texts, folder / "cache").save(folder)


def contestant(name: str, folder: Path) -> dict[str, Any]:
    """One run, in this process."""
    corpus = folder / "corpus.jsonl"
    tokenizer = _tokenizer(folder / "tokenizer")
    tokenizer.encode_batch(["warm up"] * 8)
    if name == "trainwright":
        from trainwright.core import registry
        from trainwright.data.tokenize import tokenize_source

        source = registry.build("source", {"name": "jsonl", "path": str(corpus)})
        started, wall = time.process_time(), time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            data = tokenize_source(source, tokenizer, "train", validation_fraction=0.0, cache_dir=Path(cache))
            seconds, wall = time.process_time() - started, time.perf_counter() - wall
            tokens = data.num_tokens - data.num_docs  # each document is ended by a token of its own
        return {"seconds": seconds, "wall": wall, "tokens": tokens}
    encode = tokenizer.backend.encode_batch if name == "library" else tokenizer.backend.encode_batch_fast
    seconds = walls = 0.0
    tokens = 0
    batch: list[str] = []

    def work() -> None:
        nonlocal seconds, walls, tokens
        started, wall = time.process_time(), time.perf_counter()
        found = encode(batch, add_special_tokens=False)
        seconds += time.process_time() - started
        walls += time.perf_counter() - wall
        tokens += sum(len(e) for e in found)
        batch.clear()

    size = 0
    for line in corpus.open(encoding="utf-8"):
        batch.append(json.loads(line)["text"])
        size += len(batch[-1])
        if size >= BATCH_CHARACTERS:
            work()
            size = 0
    if batch:
        work()
    return {"seconds": seconds, "wall": walls, "tokens": tokens}


def run(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make_corpus(folder / "corpus.jsonl", 4 if quick else 64)
        make_tokenizer(folder / "corpus.jsonl", folder / "tokenizer")
        rows = {}
        for c in CONTESTANTS:
            # Three times, and the fastest counts: what else the machine does only adds.
            runs = [_in_its_own_process(c, folder) for _ in range(1 if quick else 3)]
            best = min(runs, key=lambda r: r["seconds"])
            rows[c] = {**best, "megabytes_per_second": size / 1e6 / best["seconds"]}
    if len({r["tokens"] for r in rows.values()}) != 1:
        raise RuntimeError(f"the contestants made different numbers of tokens: {rows}")
    ours = rows["trainwright"]
    shares = {c: rows[c]["seconds"] / ours["seconds"] for c in CONTESTANTS[:2]}
    return {"bytes": size, "vocab_size": VOCAB, "contestants": rows, "share_of_library": shares["library"],
            "share_of_library_fast": shares["library_fast"]}  # fmt: skip


def _in_its_own_process(name: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--contestant", name, "--folder", str(folder)]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['bytes'] / 1e6:,.0f} MB of Python sources, BPE of {result['vocab_size']:,}; trainwright reaches "
        f"{result['share_of_library']:.0%} of encode_batch and {result['share_of_library_fast']:.0%} of "
        f"encode_batch_fast, per core",
        "",
        "| contestant | MB/s a core | processor s | wall s | tokens |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["contestants"].items():
        lines.append(
            f"| {name} | {row['megabytes_per_second']:.2f} | {row['seconds']:.2f} | {row['wall']:.2f} | "
            f"{row['tokens']:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--contestant", choices=CONTESTANTS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    print(json.dumps(contestant(args.contestant, args.folder)))
