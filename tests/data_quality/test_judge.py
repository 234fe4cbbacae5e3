"""Judged labels: parsed, asked again, cached, resumed."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.judge import (
    EDU_RUBRIC,
    EDU_RUBRIC_ZH,
    AnswerCache,
    CachedCaller,
    Judge,
    Judged,
    parse_rating,
)

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "answer, rating",
    [
        ("Good. Score: 4", 4.0), ("**Score:** 3", 3.0), ("Score: **2**", 2.0), ("score is 5.", 5.0), ("4", 4.0),
        ("3.5 / 5", 3.5), ("结构清楚。评分：4", 4.0), ("得分 2 分", 2.0), ("5分", 5.0),
        ("Score: 1 for a start ... in the end\nScore: 3", 3.0), ("Score: 9", None), ("Score: -1", None), ("", None),
        ("I would not say.", None), ("There are 4 parts.", None),
    ],
)  # fmt: skip
def test_ratings_are_read(answer, rating):
    assert parse_rating(answer) == rating


def documents(count):
    return [Document(f"text {i}", str(i), "web") for i in range(count)]


def test_unreadable_answers_are_asked_again_then_dropped_and_counted(tmp_path):
    asked = []

    def ask(prompt):
        asked.append(prompt)
        number = int(prompt.split()[1])
        if number == 1 and asked.count(prompt) == 2:
            return "Score: 2"
        return "no idea" if number in (1, 2) else "Score: 4"

    stage = Judged(Judge(ask, tmp_path / "c.db", "m", rubric="{text}", retries=2))
    kept = list(stage.run(documents(4)))
    assert [(d.id, d.metadata["edu_score"]) for d in kept] == [("0", 4.0), ("1", 2.0), ("3", 4.0)]
    assert stage.statistics.dropped == {"answer cannot be read": 1}
    assert stage.statistics.counts["asked again"] == 3 and len(asked) == 1 + 2 + 3 + 1
    assert kept[1].provenance == [{"step": "judged", "model": "m", "attempts": 2}]
    # Once more: all from the cache, also what could not be read.
    again = Judged(Judge(lambda p: pytest.fail("asked twice"), tmp_path / "c.db", "m", rubric="{text}", retries=2))
    assert [d.id for d in again.run(documents(4))] == ["0", "1", "3"]
    assert again.statistics.figures == {"calls": 0, "from_cache": 7}


def test_c_killed_and_started_again_no_call_is_made_twice(tmp_path):
    def start(cache, log, stop):
        command = [sys.executable, str(HERE / "judges.py"), str(tmp_path / cache), str(tmp_path / log), str(stop)]
        return subprocess.run(command, capture_output=True, text=True)

    first = start("a.db", "log", 13)
    assert first.returncode == 9, first.stderr
    assert start("a.db", "log", 5).returncode == 9
    last = start("a.db", "log", 1000)
    assert last.returncode == 0, last.stderr
    whole = start("b.db", "whole", 1000)
    assert whole.returncode == 0 and (tmp_path / "log.kept").read_text() == (tmp_path / "whole.kept").read_text()
    lines = (tmp_path / "log").read_text().split()
    assert lines == (tmp_path / "whole").read_text().split()
    # A number is asked twice only where its answer could not be read, which is what retries=1 asks for.
    assert {n: lines.count(n) for n in lines} == {str(i): 2 if i % 7 == 3 else 1 for i in range(30)}


def test_a_failed_call_leaves_nothing_behind(tmp_path):
    state = {"up": False}

    def ask(prompt):
        if not state["up"]:
            raise TimeoutError("no answer")
        return "Score: 1"

    judge = Judge(ask, tmp_path / "c.db", "m")
    with pytest.raises(TimeoutError):
        judge.rate("x")
    state["up"] = True
    assert judge.rate("x").value == 1.0 and len(judge.caller.cache) == 1


def test_threads_ask_a_prompt_once_and_keep_the_order(tmp_path):
    count, lock = {}, threading.Lock()

    def ask(prompt):
        with lock:
            count[prompt] = count.get(prompt, 0) + 1
        time.sleep(0.002)
        return f"Score: {len(prompt) % 6}"

    judge = Judge(ask, tmp_path / "c.db", "m", rubric="{text}", workers=8)
    texts = ["a" * (i % 5) for i in range(60)]
    assert [r.value for r in judge.rate_all(texts)] == [len(t) % 6 for t in texts]
    assert set(count.values()) == {1} and judge.caller.calls == 5 and judge.caller.hits + 5 <= 60


def test_the_key_is_prompt_model_and_parameters(tmp_path):
    cache = AnswerCache(tmp_path / "c.db")
    callers = [
        CachedCaller(str.upper, cache, "m"), CachedCaller(str.upper, cache, "n"),
        CachedCaller(str.upper, cache, "m", {"temperature": 0.5}),
        CachedCaller(str.upper, cache, "m", {"temperature": 0.7}),
    ]  # fmt: skip
    assert len({c.key("p") for c in callers} | {callers[0].key("q"), callers[0].key("p", 1)}) == 6
    for caller in callers:
        assert caller("p") == "P" and caller("p") == "P" and caller.calls == 1 and caller.hits == 1
    assert len(cache) == 4


def test_rubrics_show_the_text():
    for rubric in (EDU_RUBRIC, EDU_RUBRIC_ZH):
        judge_prompt = rubric.replace("{text}", "{x} 你好")
        assert "{x} 你好" in judge_prompt and "0" in rubric and "5" in rubric


def test_bad(tmp_path):
    for settings, key in (
        ({"rubric": "rate it"}, "rubric"), ({"low": 5.0}, "low"), ({"retries": -1}, "retries"),
        ({"workers": 0}, "workers"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=key):
            Judge(str, tmp_path / "c.db", "m", **settings)
    with pytest.raises(ConfigError, match="model"):
        CachedCaller(str, tmp_path / "c.db", "")
    (tmp_path / "no.db").write_text("this is no database, and long enough to be seen as one" * 10)
    with pytest.raises(DataError, match="cannot be used as a cache"):
        AnswerCache(tmp_path / "no.db")
