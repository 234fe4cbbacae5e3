"""Stages of Common Corpus (card B098: b, c, d, bad input)."""

import ast
import itertools
import random
import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.common_corpus.code import CodeQuality
from trainwright.data.build.common_corpus.corrections import OcrCorrect, edit_distance
from trainwright.data.build.common_corpus.ocr import Letters, OcrQuality, OcrScorer, add_noise
from trainwright.data.build.common_corpus.pages import RunningHeads
from trainwright.data.build.common_corpus.toxicity import ANSWERS, AXES, Toxicity, decide
from trainwright.data.build.documents import Document
from trainwright.data.build.fakes import fake, is_fake
from trainwright.data.build.scrubbing import ScrubPersonal, ScrubSecrets, luhn
from trainwright.data.build.statistics import Drop


def paragraphs(count):
    """Prose of the docstrings of Python's library."""
    found = []
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if {"test", "site-packages", "idlelib"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                for part in (ast.get_docstring(node) or "").split("\n\n"):
                    plain = " ".join(part.split())
                    if 200 < len(plain) < 900 and re.fullmatch(r"[\w\s.,;:'\"()\-?!]+", plain) and "_" not in plain:
                        found.append(plain)
        if len(found) >= count:
            break
    return found[:count]


# -- b: personal data


NETWORKS = ("4", "51", "55", "2223", "34", "37", "36", "6011", "65", "3530", "62")
IBANS = {"DE": 22, "BE": 16, "ES": 24, "AT": 20, "FR": 27, "NO": 15, "CH": 21, "PL": 28, "MT": 31}
SURROUNDINGS = (
    "Write to {} or come on Monday, version 1.2.3.",
    "Write to {} 12/27 cvv 123, version 1.2.3.",
    "Write to {} 100 EUR, version 1.2.3.",
    "Write to {} EUR IN WIEN, version 1.2.3.",
    "Write to {} BIC CAIXESBB, version 1.2.3.",
    'Write to "{}",12,"version 1.2.3.',
    "Write to name,{},b, version 1.2.3.",
    "Write to 7 {}\t19 2024, version 1.2.3.",
    "Write to <td>{}</td> version 1.2.3.",
    "Write to 号{}。version 1.2.3.",
    "Write to no. 12345 {}\n17 18 version 1.2.3.",
)


def planted(rng, count=1000):
    """Items of formatted kinds as they are written, and their kinds."""

    def digits(n):
        return "".join(rng.choice("0123456789") for _ in range(n))

    def grouped(text, sizes):
        mark = rng.choice(("", " ", " ", "-"))
        at, parts = 0, []
        while at < len(text):
            size = sizes[min(len(parts), len(sizes) - 1)]
            parts.append(text[at : at + size])
            at += size
        return mark.join(parts)

    def card():
        start = rng.choice(NETWORKS)
        length = {"34": 15, "37": 15, "36": 14}.get(start, 16)
        number = start + digits(length - len(start) - 1)
        number = next(number + c for c in "0123456789" if luhn(number + c))
        return grouped(number, (4,) if length == 16 else (4, 6, 5))

    def iban():
        country = rng.choice(list(IBANS))
        account = digits(IBANS[country] - 4)
        number = int("".join(str(int(c, 36)) for c in account + country) + "00")
        return grouped(f"{country}{98 - number % 97:02d}{account}", (4,))

    phones = (
        lambda: f"+49 30 {rng.randrange(10**6, 10**7)}",
        lambda: f"+1 ({rng.randrange(200, 990)}) 555-{digits(4)}",
        lambda: f"+44 20 7{digits(3)} {digits(4)}",
        lambda: f"+33 6 {digits(2)} {digits(2)} {digits(2)} {digits(2)}",
        lambda: f"{rng.randrange(200, 990)}-555-{digits(4)}",
    )
    makers = {
        "email": lambda: f"{rng.choice('abcdef')}{rng.randrange(10**6)}@firm{rng.randrange(100)}.co.uk",
        "phone": lambda: rng.choice(phones)(),
        "card": card,
        "iban": iban,
        "ip": lambda: f"{rng.randrange(11, 100)}.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}",
    }
    for i in range(count):
        kind = list(makers)[i % len(makers)]
        yield kind, makers[kind]()


@pytest.mark.parametrize("style", ["tags", "fakes"])
@pytest.mark.parametrize("around", SURROUNDINGS)
def test_b_a_thousand_planted_items(style, around):
    rng = random.Random(0)
    items = list(planted(rng))
    documents = [Document(around.format(v), f"{i}") for i, (_, v) in enumerate(items)]
    stage = ScrubPersonal(style=style)
    out = list(stage.run(documents))
    gone = sum(v not in d.text for (_, v), d in zip(items, out, strict=True))
    assert gone >= 990
    if style == "tags":  # and nothing but them, where their end can be known
        right = [
            d.text == around.format(f"<{kind.upper()}>")
            for (kind, _), d in zip(items, out, strict=True)
            if kind != "phone"
        ]
        assert sum(right) >= 0.99 * len(right)
    assert all(d.text.startswith("Write to ") and d.text.endswith("version 1.2.3.") for d in out)
    again = list(ScrubPersonal(style=style).run(out))
    assert [d.text for d in again] == [d.text for d in out]


@pytest.mark.parametrize("style", ["tags", "fakes"])
def test_b_numbers_that_fail_their_check_stay(style):
    rng = random.Random(1)
    numbers = []
    while len(numbers) < 200:
        digits = "4" + "".join(rng.choice("0123456789") for _ in range(15))
        if not luhn(digits):
            numbers.append(digits)
    text = "; ".join(f"no. {n}" for n in numbers)
    stage = ScrubPersonal(style=style)
    assert stage.apply(Document(text, "d")).text == text


def test_fakes_look_real_and_are_nobodys():
    rng = random.Random(2)
    for kind, value in planted(rng, 300):
        made = fake(kind, value)
        assert is_fake(kind, made) and made == fake(kind, value) and made != fake(kind, value, seed=1)
        if kind == "card":
            assert luhn(re.sub(r"\D", "", made))
        if kind == "iban":
            code = made.replace(" ", "")
            assert int("".join(str(int(c, 36)) for c in code[4:] + code[:4])) % 97 == 1
    assert fake("card", "4111 1111 1111 1111").count(" ") == 3
    text = ScrubPersonal(style="fakes").apply(Document("a@firm.de wrote to b@firm.de; a@firm.de again", "d")).text
    first, second, third = re.findall(r"\S+@\S+?(?=[\s;]|$)", text)
    assert first == third != second
    with pytest.raises(ConfigError, match="style='fakes'"):
        ScrubSecrets(style="fakes")


# -- c: toxicity


@pytest.mark.parametrize("limits", [(4, 2, 7, 3), (1, 1, 1, 1), (3, 3, 15, 3), (2, 1, 9, 2)])
def test_c_the_policy_is_monotone_in_each_axis(limits):
    grades = {}
    for scores in itertools.product(range(4), repeat=5):
        grades[scores] = ANSWERS.index(decide(dict(zip(AXES, scores, strict=True)), *limits))
    for scores, grade in grades.items():
        for axis in range(5):
            if scores[axis] < 3:
                worse = (*scores[:axis], scores[axis] + 1, *scores[axis + 1 :])
                assert grades[worse] >= grade
    assert set(grades.values()) >= {0, 2}


def by_words(text):
    return [min(3, text.count(w)) for w in ("aaa", "bbb", "ccc", "ddd", "eee")]


def test_toxicity_stage():
    def judged(text, **more):
        return Toxicity(by_words, **more).apply(Document(text, "d"))

    assert judged("fine").metadata["toxicity"] == dict.fromkeys(AXES, 0.0)
    assert judged("aaa aaa aaa").reason == "harmful"
    assert judged("aaa aaa").reason == "harmful, to be rewritten"
    assert judged("aaa aaa", on_rewrite="flag").metadata["toxicity_flag"]
    out = judged("aaa aaa said", rewriter=lambda t: t.replace("aaa", "---"))
    assert out.text == "--- --- said" and out.provenance[-1]["rewritten"]
    assert judged("aaa aaa", rewriter=lambda t: t).reason == "harmful after rewriting"
    scored = Document("x", "d", metadata={"toxicity": {**dict.fromkeys(AXES, 0), "violence": 3}})
    assert isinstance(Toxicity().apply(scored), Drop)


def test_toxicity_refused():
    with pytest.raises(DataError, match=r"no metadata\.toxicity"):
        Toxicity().apply(Document("x", "d"))
    for bad in ([1, 2], [0, 0, 0, 0, 4], {"violence": 1}, "high"):
        with pytest.raises(DataError, match="document 'd'"):
            Toxicity(lambda text, bad=bad: bad).apply(Document("x", "d"))
    for settings_, names in (
        ({"rewrite_sum": 9}, "rewrite_sum=9"),
        ({"rewrite_max": 0}, "rewrite_max=0"),
        ({"on_rewrite": "ask"}, "on_rewrite"),
        ({"scorer": "nowhere"}, "module:function"),
        ({"scorer": "json:nothing"}, "can be imported"),
    ):
        with pytest.raises(ConfigError, match=names):
            Toxicity(**settings_)


# -- d: scanned text


def test_d_noise_lowers_the_score():
    found = paragraphs(500)
    assert len(found) == 500
    rng = random.Random(0)
    scorer = OcrScorer()
    clean = [scorer(p) for p in found]
    noisy = [scorer(add_noise(p, 0.1, rng)) for p in found]
    assert sum(c > n for c, n in zip(clean, noisy, strict=True)) >= 495
    assert sum(c >= 0.8 for c in clean) >= 475 and sum(n >= 0.8 for n in noisy) <= 10


def test_other_languages_and_scripts_are_not_taken_for_noise():
    scorer = OcrScorer()
    rng = random.Random(0)
    for text in (
        "Der Zug hält in München, weil die Weichen gestört sind; viele Reisende müssen warten.",
        "Les élèves étudient à l'école où l'on apprend l'histoire de la littérature française.",
        "Поезд останавливается в Москве, потому что стрелки не работают; пассажиры ждут.",
        "这是一个用于测试的中文句子，包含一些常见的词语。我们使用Python编程。",
        "これは日本語の文章です。カタカナも入っています。",
        "Το τρένο σταματά στην Αθήνα γιατί υπάρχει βλάβη στις γραμμές.",
    ):
        assert scorer(text) > 0.85 > scorer(add_noise(text, 0.15, rng)), text


def test_ocr_stage(tmp_path):
    good, bad = "A plain paragraph that everybody can read without trouble.", "T#e pl@1n p4r&gr^ph wi~h t0o m%ny f|aws"
    kept = OcrQuality().apply(Document(good, "d"))
    assert kept.metadata["ocr_score"] > 0.9
    assert OcrQuality().apply(Document(bad, "d")).reason == "badly read"
    stage = OcrQuality(segments=True)
    mixed = stage.apply(Document(f"{good}\n\n{bad}\n\n{good}", "d"))
    assert mixed.text == f"{good}\n\n{good}" and stage.statistics.counts["segments left out"] == 1
    assert OcrQuality(segments=True).apply(Document(f"{good}\n\n{bad}\n\n{bad}", "d")).reason == "badly read"
    for settings_ in ({"least": 2}, {"least_kept": -1}, {"reference": tmp_path / "none"}):
        with pytest.raises(ConfigError):
            OcrQuality(**settings_)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(DataError, match="too short"):
        OcrQuality(reference=tmp_path / "short.txt")


def test_letters_of_another_language():
    language = Letters.of("zxqv vqxz " * 3000)
    assert language.oddness("zxqv") == 0 < Letters().oddness("zxqv")


# -- pages, corrections, code


def test_running_heads():
    rng = random.Random(0)
    body = [" ".join("".join(rng.choices("aeioulmnrst", k=5)) for _ in range(9)) + f" {i}" for i in range(60)]
    pages = []
    for n in range(10):
        head = "THE HISTORY OF TOWNS" if n % 2 else f"CHAPTER TWO   {n + 1}"
        pages.append("\n".join([head, "", *body[n * 6 : n * 6 + 6], f"- {n + 1} -"]))
    out = RunningHeads().apply(Document("\f".join(pages), "d"))
    assert out.text.split("\n") == body and out.provenance[-1]["lines"] == 20
    assert RunningHeads().apply(out) is out  # no pages any more
    cut = Document("a b c inter-\n1\festing words here\n2\fand more\n3", "d")
    assert RunningHeads().apply(cut).text == "a b c interesting words here\nand more"
    assert RunningHeads().apply(Document("1\f2\f3", "d")).reason == "only heads and feet"
    assert RunningHeads().apply(Document("one\ftwo", "d")).text == "one\ftwo"
    for settings_ in ({"edge": 0}, {"share": 0}, {"page_mark": "("}):
        with pytest.raises(ConfigError):
            RunningHeads(**settings_)


def table(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row, before = [i], row
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


@settings(max_examples=200, deadline=None)
@given(st.text("abcü漢", max_size=40), st.text("abcü漢", max_size=40))
def test_edit_distance_is_the_table_s(a, b):
    assert edit_distance(a, b) == table(a, b)


def test_corrections_under_a_cap():
    text = "Tbe quick brown fox\n\njumps over tbe lazy dog"
    out = OcrCorrect(lambda p: p.replace("tbe", "the").replace("Tbe", "The")).apply(Document(text, "d"))
    assert out.text == "The quick brown fox\n\njumps over the lazy dog"
    assert out.metadata["original_text"] == text and out.provenance[-1] == {
        "step": "ocr_correct",
        "corrected": 2,
        "rejected": 0,
    }
    stage = OcrCorrect(lambda p: "an invented text of the model" if p.startswith("Tbe") else p.replace("tbe", "the"))
    half = stage.apply(Document(text, "d"))
    assert half.text == "Tbe quick brown fox\n\njumps over the lazy dog"
    assert stage.statistics.counts["corrections rejected"] == 1
    unchanged = Document("a b", "d")
    assert OcrCorrect(lambda p: "").apply(unchanged) is unchanged  # everything left out
    # Just at the cap, and one beyond it.
    assert OcrCorrect(lambda p: "xxx4567890").apply(Document("1234567890", "d")).text == "xxx4567890"
    assert OcrCorrect(lambda p: "xxxx567890").apply(Document("1234567890", "d")).text == "1234567890"
    with pytest.raises(ConfigError, match="cap=1"):
        OcrCorrect(lambda p: p, cap=1)
    with pytest.raises(DataError, match="gave NoneType"):
        OcrCorrect(lambda p: None).apply(Document("x", "d"))


def test_code_quality():
    def reason(text, name="a.py", **more):
        answer = CodeQuality(**more).apply(Document(text, name, "code"))
        return answer.reason if isinstance(answer, Drop) else None

    assert reason("def f(x):\n    return x + 1\n") is None
    assert reason("x = '" + "ab " * 400 + "'") == "a line too long"
    assert reason("\n".join(["word " * 30] * 20), "a.txt") == "lines too long"
    assert reason("{}[]();;;\n" * 20, "a.js") == "few letters"
    assert reason("# Auto-generated by a tool. DO NOT EDIT.\nx = 1\n") == "generated"
    assert reason("\n".join(["0x1f, 0x2e, 0x3d, 0x4c, 0x5b, 0x6a, 0x7f, 0x8e, 0x90,"] * 9), "a.c") == "mostly data"
    assert reason("def f(:\n") == "does not parse"
    assert reason("def f(:\n", parse=False) is None
    assert reason("def f(:\n", sources=["other"]) is None
    for settings_ in ({"longest_line": 0}, {"most_data": 2}):
        with pytest.raises(ConfigError):
            CodeQuality(**settings_)
