"""The text of HTML pages, and the encoding that a page names, both as browsers read them.

Elements: HTML Living Standard, section 13.2 (what an end tag closes, what leaves foreign content). Labels of encodings:
Encoding Standard, section 4.2 (iso-8859-1 and ascii stand for windows-1252, gb2312 for gb18030, and so on).
"""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

# What is on a page beside its text. Where its end tag is missing nothing tells where it ended, and the text of the
# page may be inside: then it stays, but for what is never text.
_NO_TEXT = frozenset(("script", "style", "template", "svg"))
_LEFT_OUT = _NO_TEXT | frozenset(
    ("noscript", "nav", "header", "footer", "aside", "button", "select", "textarea", "datalist", "label")
)
_BLOCKS = frozenset(
    ("p", "div", "section", "article", "main", "li", "ul", "ol", "table", "tr", "h1", "h2", "h3", "h4", "h5", "h6",
     "pre", "blockquote", "br", "hr", "dd", "dt", "dl", "figure", "figcaption", "title", "address", "details",
     "summary", "fieldset", "legend", "form", "caption", "thead", "tbody", "tfoot", "center", "hgroup", "body",
     "header", "footer", "nav", "aside")
)  # fmt: skip
_CELLS = frozenset(("td", "th"))  # a space apart
_VOID = frozenset(
    ("area", "base", "br", "col", "embed", "frame", "hr", "img", "input", "link", "meta", "param", "source", "track",
     "wbr")
)  # fmt: skip
_SPECIAL = _BLOCKS | _CELLS | frozenset(("button", "select", "template", "noscript", "textarea"))
_SCOPES = frozenset(("table", "td", "th", "caption", "template"))  # an end tag outside of them closes nothing inside
_TABLE = frozenset(("table", "tr", "td", "th", "tbody", "thead", "tfoot", "caption", "template"))
_ALONE = frozenset(("p", "li", "dd", "dt", "tr", "td", "th", "option"))  # the next one closes the one before
DEPTH = 512  # elements inside of another that are told apart; browsers do the same
_WHITE = re.compile(r"[ \t\r\n\f]+")


class _Pre(str):
    """Text whose line breaks and indentation count."""


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._open: list[tuple[str, int | None]] = []  # and where the text begins that goes when it is closed
        self._count: Counter[str] = Counter()

    def parse_marked_section(self, i: int, report: Any = 1) -> int:
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:  # "<![" and a word that the parser does not know: a comment, as browsers read it
            return self.parse_bogus_comment(i)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if self._count["svg"] and (tag in _BLOCKS and tag != "title"):
            self._close("svg")  # no such thing inside of a drawing: it was not closed
        if tag in _ALONE and self._open and self._open[-1][0] == tag:
            self._pop()
        left_out = tag in _LEFT_OUT and not (tag == "header" and (self._count["article"] or self._count["main"]))
        self._space(tag)
        if tag not in _VOID and len(self._open) < DEPTH:
            self._open.append((tag, len(self.parts) if left_out else None))
            self._count[tag] += 1

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if self._count["svg"] and tag not in _VOID:
            self._close(tag)  # elsewhere the slash means nothing

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("body", "html"):
            self._close(tag)
        self._space(tag)

    def handle_data(self, data: str) -> None:
        self.parts.append(_Pre(data) if self._count["pre"] else _WHITE.sub(" ", data))

    def _space(self, tag: str) -> None:
        if tag in _CELLS:
            self.parts.append(" ")
        elif tag == "br" and self._count["pre"]:
            self.parts.append(_Pre("\n"))
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def _close(self, tag: str) -> None:
        """The innermost ``tag`` and what was opened inside of it and not closed."""
        if not self._count[tag]:
            return
        for place in range(len(self._open) - 1, -1, -1):
            name = self._open[place][0]
            if name == tag:
                while len(self._open) > place + 1:
                    self._pop()
                self._pop(whole=True)
                return
            if (name in _SPECIAL and tag not in _SPECIAL) or (name in _SCOPES and tag not in _TABLE):
                return

    def _pop(self, whole: bool = False) -> None:
        tag, start = self._open.pop()
        self._count[tag] -= 1
        if start is not None and (whole or tag in _NO_TEXT):
            del self.parts[start:]

    def finish(self) -> None:
        self.close()
        while self._open:
            self._pop()


def html_text(page: str) -> str:
    """The text of a page, a block a line, without scripts, menus and the controls of forms.

    ``pre`` keeps its lines; cells of a table are a space apart.
    """
    parser = _Text()
    parser.feed(page)
    parser.finish()
    out: list[str] = []
    run: list[str] = []
    verbatim = False
    for part in [*parser.parts, "\n"]:
        if isinstance(part, _Pre) != verbatim:
            if verbatim or "\n" in part or part.strip() or run:
                out += _lines("".join(run), verbatim)
            run, verbatim = [], isinstance(part, _Pre)
        run.append(part)
    out += _lines("".join(run), verbatim)
    return "\n".join(out)


def _lines(text: str, verbatim: bool) -> list[str]:
    if verbatim:
        text = "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
        return text.strip("\n").split("\n") if text.strip() else []
    return [" ".join(line.split()) for line in text.split("\n") if line.strip()]


_LABELS = {
    label: (name, codec)
    for name, codec, labels in (
        ("windows-1252", "cp1252", "ansi_x3.4-1968 ascii cp1252 cp819 csisolatin1 ibm819 iso-8859-1 iso-ir-100 "
         "iso8859-1 iso88591 iso_8859-1 iso_8859-1:1987 l1 latin1 us-ascii windows-1252 x-cp1252 x-user-defined"),
        ("windows-1254", "cp1254", "cp1254 csisolatin5 iso-8859-9 iso-ir-148 iso8859-9 iso88599 iso_8859-9 l5 latin5 "
         "iso_8859-9:1989 windows-1254 x-cp1254"),
        ("windows-874", "cp874", "dos-874 iso-8859-11 iso8859-11 iso885911 tis-620 windows-874"),
        ("gb18030", "gb18030", "chinese csgb2312 csiso58gb231280 gb18030 gb2312 gb_2312 gb_2312-80 gbk iso-ir-58 "
         "x-gbk"),
        ("shift_jis", "cp932", "csshiftjis ms932 ms_kanji shift-jis shift_jis sjis windows-31j x-sjis"),
        ("euc-kr", "cp949", "cseuckr csksc56011987 euc-kr iso-ir-149 korean ks_c_5601-1987 ks_c_5601-1989 ksc5601 "
         "ksc_5601 windows-949"),
        ("big5", "big5hkscs", "big5 big5-hkscs cn-big5 csbig5 x-x-big5"),
        ("iso-8859-8", "iso8859-8", "iso-8859-8-i iso-8859-8-e logical visual csiso88598i csiso88598e"),
        ("iso-8859-6", "iso8859-6", "iso-8859-6-i iso-8859-6-e csiso88596i csiso88596e"),
        ("koi8-u", "koi8-u", "koi8-u koi8-ru"),
        ("koi8-r", "koi8-r", "koi koi8 koi8-r koi8_r cskoi8r"),
        ("iso-8859-7", "iso8859-7", "sun_eu_greek"),
        ("iso-8859-15", "iso8859-15", "csisolatin9"),
        ("macintosh", "mac-roman", "csmacintosh mac macintosh x-mac-roman"),
        ("x-mac-cyrillic", "mac-cyrillic", "x-mac-cyrillic x-mac-ukrainian"),
        ("euc-jp", "euc-jp", "cseucpkdfmtjapanese euc-jp x-euc-jp"),
        ("utf-8", "utf-8", "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 utf-8 utf8 x-unicode20utf8"),
        ("windows-1251", "cp1251", "cp1251 windows-1251 x-cp1251"),
        ("windows-1250", "cp1250", "cp1250 windows-1250 x-cp1250"),
    )
    for label in labels.split()
}  # fmt: skip
_NUMBERED = re.compile(r"\A(iso-8859|iso8859)-?(1[03-6]|[2-9])\Z")
_WINDOWS = re.compile(r"\Ax-cp125")


def decode_page(data: bytes, label: str) -> tuple[str, str]:
    """Text of ``data`` and the encoding that ``label`` stands for. Raises LookupError or UnicodeDecodeError."""
    label = _NUMBERED.sub(r"\1-\2", _WINDOWS.sub("windows-125", label.lower()))
    name, codec = _LABELS.get(label, (label, label))
    try:
        return data.decode(codec), name
    except UnicodeDecodeError:
        if name != "windows-1252":
            raise
        # Five bytes are not given out, and browsers make control characters of them.
        return "".join(bytes((b,)).decode("cp1252", "ignore") or chr(b) for b in data), name
