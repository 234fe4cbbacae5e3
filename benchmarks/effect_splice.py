"""SPLiCe against random packing: what adjacent documents share, loss late in the context, speed of the index.

Books are the modules of the standard library of this Python; their pages, about 120 words each, are shuffled. Spliced
examples are made by BM25 neighbours, random ones by drawing; both are rows of CONTEXT tokens with attention across
pages, and a model is trained on each for as many steps. Held-out books are read in order of their pages, and the loss
is told for the first and second half of the context.

``similarity`` is the mean TF-IDF cosine of adjacent documents, ``same book`` the share of them that are of one book.
The index is timed on pages of all Python files that are installed here: building it, and finding one neighbour for each
document while the used ones leave.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from data_batching import texts
from data_dedup import stretches

from trainwright.core.batch import Batch
from trainwright.core.hardware import cache_dir
from trainwright.core.registry import build
from trainwright.data.build.documents import Document
from trainwright.data.build.retrievers import BM25Retriever, RandomRetriever
from trainwright.data.build.splice import Example, Tokens, build_examples
from trainwright.data.dataset import ArrayDataset
from trainwright.data.packing import assemble
from trainwright.data.rows import RowStream
from trainwright.data.tokenize import TrainingCorpus
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.objectives.next_token import NextTokenConfig

CONTEXT, ROWS, PAGE_WORDS = 1024, 4, 120


def books(most: int) -> tuple[list[list[str]], list[list[str]]]:
    """Pages of each book, for training and held out; books of at least 8 pages."""
    out = []
    for text in texts()["modules"]:
        pages: list[str] = []
        held: list[str] = []
        count = 0
        for line in text.splitlines():
            held.append(line)
            count += len(re.findall(r"\w+", line))
            if count >= PAGE_WORDS:
                pages.append("\n".join(held))
                held, count = [], 0
        if len(pages) >= 8:
            out.append(pages[:60])
    order = np.random.default_rng(0).permutation(len(out))[:most]
    held_out = max(1, len(order) // 8)
    return [out[i] for i in order[held_out:]], [out[i] for i in order[:held_out]]


def similarity(documents: list[Document], examples: list[Example]) -> dict[str, float]:
    counts = [Counter(re.findall(r"\w+", d.text.lower())) for d in documents]
    holding = Counter(w for c in counts for w in c)
    vectors = [{w: n * math.log(1 + len(counts) / holding[w]) for w, n in c.items()} for c in counts]
    norms = [math.sqrt(sum(x * x for x in v.values())) or 1.0 for v in vectors]
    pairs = [p for e in examples for p in itertools.pairwise(e.documents)]
    cosines = [sum(x * vectors[b].get(w, 0.0) for w, x in vectors[a].items()) / norms[a] / norms[b] for a, b in pairs]
    same = [documents[a].source == documents[b].source for a, b in pairs]
    return {"similarity": float(np.mean(cosines)), "same_book": float(np.mean(same))}


def train(rows: list[np.ndarray], vocab: int, seed: int, steps: int, quick: bool) -> Any:
    """A model trained on ``rows`` as single documents: pages see each other."""
    torch.manual_seed(seed)
    size: dict[str, Any] = {"dim": 64, "n_layers": 2} if quick else {"dim": 192, "n_layers": 4}
    model = DecoderModelConfig(n_heads=4, **size).build(vocab, CONTEXT)
    objective = NextTokenConfig().build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, betas=(0.9, 0.95))
    padded: Any = build("batcher", "best_fit")
    data = ArrayDataset(rows)
    stream = RowStream(data, padded, CONTEXT, seed)
    order = itertools.cycle(range(stream.num_rows(0)))
    for step in range(steps):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / max(1, steps // 10))
            group["lr"] = 2e-3 * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        lying = stream.segments(0, [next(order) for _ in range(ROWS)])
        loss = objective(model, assemble([(data, s) for s in lying], CONTEXT, 0))
        (loss.sum / max(float(loss.weight), 1.0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def halves(model: Any, rows: list[np.ndarray]) -> tuple[float, float]:
    """Loss on the first and on the second half of the context."""
    objective = NextTokenConfig().build()
    sums, weights = [0.0, 0.0], [0.0, 0.0]
    with torch.no_grad():
        for batch in _batches(rows):
            for half in range(2):
                own = torch.zeros_like(batch.weights)
                part = slice(half * CONTEXT // 2, (half + 1) * CONTEXT // 2)
                own[:, part] = batch.weights[:, part]
                loss = objective(model, Batch(batch.tokens, batch.targets, own, batch.positions, batch.doc_ids))
                sums[half] += float(loss.sum)
                weights[half] += float(loss.weight)
    return sums[0] / max(weights[0], 1.0), sums[1] / max(weights[1], 1.0)


def _batches(rows: list[np.ndarray]) -> Iterator[Batch]:
    data = ArrayDataset(rows)
    stream = RowStream(data, build("batcher", "padded"), CONTEXT, shuffle=False)  # type: ignore[arg-type]
    for start in range(0, stream.num_rows(0), ROWS):
        lying = stream.segments(0, range(start, min(start + ROWS, stream.num_rows(0))))
        yield assemble([(data, s) for s in lying], CONTEXT, 0)


def index_speed(most: int) -> dict[str, float]:
    documents = [Document(t, str(i), "pages") for i, t in enumerate(itertools.islice(stretches(), most))]
    start = time.perf_counter()
    retriever = BM25Retriever(documents)
    retriever.index.query("")  # sorts the postings
    built = time.perf_counter()
    count = sum(len(e.documents) for e in build_examples(documents, retriever, 8192, k=1))
    return {
        "documents": len(documents),
        "build_per_s": len(documents) / (built - start),
        "find_per_s": count / (time.perf_counter() - built),
        "index_bytes_per_document": 6.0 * float(retriever.index.frequency.sum()) / max(len(documents), 1),
    }


def run(quick: bool) -> dict[str, Any]:
    spec: Any = build("tokenizer", "bpe")
    tokenizer = spec.build(TrainingCorpus([build("source", "python_stdlib")], 0.02), cache_dir())
    measure = Tokens(tokenizer.encode, tokenizer.decode)
    train_books, held = books(12 if quick else 400)
    documents = [
        Document(page, f"{b}-{p}", f"book{b}") for b, pages in enumerate(train_books) for p, page in enumerate(pages)
    ]
    documents = [documents[i] for i in np.random.default_rng(1).permutation(len(documents))]
    ways = {"spliced": BM25Retriever, "random": RandomRetriever}
    result: dict[str, Any] = {"books": len(train_books), "documents": len(documents), "ways": {}}
    steps, seeds = (4, 1) if quick else (300, 3)
    validation = []
    for pages in held:
        ids = tokenizer.encode("\n\n".join(pages))
        validation += [np.asarray(ids[i : i + CONTEXT]) for i in range(0, len(ids) - CONTEXT // 2, CONTEXT)]
    for name, retriever in ways.items():
        examples = list(build_examples(documents, retriever(documents), CONTEXT, measure=measure))
        rows = [np.asarray(tokenizer.encode(e.text)[:CONTEXT]) for e in examples]
        figures: dict[str, Any] = {"examples": len(examples), **similarity(documents, examples), "loss": []}
        for seed in range(seeds):
            model = train(rows, tokenizer.vocab_size, seed, steps, quick)
            figures["loss"].append(halves(model, validation[:8] if quick else validation[:200]))
        result["ways"][name] = figures
    result["steps"], result["index"] = steps, index_speed(300 if quick else 20_000)
    return result


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['documents']} pages of {result['books']} books, contexts of {CONTEXT} tokens, {result['steps']} "
        f"steps of {ROWS} rows.",
        "",
        "| | similarity | same book | loss, first half | loss, second half | second half by seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, f in result["ways"].items():
        first, second = np.mean(f["loss"], axis=0)
        seeds = ", ".join(f"{s:.3f}" for _, s in f["loss"])
        lines.append(
            f"| {name} | {f['similarity']:.3f} | {100 * f['same_book']:.0f} % | {first:.3f} | {second:.3f} | {seeds} |"
        )
    i = result["index"]
    lines += [
        "",
        f"Index of {i['documents']:,} documents: {i['build_per_s']:,.0f} a second to build, {i['find_per_s']:,.0f} a "
        f"second to find and join, {i['index_bytes_per_document']:,.0f} bytes of postings a document.",
    ]
    return "\n".join(lines)
