"""Synthetic conversations: a model asked with a system prompt alone makes up a user's request, answers it, and plays
the user for further turns.

    for each task and number:  request -> answer -> judge (low: dropped) -> (user's next turn -> answer) x (turns - 1)
    then: of conversations whose first requests are near copies the first one stays

Paper: OpenCSG Chinese Corpus, arXiv:2501.08197 (Smoltalk-chinese: 11 kinds of task, 3 turns recalled, judged by the
first turn, near copies found by embeddings of the first request). Prompts are our own. ``embed`` may be any model of
sentences; the default is a bag of hashed character n-grams, which needs none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.hashed import HashedSettings, buckets_of
from trainwright.data.build.quality.judge import CachedCaller, Judge
from trainwright.data.build.quality.synthetic import synthetic

Message = dict[str, str]
Embed = Callable[[Sequence[str]], NDArray[np.floating]]

TASKS: Mapping[str, str] = {
    "information": "asks for facts about something",
    "reasoning": "brings a puzzle or a question that needs several steps of thought",
    "planning": "wants a plan for something to be done",
    "editing": "brings a text of their own and wants it improved",
    "coding": "wants a program written, explained or mended",
    "mathematics": "brings a problem of mathematics",
    "role_play": "wants the assistant to play somebody",
    "data_analysis": "brings figures or a table and wants them read",
    "creative_writing": "wants a poem, a story or a slogan",
    "advice": "wants advice in a situation of daily life",
    "brainstorming": "wants many ideas on a subject",
}
REQUEST = (
    "You play a person who talks to an assistant. The person {task}. Write their first message and nothing else, in "
    "{language}, as people really write. This is conversation number {number}: choose a subject that others would not."
)
ANSWER = "You are a helpful assistant. Answer the last message of this conversation, in {language}.\n\n{conversation}"
NEXT = (
    "You play the user of this conversation. Write their next message and nothing else, in {language}: ask on, object, "
    "or want it changed.\n\n{conversation}"
)
RUBRIC = (
    "Rate from 0 to 5 how good the first request and its answer are: is the request clear and worth asking, the answer "
    'right and to the point?\n\n{text}\n\nLast line: "Score: N".'
)


@dataclass
class DialogueRecipe:
    """What conversations are made.

    per_task    conversations to begin for each kind of task
    turns       of the user
    least       rating of the first turn below which a conversation is dropped; needs a judge
    similarity  cosine of two first requests from which the later conversation is a near copy; None: none is
    """

    tasks: Mapping[str, str] = field(default_factory=lambda: TASKS)
    per_task: int = 10
    turns: int = 3
    language: str = "Chinese"
    least: float = 3.0
    similarity: float | None = 0.9
    template_id: str = "dialogue-1"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("is empty", key="tasks")
        for key in ("per_task", "turns"):
            if getattr(self, key) < 1:
                raise ConfigError("should be at least 1", key=key, value=getattr(self, key))
        if self.similarity is not None and not 0 < self.similarity <= 1:
            raise ConfigError("should be above 0 and at most 1", key="similarity", value=self.similarity)


def hashed_embedding(texts: Sequence[str]) -> NDArray[np.float32]:
    """[texts, 4096] counts of hashed character n-grams up to 5, of length 1."""
    settings = HashedSettings(ngrams=5, buckets=4096, unit="char")
    out = np.zeros((len(texts), settings.buckets), np.float32)
    for row, text in zip(out, texts, strict=True):
        np.add.at(row, buckets_of(text, settings), 1)
    return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)


def dialogues(
    generator: CachedCaller,
    judge: Judge | None = None,
    recipe: DialogueRecipe | None = None,
    embed: Embed = hashed_embedding,
    counts: Counter[str] | None = None,
) -> Iterator[Document]:
    """Conversations as documents: ``metadata["messages"]`` in the chat format, and as text for the stages of a build.

    counts: gets what was begun, dropped and kept. The first requests of all are held in memory.
    """
    recipe = recipe or DialogueRecipe()
    counts = Counter() if counts is None else counts
    known: list[NDArray[np.floating]] = []
    for number in range(recipe.per_task):
        for task, words in recipe.tasks.items():
            counts["begun"] += 1
            request = _filled(REQUEST, task=words, language=recipe.language, number=number)
            messages = [{"role": "user", "content": generator(request).strip()}]
            if not messages[0]["content"]:
                counts["empty request"] += 1
                continue
            if recipe.similarity is not None and _near(known, messages[0]["content"], recipe.similarity, embed):
                counts["near copy"] += 1
                continue
            _answer(messages, generator, recipe)
            rating = None
            if judge is not None:
                rating = judge.rate(_text(messages)).value
                if rating is None or rating < recipe.least:
                    counts["answer cannot be read" if rating is None else "rated low"] += 1
                    continue
            for _ in range(recipe.turns - 1):
                prompt = _filled(NEXT, language=recipe.language, conversation=_text(messages))
                messages.append({"role": "user", "content": generator(prompt).strip()})
                _answer(messages, generator, recipe)
            if not all(m["content"] for m in messages):
                counts["empty turn"] += 1
                continue
            counts["kept"] += 1
            document = synthetic(
                _text(messages), f"{task}/{number}", "dialogues", f"{task}/{number}", recipe.template_id, generator,
                task=task,
            )  # fmt: skip
            more: dict[str, Any] = {"messages": messages} | ({} if rating is None else {"rating": rating})
            yield document.with_metadata(**more)


def to_chat_row(document: Document) -> str:
    """A line of a chat file, as ``source: {name: chat}`` reads it."""
    row = {"messages": document.metadata["messages"], "id": document.id, "provenance": document.provenance}
    return json.dumps(row, ensure_ascii=False)


def _answer(messages: list[Message], generator: CachedCaller, recipe: DialogueRecipe) -> None:
    prompt = _filled(ANSWER, language=recipe.language, conversation=_text(messages))
    messages.append({"role": "assistant", "content": generator(prompt).strip()})


def _text(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)


def _filled(template: str, **values: Any) -> str:
    for key, value in values.items():
        template = template.replace("{" + key + "}", str(value))
    return template


def _near(known: list[NDArray[np.floating]], text: str, similarity: float, embed: Embed) -> bool:
    """Whether an earlier request is this similar; a new one is remembered."""
    vector = np.asarray(embed([text]))[0]
    vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    if known and float((np.stack(known) @ vector).max()) >= similarity:
        return True
    known.append(vector)
    return False
