"""The normal form of texts, and Chinese in one form and back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_text import code, prose

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.dedup import ExactDedup, NearDedup
from trainwright.data.build.documents import Document
from trainwright.data.build.pipeline import chain
from trainwright.data.build.quality import chinese
from trainwright.data.build.quality.chinese import NormalizeChinese, normalize, restore, restored
from trainwright.data.build.quality.normalize import normalize_line, normalize_text, units


@given(st.text())
@settings(max_examples=400, deadline=None)
def test_c_normalizing_twice_is_normalizing_once(text):
    once = normalize_text(text)
    assert normalize_text(once) == once
    for unit in ("auto", "word", "char"):
        line = normalize_line(text, unit)
        assert "\n" not in line and normalize_line(line, "auto" if unit == "auto" else unit) == line


@pytest.mark.parametrize("text", ["\u2115\u210c İ \u1e9e", "Ａ１\u3000Ǆ", "a \u0301b", "ﬁ\u0130\n\n \n\n x"])
def test_c_letters_that_decompose_into_capitals_are_lowered(text):
    once = normalize_text(text)
    assert once == once.lower() == normalize_text(once)


def test_c_real_texts():
    for text in prose()[:50] + code()[:50]:
        once = normalize_text(text)
        assert normalize_text(once) == once and normalize_line(normalize_line(text)) == normalize_line(text)


def test_the_normal_form_of_the_paper():
    assert normalize_text("Héllo   Wörld\n\n\n\n\nNaïve\tX ") == "hello world\n\nnaive\tx"
    assert normalize_line("One,\n\nTWO\tthree") == r"one , \n \n two \t three"
    assert normalize_line("Hello world", split=lambda t: [t[:3], t[3:]]) == "hel lo world"


def test_units():
    assert units("你好吗 ok") == ["你", "好", "吗", "ok"]
    assert units("你好吗 ok", "word") == ["你好吗", "ok"]
    assert units("ab c", "char") == ["a", "b", "c"]


CHINESE = "２０２６年，電腦與網路的發展（ＡＢＣ）　漢字萬國；简体字也有。"


def test_b_normalizing_chinese_is_reversible():
    new, runs = normalize(CHINESE)
    assert new == "2026年,电脑与网路的发展(ABC) 汉字万国;简体字也有。" and len(new) == len(CHINESE)
    assert restore(new, runs) == CHINESE and normalize(new) == (new, [])
    assert restore(*normalize("plain ascii")) == "plain ascii"


@given(st.text(st.one_of(st.characters(), st.sampled_from("ＡｚＺ０９！～\u3000漢汉萬与與體体"))))
@settings(max_examples=300, deadline=None)
def test_b_any_text_comes_back(text):
    for width, simplify in ((True, True), (True, False), (False, True)):
        new, runs = normalize(text, width, simplify)
        assert restore(new, runs) == text and normalize(new, width, simplify)[0] == new


def test_b_every_traditional_character_of_opencc():
    opencc = pytest.importorskip("opencc")
    converter = opencc.OpenCC("t2s")
    table = chinese._simplified()
    rng = random.Random(0)
    assert len(table) > 2500
    for a in rng.sample(sorted(table), 300):
        assert converter.convert(converter.convert(chr(a))) == chr(table[a])


def test_b_copies_that_differ_in_width_or_script_are_duplicates():
    body = "電腦與網路的發展改變了世界，人們的生活也因此不同。" * 4
    full = body.replace("，", "，").replace("。", "．") + "ＡＢＣ１２３"
    half = body.replace("，", ",").replace("。", ".") + "ABC123"
    simple = normalize(half, width=False)[0]
    assert len({full, half, simple}) == 3
    documents = [Document(t, str(i), "web") for i, t in enumerate((full, half, simple, "別的文本，" * 30))]
    stage = NormalizeChinese()
    kept = list(chain([stage, ExactDedup()], iter(documents)))
    assert [d.id for d in kept] == ["0", "3"] and stage.statistics.counts["characters changed"] > 0
    assert restored(kept[0]).text == full and restored(kept[1]).text == documents[3].text
    assert kept[0].provenance[-1]["step"] == "normalize_chinese"
    # Near copies by character 5-grams.
    near = [*documents[:1], Document(half.replace("世界", "全球", 1), "n", "web")]
    kept = list(chain([NormalizeChinese(), NearDedup(threshold=0.8, ngram=5, unit="char")], iter(near)))
    assert len(kept) == 1
    assert len(list(chain([NearDedup(threshold=0.8, ngram=5, unit="char")], iter(near)))) == 2, "as they were: none"


def test_the_original_may_be_left_out():
    stage = NormalizeChinese(reversible=False)
    assert chinese.ORIGINAL not in stage.apply(Document("ＡＢ", "1")).metadata
    same = Document("plain", "2")
    assert stage.apply(same) is same


def test_bad():
    with pytest.raises(ConfigError, match="nothing to do"):
        NormalizeChinese(width=False, simplify=False)
    document = NormalizeChinese().apply(Document("ＡＢＣ", "1"))
    document.text = "A"
    with pytest.raises(DataError, match="does not belong"):
        restored(document)
