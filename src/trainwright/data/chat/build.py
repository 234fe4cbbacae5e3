"""Examples to a cached dataset of tokens and loss weights, with an account of what became of every row."""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from trainwright.core.errors import DataError, TrainwrightError
from trainwright.data.chat.conversation import Example
from trainwright.data.chat.masks import Encoded, Masker, UnstableTemplate

BATCH = 256
SAMPLES = 5  # bad rows that a report quotes


@dataclass
class Report:
    """What became of the rows of a split."""

    rows: int = 0  # read and usable, before the rules below
    conversations: int = 0  # kept
    tokens: int = 0
    trained: int = 0  # tokens that are targets
    cut: int = 0  # shortened to the limit
    dropped: int = 0  # longer than the limit
    cut_before_answer: int = 0  # dropped, because the limit left no answer
    untrained: int = 0  # dropped, because no token of it is a target
    spells_special: int = 0  # a message spells a special token
    crossing: int = 0  # a token reaches over the beginning of the target, and is not trained on
    empty_answer: int = 0  # an answer that is trained on says nothing
    left_out: int = 0  # the template leaves out thoughts, or what is said beside a call
    parted: int = 0  # an answer begins or ends within a token of the whole text, and others follow
    prompt_repeated: int = 0  # both answers of a pair began with its prompt, which was taken away
    prompt_guessed: int = 0  # texts without prompt or a mark such as Assistant:
    date: str | None = None  # what the template takes for today, where it asks
    bad: int = 0  # unusable rows, skipped
    bad_samples: list[str] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)

    def count_bad(self, error: Exception) -> None:
        self.bad += 1
        if len(self.bad_samples) < SAMPLES:
            self.bad_samples.append(str(error))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "formats": dict(self.formats)}


def describe(report: dict[str, Any], max_length: int) -> str:
    """The report as one line for a person."""
    share = report["trained"] / report["tokens"] if report["tokens"] else 0.0
    parts = [
        f"{report['conversations']} of {report['rows']} rows",
        f"{report['tokens']} tokens, {share:.1%} trained on",
    ]
    for key, words in (
        ("cut", f"cut to {max_length} tokens"),
        ("dropped", f"dropped as longer than {max_length} tokens"),
        ("cut_before_answer", f"dropped because {max_length} tokens leave no answer"),
        ("untrained", "dropped without a token to train on"),
        ("spells_special", "spell a special token, which stays text"),
        ("crossing", "whose first token of the target is half the prompt's, and not trained on"),
        ("empty_answer", "with an empty answer, which trains the model to say nothing"),
        ("left_out", "of whose answers the chat template leaves out a part (thoughts, or what is said beside a call)"),
        (
            "parted",
            "where an answer begins or ends within a token, so that later answers see it encoded in another way than "
            "in use (train_on: last has no such)",
        ),
        ("prompt_repeated", "repeat the prompt in both answers, from which it was taken away"),
        (
            "prompt_guessed",
            "with no prompt and no mark such as Assistant:, so the words that both answers begin with are the prompt",
        ),
    ):
        if report.get(key):
            parts.append(f"{report[key]} {words}")
    if report.get("date"):
        parts.append(f"to the chat template the date is {report['date']} (date)")
    if report["bad"]:
        parts.append(f"{report['bad']} unusable rows skipped, e.g. {report['bad_samples'][0]}")
    return "; ".join(parts)


Item = tuple[str, str, Example]  # id, place for messages, what it holds


def encode_all(
    items: Iterator[Item], masker: Masker, num_proc: int = 1
) -> Iterator[tuple[Item, Encoded | TrainwrightError]]:
    """Items with what ``masker`` makes of each, in order; an example that it refuses comes with the error."""
    if num_proc == 1:
        for batch in _batches(items):
            yield from zip(batch, _encode_batch(masker, batch), strict=True)
        return
    context = multiprocessing.get_context("spawn")  # forking a process with the tokenizer's threads may hang
    waiting: deque[tuple[list[Item], Future[list[Encoded | TrainwrightError]]]] = deque()
    pool = ProcessPoolExecutor(num_proc, context, _set_masker, (masker,))
    try:
        for batch in _batches(items):
            waiting.append((batch, pool.submit(_encode_in_worker, batch)))
            if len(waiting) > num_proc + 1:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        while waiting:
            done, future = waiting.popleft()
            yield from zip(done, future.result(), strict=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(items: Iterator[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _encode_batch(masker: Masker, batch: list[Item]) -> list[Encoded | TrainwrightError]:
    out: list[Encoded | TrainwrightError] = []
    for _, where, example in batch:
        try:
            out.append(masker(example))
        except UnstableTemplate as error:
            out.append(UnstableTemplate(f"{where}: {error}"))
        except DataError as error:
            out.append(DataError(f"{where}: {error}"))
        except TrainwrightError as error:  # no template at all: not the fault of this row
            return [error] * len(batch)
    return out


_worker_masker: Masker | None = None


def _set_masker(masker: Masker) -> None:
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
    global _worker_masker
    _worker_masker = masker


def _encode_in_worker(batch: list[Item]) -> list[Encoded | TrainwrightError]:
    if _worker_masker is None:
        raise RuntimeError("the worker was started without a tokenizer")
    return _encode_batch(_worker_masker, batch)


def text_bytes(example: Example) -> int:
    """UTF-8 bytes of what was said."""
    text = example.text
    return len(text) if text.isascii() else len(text.encode())
