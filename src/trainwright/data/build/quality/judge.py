"""Ratings by a judge that is asked once: any callable from a prompt to an answer, behind a cache on disk.

    key of an answer = sha256 of (prompt, model, params, attempt) as JSON
    rating           = the number that the answer names; asked again where it names none, at most ``retries`` times

Every answer is on disk before it is used, also those that cannot be read, so a killed run asks nothing twice when it is
started again. Several threads may ask at once (``workers``); a prompt that comes twice is asked once.

Papers: OpenCSG Chinese Corpus, arXiv:2501.08197 (rates education value 0..5, some 100k texts); the rubric follows the
idea of FineWeb-Edu, arXiv:2406.17557, in words of our own.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.stage import chunks
from trainwright.data.build.statistics import Drop, Statistics

Ask = Callable[[str], str]

EDU_RUBRIC = """\
Rate how much somebody who wants to learn would gain from the text below, from 0 to 5. Start at 0 and add a point for
each that holds:
1. It tells something about a subject, if only in passing, among advertising or small talk.
2. It deals with a subject that people study, though without order, or thinly.
3. It explains: terms or steps are introduced so that a pupil could follow, even if incomplete.
4. It is well arranged and keeps to its subject, as a chapter of a textbook or a good tutorial does.
5. It is outstanding to learn from: clear, thorough, with examples or reasons, and nothing that distracts.

Text:
{text}

Give your reason in at most two sentences, then a last line "Score: N" with the sum N.
"""

EDU_RUBRIC_ZH = """\
请评估下面的文本对想要学习的人有多大价值，给出 0 到 5 的整数分。从 0 分开始，每满足一条加 1 分：
1. 夹杂广告或闲聊，但多少讲到了某个主题的知识。
2. 围绕一个值得学习的主题，但缺乏条理或内容单薄。
3. 有讲解：引入概念或步骤，学生能够跟上，即使并不完整。
4. 结构清楚、紧扣主题，如同教科书的一节或一篇好的教程。
5. 非常适合学习：清晰、透彻，有例子或理由，没有无关内容。

文本：
{text}

请先用不超过两句话说明理由，最后一行写“评分：N”，N 为总分。
"""

_RATING = re.compile(
    r"(?:score|rating|points?|total|评分|得分|分数|总分)[^\w-]{0,5}(?:is|of|为|是)?\s*[:：=]?\s*\**\s*(-?\d+(?:\.\d+)?)",
    re.I,
)
_ALONE = re.compile(r"\s*\**(-?\d+(?:\.\d+)?)\**\s*(?:/\s*5|分)?\s*[.。]?\s*")


def parse_rating(answer: str, low: float = 0.0, high: float = 5.0) -> float | None:
    """The last rating that the answer names, or the number that it consists of; None: there is none on the scale."""
    found = _RATING.findall(answer)
    if not found:
        alone = _ALONE.fullmatch(answer)
        found = [alone[1]] if alone else []
    if not found:
        return None
    value = float(found[-1])
    return value if low <= value <= high else None


class AnswerCache:
    """Answers by key in one SQLite file; safe for threads, and for processes that share it. Killed at any moment it
    keeps every answer that was put."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, check_same_thread=False, timeout=60.0)
            with self._lock, self._db:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except (sqlite3.Error, OSError) as error:
            raise DataError(f"{path}: cannot be used as a cache of answers ({error})") from None

    def get(self, key: str) -> str | None:
        with self._lock:
            row = self._db.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, answer: str) -> None:
        with self._lock, self._db:
            self._db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, answer))

    def __len__(self) -> int:
        with self._lock:
            return int(self._db.execute("SELECT count(*) FROM answers").fetchone()[0])

    def close(self) -> None:
        self._db.close()


class CachedCaller:
    """A callable from prompt to answer that is asked once for each prompt, model, parameters and attempt.

    ask      the callable; what it raises is passed on, and nothing is stored
    model    name of what answers, and ``params`` its sampling settings: part of the key
    """

    def __init__(self, ask: Ask, cache: AnswerCache | Path | str, model: str, params: Mapping[str, Any] | None = None):
        if not model:
            raise ConfigError("names no model; answers are kept under its name", key="model")
        self._ask = ask
        self.cache = cache if isinstance(cache, AnswerCache) else AnswerCache(cache)
        self.model, self.params = model, dict(params or {})
        self.calls = self.hits = 0
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[str]] = {}

    def key(self, prompt: str, attempt: int = 0) -> str:
        whole = json.dumps([prompt, self.model, self.params, attempt], sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()

    def __call__(self, prompt: str, attempt: int = 0) -> str:
        key = self.key(prompt, attempt)
        with self._lock:
            known = self.cache.get(key)
            if known is not None:
                self.hits += 1
                return known
            waiting = self._under_way.get(key)
            if waiting is None:
                mine: Future[str] = Future()
                self._under_way[key] = mine
                self.calls += 1
        if waiting is not None:
            return waiting.result()
        try:
            answer = str(self._ask(prompt))
            self.cache.put(key, answer)
            mine.set_result(answer)
            return answer
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[key]


@dataclass(frozen=True)
class Rating:
    """``value`` is None where no attempt could be read."""

    value: float | None
    answer: str
    attempts: int


class Judge:
    """Rates texts by a rubric.

    ask         prompt -> answer; with ``model`` and ``params`` it is known in the cache
    rubric      a template with ``{text}``; ``EDU_RUBRIC`` and ``EDU_RUBRIC_ZH`` rate education value
    retries     further attempts where an answer cannot be read
    characters  of a longer text the first ones are shown
    workers     threads that ask at once
    """

    def __init__(
        self,
        ask: Ask,
        cache: AnswerCache | Path | str,
        model: str,
        params: Mapping[str, Any] | None = None,
        *,
        rubric: str = EDU_RUBRIC,
        low: float = 0.0,
        high: float = 5.0,
        retries: int = 2,
        characters: int = 4000,
        workers: int = 1,
        parse: Callable[[str, float, float], float | None] = parse_rating,
    ):
        if "{text}" not in rubric:
            raise ConfigError("has no place {text} for the text to be rated", key="rubric")
        if not low < high:
            raise ConfigError(f"should be below high={high}", key="low", value=low)
        for key, value, least in (("retries", retries, 0), ("characters", characters, 1), ("workers", workers, 1)):
            if value < least:
                raise ConfigError(f"should be at least {least}", key=key, value=value)
        self.caller = CachedCaller(ask, cache, model, params)
        self.rubric, self.low, self.high, self.retries = rubric, low, high, retries
        self.characters, self.workers, self._parse = characters, workers, parse

    def prompt(self, text: str) -> str:
        return self.rubric.replace("{text}", text[: self.characters])

    def rate(self, text: str) -> Rating:
        prompt, answer = self.prompt(text), ""
        for attempt in range(self.retries + 1):
            answer = self.caller(prompt, attempt)
            value = self._parse(answer, self.low, self.high)
            if value is not None:
                return Rating(value, answer, attempt + 1)
        return Rating(None, answer, self.retries + 1)

    def rate_all(self, texts: Iterable[str]) -> Iterator[Rating]:
        """In order, ``workers`` at a time."""
        if self.workers == 1:
            yield from map(self.rate, texts)
            return
        with ThreadPoolExecutor(self.workers) as pool:
            yield from pool.map(self.rate, texts)


class Judged:
    """A stage that rates documents: the rating becomes metadata, what cannot be read is dropped and counted.

    score_key: name of the metadata; the judge's model and the number of attempts stand in the provenance.
    """

    name = "judged"

    def __init__(self, judge: Judge, score_key: str = "edu_score"):
        self.judge, self.score_key = judge, score_key
        self.statistics = Statistics(self.name)

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        for chunk in chunks(documents):
            for document, rating in zip(chunk, self.judge.rate_all([d.text for d in chunk]), strict=True):
                self.statistics.see(document.text)
                self.statistics.counts["asked again"] += rating.attempts - 1
                if rating.value is None:
                    self.statistics.drop(document, Drop("answer cannot be read", rating.answer[:200]))
                    continue
                self.statistics.counts[f"rated {rating.value:g}"] += 1
                document = document.with_metadata(**{self.score_key: rating.value})
                document.provenance = [
                    *document.provenance,
                    {"step": self.name, "model": self.judge.caller.model, "attempts": rating.attempts},
                ]
                self.statistics.keep(document)
                yield document
        self.statistics.figures = {"calls": self.judge.caller.calls, "from_cache": self.judge.caller.hits}
