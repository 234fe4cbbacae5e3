"""Near-deduplication against datatrove and datasketch: speed, memory, recall and precision on planted copies.

The texts are stretches of the Python sources that are installed here, about 200 words each; three tenths of the corpus
are copies of others with some words exchanged, so that their exact Jaccard similarity by word 5-grams lies between
0.8 and 1. Each contestant runs in a process of its own, on one core, from the texts in memory to the ids of what it
removes, at a threshold of 0.8. Peers that are not installed are left out.

    trainwright       NearDedup as it is by default: 16 bands of 8 rows, each pair verified, at most 2 steps
    trainwright_lsh   the peers' rule: 14 bands of 8 rows, no pair verified, connected components
    datatrove         its four MinHash steps at their default of 14 bands of 8 rows; words split at white space, which
                      costs less than its spaCy tokenizer
    datasketch        MinHash.update_batch with xxhash, MinHashLSH with 14 bands of 8 rows, union-find over its answers

recall: of the planted pairs, how many lost one of their two. false removals: removed documents that are less than 0.8
similar to every other document, by an exact count over all shingles, among the originals. memory: peak of the
process above what it held with the texts loaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peers import peak_memory

THRESHOLD, NGRAM, BANDS, ROWS = 0.8, 5, 14, 8
WORDS_EACH = 200
COMMON = 2000  # documents; a shingle of more is boilerplate and finds no candidates


# -- the corpus ------------------------------------------------------------------------------------------------------


def stretches() -> Iterator[str]:
    """Texts of about WORDS_EACH words, from files in a fixed order."""
    for key in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(key)).rglob("*.py")):
            held: list[str] = []
            count = 0
            for line in path.read_text("utf-8", errors="replace").splitlines():
                held.append(line)
                count += len(re.findall(r"\w+", line))
                if count >= WORDS_EACH:
                    yield "\n".join(held)
                    held, count = [], 0


def altered(text: str, rng: random.Random, changes: int) -> str:
    found = list(re.finditer(r"\w+", text))
    for match in sorted(rng.sample(found, min(changes, len(found))), key=lambda m: -m.start()):
        text = text[: match.start()] + f"other{rng.randrange(10**9)}" + text[match.end() :]
    return text


def make_corpus(count: int) -> tuple[list[tuple[str, str]], list[tuple[str, str, float]]]:
    """(id, text) of each document, and the planted pairs (id, id, exact similarity)."""
    rng = random.Random(0)
    pool = list(dict.fromkeys(itertools.islice(stretches(), 2 * count)))
    rng.shuffle(pool)
    originals = pool[: count * 7 // 10]
    documents = [(f"o{i}", t) for i, t in enumerate(originals)]
    pairs = []
    place = 0
    while len(documents) < count and place < 4 * count:
        i = place % len(originals)
        place += 1
        copy = altered(originals[i], rng, rng.randint(0, 5))
        similarity = float(_jaccard(_grams(originals[i]), _grams(copy)))
        if similarity >= THRESHOLD:
            documents.append((f"c{place}", copy))
            pairs.append((f"o{i}", f"c{place}", similarity))
    rng.shuffle(documents)
    return documents, pairs


def _grams(text: str) -> set[tuple[str, ...]]:
    found = re.findall(r"\w+", text.lower())
    return {tuple(found[i : i + NGRAM]) for i in range(max(1, len(found) - NGRAM + 1))}


def _jaccard(a: set[Any], b: set[Any]) -> float:
    return len(a & b) / max(len(a | b), 1)


# -- contestants: texts -> ids of what is removed ----------------------------------------------------------------------


def trainwright(documents: list[tuple[str, str]], **settings: Any) -> set[str]:
    from trainwright.data.build.dedup import NearDedup
    from trainwright.data.build.documents import Document

    stage = NearDedup(threshold=THRESHOLD, ngram=NGRAM, max_source_loss=1.0, **settings)
    kept = {d.id for d in stage.run([Document(t, i, "all") for i, t in documents])}
    return {i for i, _ in documents} - kept


def trainwright_lsh(documents: list[tuple[str, str]]) -> set[str]:
    return trainwright(
        documents, permutations=BANDS * ROWS, bands=BANDS, rows=ROWS, verify="none", max_steps=None, keep="first"
    )


def datatrove(documents: list[tuple[str, str]]) -> set[str]:
    import xxhash
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.utils.logging import logger
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Split(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    logger.remove()
    config = MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS)
    made = [Document(text=t, id=i) for i, t in documents]
    with tempfile.TemporaryDirectory() as folder:
        signatures, buckets, removed = (f"{folder}/{name}" for name in ("signatures", "buckets", "removed"))
        first = MinhashDedupSignature(signatures, config, language=Split())
        first._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())  # its own cannot work with xxhash 4
        first.run(iter(made))
        for bucket in range(BANDS):
            MinhashDedupBuckets(signatures, buckets, config=config).run(rank=bucket, world_size=BANDS)
        MinhashDedupCluster(buckets, removed, config=config).run(None, 0, 1)
        kept = {d.id for d in MinhashDedupFilter(removed).run(iter(made))}
    return {i for i, _ in documents} - kept


def datasketch(documents: list[tuple[str, str]]) -> set[str]:
    import xxhash
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    empty = MinHash(BANDS * ROWS, hashfunc=xxhash.xxh32_intdigest)
    parent = list(range(len(documents)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for number, (_, text) in enumerate(documents):
        found = re.findall(r"\w+", text.lower())
        sketch = empty.copy()
        sketch.update_batch([" ".join(found[i : i + NGRAM]).encode() for i in range(max(1, len(found) - NGRAM + 1))])
        for other in lsh.query(sketch):
            low, high = sorted((root(other), root(number)))
            parent[high] = low
        lsh.insert(number, sketch, check_duplication=False)
    return {i for number, (i, _) in enumerate(documents) if root(number) != number}


CONTESTANTS: dict[str, Callable[[list[tuple[str, str]]], set[str]]] = {
    "trainwright": trainwright,
    "trainwright_lsh": trainwright_lsh,
    "datatrove": datatrove,
    "datasketch": datasketch,
}


def contestant(name: str, corpus: Path, first: int) -> dict[str, Any]:
    """One run, in this process."""
    # By lines: the peak of reading it at once would hide what the contestant takes.
    with corpus.open(encoding="utf-8") as lines:
        documents = [tuple(json.loads(line)) for line in itertools.islice(lines, first)]
    before = peak_memory()
    started = time.perf_counter()
    removed = CONTESTANTS[name](documents)
    return {
        "seconds": time.perf_counter() - started,
        "documents": len(documents),
        "memory": peak_memory() - before,
        "removed": sorted(removed),
    }


# -- judging ---------------------------------------------------------------------------------------------------------


class Judge:
    """Exact similarities over the whole corpus, by an inverted list of shingles."""

    def __init__(self, documents: list[tuple[str, str]]):
        self.place = {i: n for n, (i, _) in enumerate(documents)}
        seen: dict[tuple[str, ...], int] = {}
        self.sets = [
            np.unique(np.array([seen.setdefault(g, len(seen)) for g in _grams(t)], np.int64)) for _, t in documents
        ]
        owners = np.repeat(np.arange(len(self.sets)), [len(s) for s in self.sets])
        items = np.concatenate(self.sets)
        order = np.argsort(items, kind="stable")
        self.owners = owners[order]
        self.starts = np.searchsorted(items[order], np.arange(len(seen) + 1))

    def most_similar(self, document: str) -> float:
        """Greatest similarity of a document to another one."""
        me = self.place[document]
        mine = self.sets[me]
        lists: list[NDArray[np.int64]] = [self.owners[self.starts[g] : self.starts[g + 1]] for g in mine.tolist()]
        rare = [x for x in lists if len(x) <= COMMON] or [x[:COMMON] for x in lists]
        others, counts = np.unique(np.concatenate(rare), return_counts=True)
        best = 0.0
        for other in others[np.argsort(-counts)][:40].tolist():
            if other != me:
                common = len(np.intersect1d(mine, self.sets[other], assume_unique=True))
                best = max(best, common / (len(mine) + len(self.sets[other]) - common))
        return best


def run(quick: bool) -> dict[str, Any]:
    count = 3000 if quick else 100_000
    names = [n for n in CONTESTANTS if n.startswith("trainwright") or find_spec(n) is not None]
    documents, pairs = make_corpus(count)
    judge = Judge(documents)
    result: dict[str, Any] = {"documents": len(documents), "planted_pairs": len(pairs), "contestants": {}}
    similar: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(d) + "\n" for d in documents), "utf-8")
        for name in names:
            found = _in_its_own_process(name, corpus, len(documents))
            removed = set(found.pop("removed"))
            for i in removed:
                similar.setdefault(i, judge.most_similar(i))
            false = sum(similar[i] < THRESHOLD for i in removed)
            hit = [a in removed or b in removed for a, b, _ in pairs]
            low = [h for h, (_, _, s) in zip(hit, pairs, strict=True) if s < 0.9]
            result["contestants"][name] = {
                **found,
                "version": _version(name),
                "documents_per_second": len(documents) / found["seconds"],
                "removed": len(removed),
                "recall": sum(hit) / len(hit),
                "recall_below_0.9": sum(low) / max(len(low), 1),
                "precision": 1 - false / max(len(removed), 1),
                "false_removals": false / (len(documents) - len(pairs)),
            }
        quarter = _in_its_own_process("trainwright", corpus, len(documents) // 4)
    whole = result["contestants"]["trainwright"]
    result["bytes_per_further_document"] = (whole["memory"] - quarter["memory"]) / (len(documents) * 3 / 4)
    for name, row in result["contestants"].items():
        row["speed_of_trainwright"] = row["seconds"] / whole["seconds"] if name != "trainwright" else 1.0
    return result


def _in_its_own_process(name: str, corpus: Path, first: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--contestant", name, "--corpus", str(corpus), "--first", str(first)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _version(name: str) -> str:
    try:
        return version(name.removesuffix("_lsh"))
    except PackageNotFoundError:
        return "unknown"


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['documents']:,} documents, {result['planted_pairs']:,} planted pairs; "
        f"{result['bytes_per_further_document']:,.0f} bytes of memory for each document "
        "past the first quarter, bounded caches and mapped files included",
        "",
        "| contestant | documents/s | trainwright is | peak memory MB | removed | recall | below 0.9 | precision "
        "| false removals |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["contestants"].items():
        lines.append(
            f"| {name} {row['version']} | {row['documents_per_second']:,.0f} | {row['speed_of_trainwright']:.1f}x | "
            f"{row['memory'] / 1e6:,.0f} | {row['removed']:,} | {row['recall']:.4f} | {row['recall_below_0.9']:.4f} | "
            f"{row['precision']:.4f} | {row['false_removals']:.2%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--contestant", choices=sorted(CONTESTANTS), required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True)
    args = parser.parse_args()
    print(json.dumps(contestant(args.contestant, args.corpus, args.first)))
