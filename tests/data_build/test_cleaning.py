"""Cleaning stages: what they change and what they leave."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_corpus import text

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.cleaning import BoilerplateLines, Language, Lengths, NormalizeUnicode, RepeatedLines
from trainwright.data.build.documents import Document
from trainwright.data.build.filters import Licences, UniqueIds, Where
from trainwright.data.build.statistics import Drop


def clean(stage, text):
    found = stage.apply(Document(text, "0"))
    return found if isinstance(found, Drop) else found.text


def test_unicode():
    stage = NormalizeUnicode(mojibake=False)
    assert clean(stage, "Cafe\u0301\r\nnext\u2028line\rend\ufeff\u200b\x00\x07\ttab") == "Café\nnext\nline\nend\ttab"
    assert clean(stage, "ﬁne ①") == "ﬁne ①"
    assert clean(NormalizeUnicode("NFKC", mojibake=False), "ﬁne ①") == "fine 1"
    assert clean(stage, "می\u200cخواهم 👩\u200d👩") == "می\u200cخواهم 👩\u200d👩"
    assert clean(stage, "half \ud800 pair") == "half  pair"
    assert clean(stage, "\x00\x01") == Drop("nothing left")
    document = Document("plain", "0")
    assert stage.apply(document) is document
    assert stage.apply(Document("a\r", "0")).provenance == [{"step": "normalize_unicode", "form": "NFC"}]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.text())
def test_unicode_is_idempotent(raw):
    stage = NormalizeUnicode(mojibake=False)
    once = clean(stage, raw)
    if not isinstance(once, Drop):
        assert clean(stage, once) == once or not once.strip()
        once.encode()


@pytest.mark.parametrize("right", ["schön – «naïve» café", "“quoted” text", "Привет, мир", "façade à la carte"])
def test_mojibake(right):
    pytest.importorskip("ftfy")
    stage = NormalizeUnicode()
    wrong = right.encode().decode("latin-1")
    assert clean(stage, wrong) == right
    assert clean(stage, right) == right
    assert stage.statistics.counts["mojibake mended"] == 1


PAGE = """Skip to content
Home
Menu
The cookies that we baked on Sunday were good, and this website uses cookies in a recipe.
We use cookies to improve your experience. Accept all?
Share on Twitter
Search engines read more than people do.
READ MORE »
Please enable JavaScript to view the comments.
© 2023 Example Inc. All rights reserved.
Home is where the heart is.
3 comments"""


def test_boilerplate():
    stage = BoilerplateLines()
    assert clean(stage, PAGE).split("\n") == [
        "The cookies that we baked on Sunday were good, and this website uses cookies in a recipe.",
        "Search engines read more than people do.",
        "Home is where the heart is.",
    ]
    assert stage.statistics.counts["lines left out"] == 9
    prose = "I logged in to see more.\nNext year we will share a house.\nTags are useful.\n\nPrinting took a day."
    assert clean(stage, prose) == prose
    assert clean(stage, "Home\nMenu\nSearch\nok").reason == "mostly boilerplate"
    assert clean(stage, "Lorem ipsum dolor sit amet").reason == "lorem ipsum"
    assert clean(BoilerplateLines(patterns=[r"chapter \d+"]), "Chapter 12\nIt was a dark and stormy night.") == (
        "It was a dark and stormy night."
    )
    with pytest.raises(ConfigError, match="no regular expression"):
        BoilerplateLines(patterns=["("])


def test_repeated_lines():
    documents = [
        Document(f"This stands on every page of it.\nOwn line number {i} here.\nshort", f"{i}", "a") for i in range(9)
    ]
    documents.append(Document("This stands on every page of it.", "9", "a"))
    documents.append(Document("This stands on every page of it.", "10", "b"))
    stage = RepeatedLines(most=3, width=1024)
    found = list(stage.run(documents))
    assert ["every page" in d.text for d in found] == [True] * 3 + [False] * 6 + [True]
    assert all("short" in d.text for d in found[:9])
    assert stage.statistics.dropped == {"only repeated lines": 1}
    assert stage.statistics.changed == 6
    # Many lines that come once each: hardly any is taken for a repeated one.
    rng = random.Random(0)
    unique = [Document("\n".join(text(rng, 12) for _ in range(20)), f"{i}") for i in range(50)]
    stage = RepeatedLines(most=1, width=1 << 14)
    list(stage.run(unique))
    assert stage.statistics.counts["lines left out"] == 0


def test_lengths_are_slimpajamas():
    """At least 200 characters without punctuation and white space."""
    stage = Lengths()
    assert clean(stage, "ab, " * 99) == Drop("too short", "198 characters")
    assert clean(stage, "ab, " * 100) == "ab, " * 100
    assert clean(stage, "「漢」 " * 199).detail == "199 characters"
    assert clean(Lengths(0, 10), "x" * 11) == Drop("too long", "11 characters")
    for wrong in ({"least": -1}, {"most": 100}):
        with pytest.raises(ConfigError):
            Lengths(**wrong)


TEXTS = {
    "en": "The committee has decided that the new rules will come into force at the beginning of next year.",
    "de": "Der Ausschuss hat beschlossen, dass die neuen Regeln zu Beginn des nächsten Jahres in Kraft treten.",
    "fr": "Le comité a décidé que les nouvelles règles entreront en vigueur au début de l'année prochaine.",
    "zh": "委员会决定新规则将于明年年初生效，所有成员都必须遵守。",
}


def test_language():
    pytest.importorskip("py3langid")
    stage = Language()
    for code, sentence in TEXTS.items():
        found = stage.apply(Document(sentence, "0"))
        assert found.metadata["language"] == code and found.metadata["language_score"] > 0.6
        assert found.text == sentence
    keep = Language(keep=["en", "de"])
    assert [keep.apply(Document(s, "0")).__class__ for s in TEXTS.values()] == [Document, Document, Drop, Drop]
    assert Language(least_score=1.0).apply(Document("ok", "0")).reason == "language not sure"
    assert Language(languages=["de", "fr"]).apply(Document(TEXTS["en"], "0")).metadata["language"] in ("de", "fr")
    with pytest.raises(ConfigError, match="keep: unknown: xx"):
        Language(keep=["xx"])


def test_unique_ids():
    documents = [Document("a", "1"), Document("b", "2"), Document("c", "1"), Document("d", "1"), Document("e", "1#2")]
    with pytest.raises(DataError, match="the id '1' comes twice"):
        list(UniqueIds().run(documents))
    found = list(UniqueIds("rename").run(documents))
    assert len({d.id for d in found}) == 5
    assert [d.text for d in found] == list("abcde") and found[2].provenance == [{"step": "unique_ids", "was": "1"}]
    stage = UniqueIds("drop")
    assert [d.text for d in stage.run(documents)] == ["a", "b", "e"]
    assert stage.statistics.dropped == {"duplicate id": 2}


def test_many_ids(monkeypatch):
    from trainwright.data.build import seen

    monkeypatch.setattr(seen, "BUFFER", 64)
    hashes = seen.SeenHashes()
    assert all(hashes.add(str(i)) for i in range(1000))
    assert not any(hashes.add(str(i)) for i in range(1000))
    assert len(hashes) == 1000 and len(hashes._runs) < 10


def test_licences():
    stage = Licences(["CC0", "mit"])
    assert [
        isinstance(stage.apply(Document("x", "0", licence=licence)), Document)
        for licence in ("cc0", "MIT", "gpl", None)
    ] == [True, True, False, False]
    assert isinstance(Licences(["cc0"], unknown=True).apply(Document("x", "0")), Document)
    with pytest.raises(ConfigError, match="names no licence"):
        Licences([])


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("score >= 2", True),
        ("score>2", False),
        ("metadata.score < 2.5", True),
        ("deep.kind = web", True),
        ("deep.kind != web", False),
        ("source == a", True),
        ("missing > 1", False),
        ("deep > 1", False),
        ("flag = True", True),
    ],
)
def test_where(condition, kept):
    document = Document("x", "0", "a", metadata={"score": 2, "deep": {"kind": "web"}, "flag": True})
    assert isinstance(Where(condition).apply(document), Document) is kept


def test_where_refused():
    for wrong in ("score", "score ~ 3", "score > high"):
        with pytest.raises(ConfigError, match="where="):
            Where(wrong)
