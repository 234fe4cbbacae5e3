"""Synthetic textbooks and conversations: what each row says of its origin, and how alike they are."""

import json
from collections import Counter

import pytest

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.dialogues import TASKS, DialogueRecipe, dialogues, to_chat_row
from trainwright.data.build.quality.diversity import Diversity, TrackDiversity, markdown_share
from trainwright.data.build.quality.judge import CachedCaller, Judge
from trainwright.data.build.quality.synthetic import AUDIENCES, STYLES, TextbookRecipe, textbooks

SEEDS = [Document(f"Seed text {i} about stars.", f"seed{i}", "wiki", licence="cc-by-4.0") for i in range(5)]


class Generator:
    def __init__(self):
        self.prompts = []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        return f"Text {hash(prompt)} " + "word " * 60


def test_d_every_row_says_its_seed_template_and_generator(tmp_path):
    ask = Generator()
    rows = list(textbooks(SEEDS, CachedCaller(ask, tmp_path / "c.db", "gen-1", {"temperature": 0.8})))
    assert len(rows) == 5 * len(STYLES) * len(AUDIENCES) == len({r.id for r in rows})
    for row in rows:
        step = row.provenance[-1]
        assert step["seed_id"] in {s.id for s in SEEDS} and step["template_id"] == "textbook-en-1"
        assert step["generator"] == "gen-1" and step["params"] == {"temperature": 0.8}
        assert step["style"] in STYLES and step["audience"] in AUDIENCES
        assert row.licence == "cc-by-4.0" and row.source == "textbooks"
    assert all(any(s.text in p for s in SEEDS) for p in ask.prompts) and len(set(ask.prompts)) == len(rows)
    assert json.loads(json.dumps([r.to_row() for r in rows]))[0]["provenance"]


def test_c_textbooks_go_on_without_generating_twice(tmp_path):
    first = Generator()
    stream = textbooks(SEEDS, CachedCaller(first, tmp_path / "c.db", "g"))
    begun = [next(stream) for _ in range(7)]
    second = Generator()
    rows = list(textbooks(SEEDS, CachedCaller(second, tmp_path / "c.db", "g")))
    assert rows[:7] == begun and not set(first.prompts) & set(second.prompts)
    assert len(first.prompts) + len(second.prompts) == len(rows)


def test_pairs_in_turn_come_up_equally_often(tmp_path):
    recipe = TextbookRecipe(per_seed=4)
    rows = list(textbooks(SEEDS, CachedCaller(Generator(), tmp_path / "c.db", "g"), recipe))
    assert len(rows) == 20 and set(
        Counter((r.provenance[-1]["style"], r.provenance[-1]["audience"]) for r in rows).values()
    ) == {1}
    chinese = TextbookRecipe.chinese(per_seed=1)
    assert "教科书" in chinese.prompt("种子", "textbook", "public") and chinese.template_id == "textbook-zh-1"
    short = CachedCaller(lambda p: "no", tmp_path / "short.db", "g")
    assert not list(textbooks(SEEDS, short, recipe))


@pytest.mark.parametrize(
    "settings",
    [{"template": "{style} {audience}"}, {"template_id": ""}, {"styles": {}}, {"per_seed": 0}, {"per_seed": 99}],
)
def test_bad_textbooks(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TextbookRecipe(**settings)


def speak(prompt):
    """A model that plays both sides; the requests of two kinds of task are the same."""
    if prompt.startswith("You play a person"):
        kind = next(t for t, words in TASKS.items() if words in prompt)
        if kind in ("advice", "brainstorming"):
            return "How do I make friends in a city where I know nobody at all?"
        return f"{kind} please, number {prompt.split('number ')[1][:2]}: " + kind[::-1] * 5
    if prompt.startswith("You play the user"):
        return "And why?"
    return "An answer to: " + prompt[-20:]


def test_d_conversations(tmp_path):
    judged = []

    def ask(prompt):
        judged.append(prompt)
        return "Score: 1" if "coding please" in prompt else "Score: 4"

    counts = Counter()
    judge = Judge(ask, tmp_path / "j.db", "judge", rubric="{text}")
    rows = list(
        dialogues(CachedCaller(speak, tmp_path / "c.db", "gen"), judge, DialogueRecipe(per_task=1), counts=counts)
    )
    assert counts == {"begun": 11, "kept": 9, "rated low": 1, "near copy": 1} and len(judged) == 10
    for row in rows:
        step, messages = row.provenance[-1], row.metadata["messages"]
        assert step["seed_id"] == row.id and step["template_id"] == "dialogue-1" and step["generator"] == "gen"
        assert [m["role"] for m in messages] == ["user", "assistant"] * 3 and row.metadata["rating"] == 4.0
    assert json.loads(to_chat_row(rows[0]))["messages"] == rows[0].metadata["messages"]
    # The judge saw the first turn alone.
    assert all("And why?" not in p for p in judged)
    # Once more from the caches.
    caller = CachedCaller(lambda p: pytest.fail("generated twice"), tmp_path / "c.db", "gen")
    cached = Judge(lambda p: pytest.fail("judged twice"), tmp_path / "j.db", "judge", rubric="{text}")
    assert list(dialogues(caller, cached, DialogueRecipe(per_task=1))) == rows


def test_conversations_are_rows_of_a_chat_source(tmp_path):
    from trainwright.core.registry import build

    recipe = DialogueRecipe(per_task=2, turns=1, similarity=None)
    rows = list(dialogues(CachedCaller(speak, tmp_path / "c.db", "gen"), None, recipe))
    assert len(rows) == 22
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(to_chat_row(r) + "\n" for r in rows))
    source = build("source", {"name": "chat", "path": str(file)})
    assert source.fingerprint()
    with pytest.raises(ConfigError, match="turns"):
        DialogueRecipe(turns=0)
    with pytest.raises(ConfigError, match="similarity"):
        DialogueRecipe(similarity=1.5)


def test_distinct_n_and_markdown():
    same, different = Diversity(), Diversity()
    for i in range(20):
        same.add("the same words again and again")
        different.add(" ".join(f"word{i}x{j}" for j in range(6)))
    assert same.figures()["distinct_1"] == pytest.approx(5 / 120, abs=1e-4)
    assert different.figures()["distinct_1"] == different.figures()["distinct_3"] == 1.0
    assert markdown_share("# Head\n\ntext\n- item\n**bold** word") == pytest.approx(3 / 4)
    assert markdown_share("plain text - with a dash\n2 * 3 = 6") == 0.0 and markdown_share("") == 0.0
    limited = Diversity((1,), limit=10)
    limited.add("a b c d e f g h i j")
    limited.add("a b c")
    assert limited.figures()["distinct_1"] == 1.0, "of the first 10 n-grams"
    stage = TrackDiversity()
    rows = [Document("# a\nb c", "1", "x"), Document("plain", "2", "y")]
    assert list(stage.run(rows)) == rows
    assert stage.statistics.figures["sources"]["x"]["markdown_share"] == 0.5
    with pytest.raises(ConfigError, match="limit"):
        TrackDiversity(0)
