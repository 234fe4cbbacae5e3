"""Personal data and secrets, replaced by placeholders or by made-up values.

What has a check digit or a fixed form is checked by it, so that version numbers and sums stay. Names and postal
addresses need a model and are not looked for; nor are telephone numbers in a country's own form without its code
(020 7946 0958, (030) 123456) but for those of North America, since no form tells them from other numbers.
300.200.1000, 415 555 2671 and +12 345 678 are telephone numbers only where a word near them says so, and 1.2.3.4 is an
address only where one does.

A pattern finds where something may be; its check says what of it is one, for numbers and words that stand behind
(`4111 1111 1111 1111 12/27`, `BE68539007547034 EUR`) look as if they belonged to it.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.fakes import fake, is_fake
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop

Check = Callable[[re.Match[str]], int]  # where in the text what is to go ends, 0 where nothing is
Known = dict[str, tuple[str, Check | None]]

_SPACE = r"[ \u00a0\u2009\u202f]"
_DASH = r"[\-\u2010\u2011\u2013]"


def luhn(digits: str) -> bool:
    """The check digit of card numbers."""
    total = 0
    for i, d in enumerate(reversed(digits)):
        value = int(d) * (1 + i % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


# Which numbers the networks give out, by length. Asked of numbers in groups alone: columns of a table look like them.
_ISSUED = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|[689]\d)\d{11,16}|35(?:2[89]|[3-8]\d)\d{12,15}|(?:50|5[6-8]|6\d)\d{11,17}"
)
_USUAL = ((4, 4, 4, 4), (4, 6, 5), (4, 6, 4))  # groups on the cards themselves


def _ends(match: re.Match[str]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Digits, lengths of their groups and end for what begins at the match and ends with a group; the longest first."""
    groups = list(re.finditer(r"\d+", match[0]))
    for last in range(len(groups), 0, -1):
        some = groups[:last]
        yield "".join(g[0] for g in some), tuple(len(g[0]) for g in some), match.start() + some[-1].end()


def _card(match: re.Match[str]) -> int:
    found = 0
    for digits, lengths, end in _ends(match):
        if not 13 <= len(digits) <= 19 or len(set(digits)) == 1 or not luhn(digits):
            continue
        alone = len(lengths) == 1
        if not (_ISSUED.fullmatch(digits) or (alone and digits[0] in "3456")):
            continue
        if alone or lengths in _USUAL:
            return end
        found = found or end
    return found


# Characters of an IBAN by country (ISO 13616).
_IBAN = {
    country: length
    for length, countries in {
        15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK", 21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
    }.items()
    for country in countries.split()
}  # fmt: skip


def _iban(match: re.Match[str]) -> int:
    text, start = match.string, match.start()
    small = text[start].islower()
    length = _IBAN.get(text[start : start + 2].upper(), 0)
    code, at, cuts = "", start, set()
    while len(code) < length:
        if at < len(text) and text[at] in " -\u00a0\u202f" and code and at > start and text[at - 1].isalnum():
            cuts.add(len(code) % 4)
            at += 1
        if at >= len(text) or not (text[at].isascii() and text[at].isalnum()):
            return 0
        if text[at].isalpha() and text[at].islower() != small:
            return 0
        code += text[at].upper()
        at += 1
    if not length or (at < len(text) and text[at].isascii() and text[at].isalnum()) or (small and cuts - {0}):
        return 0
    return at if int("".join(str(int(c, 36)) for c in code[4:] + code[:4])) % 97 == 1 else 0


NEAR = 40  # characters before a number in which a word tells what it is


def _before(match: re.Match[str]) -> str:
    return match.string[max(0, match.start() - NEAR) : match.start()]


# No suffixes of hosts, though files and code put them behind an @.
_NO_HOST = frozenset(
    (
        "png", "jpg", "jpeg", "gif", "svg", "webp", "bmp", "ico", "tif", "tiff", "avif", "heic", "pdf", "css", "scss",
        "sass", "json", "html", "htm", "xml", "yml", "yaml", "txt", "js", "jsx", "tsx", "transpose", "weight",
        "weights", "data", "grad", "shape", "values", "numpy", "float", "half", "view", "reshape", "inverse", "conj",
        "adjoint", "permute",
    )
)  # fmt: skip
_REPOSITORY = re.compile(r"(?:git|hg|svn|aur)@", re.I)  # logs in to a machine and is nobody


def _email(match: re.Match[str]) -> int:
    after = match.string[match.end() : match.end() + 1]
    if match[0].rpartition(".")[2].lower() in _NO_HOST:
        return 0
    if _REPOSITORY.match(match[0]) and (after in (":", "/") or _before(match).endswith("://")):
        return 0
    return match.end()


_NUMBERED = re.compile(
    r"(?:\b(?:v|ver|version|release|rev|revision|build|firmware|update|section|sec|chapter|chap|ch|clause|article|art|"
    r"paragraph|para|part|figure|fig|table|item|step|appendix|annex|rule|requirement|req|equation|eq|theorem|lemma|"
    r"definition|oid|windows|python|chrome|firefox|java|jdk|android|ios|macos|linux|kernel|ubuntu|node|php|mysql|"
    r"oracle|office|driver|sdk|api|plugin|package)s?\.?[ :=#]*"
    r"(?:\d[\d.]*(?:, ?| and | to | or | ?[–-] ?))*|§ ?|[=<>~!]=\s*|[~^]\s*|\w[/-])\Z",
    re.I,
)
_HOST = re.compile(
    r"\b(?:ip|ipv4|addr|address|host|hostname|server|dns|nameserver|resolver|gateway|router|client|peer|remote|source|"
    r"from|ping|traceroute|ssh|telnet|connect|connection|login|logged|user|visitor|proxy|at|via|port|whois|ban|banned|"
    r"block|blocked|subnet|route)(?:s|e[ds])?\b|(?:(?:ip|addr|address)\W{1,3}|//|[@=\[])\Z",
    re.I,
)
_WELL_KNOWN = ("8.8.8.8", "8.8.4.4", "9.9.9.9")
SMALL = 32  # a version, a section or a date has no larger parts; of addresses one in four thousand has none


def _public_address(match: re.Match[str]) -> int:
    value, before = match[0], _before(match)
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return 0
    if not address.is_global:
        return 0
    if address.version == 4:
        if _NUMBERED.search(before):
            return 0
        after = match.string[match.end() : match.end() + 7]
        small = all(int(part) < SMALL for part in value.split(".")) and value not in _WELL_KNOWN
        if small and not _HOST.search(before) and not re.match(r":\d{2,5}\b|/\d\d?\b", after):
            return 0
    return match.end()


_CALL = re.compile(
    r"\b(?:(?:tele|mobile|cell)?phone|telefon|tel|fax|call|dial|text(?: me| us| to| at)?:? ?\Z|sms|mobile|mobil|"
    r"handy|cell|ring|reach|contact|whatsapp|hotline|t[ée]l[ée]phone|tel[ée]fono|tél|m[óo]vil)s?\b|电话|電話|手机|手機",
    re.I,
)
_COUNTRY = re.compile(  # calling codes (ITU-T E.164)
    r"1|7|2[07]|3[0-469]|4[013-9]|5[1-8]|6[0-6]|8[1246]|9[0-58]|21[1-368]|22\d|23\d|24\d|25[0-8]|26\d|29[01789]|35\d|"
    r"37[0-8]|38[0-35-79]|42[013]|50\d|59\d|67[02-9]|68[0-35-9]|69[0-2]|8[058]\d|87[08]|96[0-8]|97[0-79]|99[2-68]"
)


def _phone(match: re.Match[str]) -> int:
    said = _CALL.search(_before(match)) is not None
    if match["code"] is None:
        area = re.sub(r"\D", "", match["national"])[-10]
        clear = re.search(r"\d[ .]\d", match["national"].replace(")", ") ")) is None
        return match.end() if area in "23456789" and (said or clear or ")" in match["national"]) else 0
    if match["code"] != "+" and not said:  # 0049 30 1234567, which may be any other number
        return 0
    number = match["number"]
    for end in [g.end() for g in re.finditer(r"\d+", number)][::-1]:
        if _international(number[:end], said):
            return match.end() if end == len(number) else match.start("number") + end
    return 0


def _international(number: str, said: bool) -> bool:
    """Whether ``number`` is one with the code of a country; ``said``: a word before it says that it is."""
    groups = re.findall(r"\d+", number.replace("(0)", ""))
    digits = "".join(groups)
    code = _COUNTRY.match(digits)
    if code is None or len(digits) > 15:
        return False
    own = digits[code.end() :]
    if code[0] in ("1", "7"):
        least = most = 10
    else:
        least, most = 6, 12
    if not least <= len(own) <= most or (code[0] == "1" and own[0] in "01"):
        return False
    if said:
        return True
    marks = [m.strip() or " " for m in re.findall(r"(?<=[\d)])[^\d()]+", number)]
    if "." in marks and (marks.count(".") == 1 or len(set(marks[1:])) > 1):
        return False  # decimals
    sizes = {len(g) for g in groups[1:]}
    if len(groups[0]) <= 3 and sizes == {3} and (len(groups) < 4 or groups[-1] == "000"):
        return False  # thousands
    return not (len(own) == 6 and sizes == {2})  # a row of numbers


def _ssn(match: re.Match[str]) -> int:
    area, group, serial = match[0].split("-")
    right = area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"
    return match.end() if right else 0


_LETTER = r"A-Za-z0-9À-ÖØ-öø-ɏ"
_MARK = rf"(?:{_SPACE}?(?:[./]|{_DASH}){_SPACE}?|{_SPACE})"  # between groups of digits
_PERSONAL: Known = {
    "email": (
        rf"(?<![{_LETTER}._+\-])[{_LETTER}_][{_LETTER}_.+\-]{{0,63}}@(?:[{_LETTER}\-]{{1,63}}\.)+"
        r"(?:xn--[A-Za-z0-9\-]{2,20}|[A-Za-z]{2,24})(?!-?\d|[A-Za-z])",
        _email,
    ),
    "iban": (r"(?<![A-Za-z0-9])(?:[A-Z]{2}|[a-z]{2})\d{2}(?=[ \-\u00a0\u202f]?[A-Za-z0-9])", _iban),
    "card": (
        rf"(?<![A-Za-z0-9+])(?<!\d\.)(?:\d{{4,19}}(?:{_SPACE}|{_DASH}|\.)){{0,4}}\d{{1,19}}(?![A-Za-z0-9])(?!\.\d)",
        _card,
    ),
    "ssn": (r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])", _ssn),
    "ip": (
        r"(?<![A-Za-z0-9_])(?<!\d\.)(?:\d{1,3}\.){3}\d{1,3}(?![A-Za-z0-9_])(?!\.\d)"
        r"|(?<![A-Za-z0-9_:])[23][0-9A-Fa-f]{3}(?:::?[0-9A-Fa-f]{1,4}){0,7}(?:::)?(?![A-Za-z0-9_]|:[0-9A-Fa-f:])",
        _public_address,
    ),
    # A number is a telephone's where it has a country code, or the form (area) nnn-nnnn.
    "phone": (
        r"(?<![A-Za-z0-9+])(?<!\d[.,\-])(?:"
        rf"(?P<code>\+|00{_SPACE}?)(?P<number>[1-9]\d{{0,2}}{_MARK}?(?:\(\d{{1,5}}\){_MARK}?)?\d{{1,14}}(?:{_MARK}\d{{1,12}}){{0,6}})"
        rf"|(?P<national>(?:1[ .\-])?(?:\(\d{{3}}\){_SPACE}?|\d{{3}}[ .\-])\d{{3}}[ .\-]\d{{4}})"
        r")(?: ?(?:x|ext\.?) ?\d{0,5})?(?![A-Za-z0-9])(?!\.\d)",
        _phone,
    ),
}


def _entropy(text: str) -> float:
    """Bits a character, by the text's own frequencies."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


# What stands where a secret would: names of variables and settings, calls, templates, addresses, words of manuals.
_NO_VALUE = re.compile(
    r"\A\$|\$[{(]|\{\{|\A[<%].*|\A\{.*\}\Z|\A\[.*\]\Z|\A[\w$]+(?:\.[A-Za-z_$][\w$]*)+\Z|\A[\w.]+\(.*\)\Z|\Ahttps?://"
    r"|example|placeholder|your[_-]|xxxx|\*\*\*|change_?-?me|dummy|process\.env|environ|getenv|passwor[dt]|secret",
    re.I,
)
_SENTENCE = re.compile(
    r"\b(?:must|enter|min|max|characters?|digits?|least|please|your|the|is|at|with|of|to|or|and|for|not|mindestens|"
    r"zeichen|bitte|caract[eè]res?|caracteres|moins|menos)\b",
    re.I,
)


def _random_looking(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value) and _entropy(value) >= 3.0


def _value(match: re.Match[str]) -> int:
    """In quotation marks: what has digits and letters, and is neither a reference nor a sentence."""
    value = match["value"]
    words = value.split(" ")
    if len(words) > 1 and (len(words) > 6 or not value.isascii() or "" in words or _SENTENCE.search(value)):
        return 0
    return match.end("value") if _random_looking(value) and not _NO_VALUE.search(value) else 0


def _bare(match: re.Match[str]) -> int:
    """Without marks: of NAME=value as shells have it the same, else a long one with capitals and several digits."""
    value, name = match["value"], match["name"]
    if not _value(match):
        return 0
    digits = sum(c.isdigit() for c in value)
    mixed = len(value) >= 16 and digits >= 3 and value.upper() != value != value.lower()
    return match.end("value") if (name.isupper() and match["is"] == "=") or mixed else 0


def _token(match: re.Match[str]) -> int:
    """Keys of random characters, and no long-name-of-a-style: in one of their parts digits and letters mix."""
    parts = re.split(r"[_\-]", match[0])
    mixed = any(len(p) >= 16 and any(c.isdigit() for c in p) and any(c.isalpha() for c in p) for p in parts)
    return match.end() if mixed else 0


def _hub_token(match: re.Match[str]) -> int:
    """These are of letters alone, of which names of variables have fewer capitals."""
    value = match["value"]
    capitals, small = sum(c.isupper() for c in value), sum(c.islower() for c in value)
    few = len(value) // 5
    return match.end() if min(capitals, small) > few or sum(c.isdigit() for c in value) >= 3 else 0


def _url_password(match: re.Match[str]) -> int:
    value = match["value"]
    words = ("pass", "passwd", "password", "pwd", "pw", "token")
    port = value.isdigit() and len(value) <= 5
    plain = value.lower() in words or port or re.search(r"\A[${<%]|\{.*\}|\A[*.x]+\Z", value)
    return 0 if plain else match.end("value")


_NAME = r"(?:password|passwd|passphrase|secret|api_?key|access_?key|secret_?key|auth_?token|access_?token)"
_SECRETS: Known = {
    "private_key": (
        r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----(?:(?:(?!-----)[\s\S]){0,20000}?"
        r"-----END (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----|(?:(?:\s|\\[nr])*[A-Za-z0-9+/]{16,}={0,2}){1,500})",
        None,
    ),
    "aws_key": (r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b", None),
    "aws_secret": (r"(?i:secret_?access_?key)\W{1,8}(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])", None),
    "azure_key": (r"\bAccountKey=(?P<value>[A-Za-z0-9+/]{40,120}={0,2})", None),
    "github_token": (r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{60,255})\b", None),
    "gitlab_token": (r"\bgl(?:pat|dt|rt|ptt|ft|soat|cbt)-[A-Za-z0-9_\-]{20,64}(?![\w-])", None),
    "google_key": (r"\bAIza[A-Za-z0-9_\-]{35}(?![\w-])", None),
    "npm_token": (r"\bnpm_[A-Za-z0-9]{36}\b", None),
    "pypi_token": (r"\bpypi-AgE[A-Za-z0-9_\-]{50,250}", None),
    "slack_token": (r"\bxox[abeoprs]-[A-Za-z0-9-]{10,250}", None),
    "stripe_key": (r"\b[sr]k_live_[A-Za-z0-9]{16,250}\b", None),
    "model_api_key": (r"(?<![\w-])sk-(?:proj-|ant-)?[A-Za-z0-9_\-]{32,250}(?![\w-])", _token),
    "hub_token": (r"\b(?:hf|api_org)_(?P<value>[A-Za-z0-9]{34})\b", _hub_token),
    "jwt": (r"\beyJ[A-Za-z0-9_\-]{8,2000}\.eyJ[A-Za-z0-9_\-]{8,4000}\.[A-Za-z0-9_\-]{16,1000}", None),
    "bearer": (
        r"(?i:authorization\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?:basic|token)|\bbearer)\s{1,3}(?P<value>[\w.~+/\-]{20,2000}={0,2})",
        _value,
    ),
    "url_password": (r"(?<=://)[\w.%+-]{0,100}:(?P<value>[^\s:/@\"'`]{3,100})(?=@)", _url_password),
    "assigned": (
        rf"(?i:\b[\w-]{{0,30}}{_NAME})\\?[\"']?\s{{0,3}}(?:=>|:=|[:=])\s{{0,3}}\\?(?P<mark>[\"'`])"
        r"(?P<value>(?:(?!(?P=mark))[^\r\n]){8,200}?)\\?(?P=mark)",
        _value,
    ),
    "setting": (
        rf"(?m:^|(?<=[\s;&?]))(?P<name>(?i:[\w.-]{{0,30}}{_NAME}))(?P<is>[ \t]{{0,3}}[:=][ \t]{{0,3}})"
        rf"(?P<value>[^\s\"'`<>(){{}}\[\],;&#$]{{8,200}})(?=[\s;&\\]|\Z)",
        _bare,
    ),
}


class _Scrub(DocumentStage):
    """Replace what patterns find; ``on_found="drop"`` drops the document instead.

    style: ``tags`` (<EMAIL>), or ``fakes`` where the stage has them: values that look real and are nobody's.
    """

    _known: ClassVar[Known] = {}
    _styles: ClassVar[tuple[str, ...]] = ("tags",)

    def __init__(
        self, kinds: Sequence[str] | None = None, on_found: str = "replace", style: str = "tags", seed: int = 0
    ):
        super().__init__()
        if style not in self._styles:
            raise ConfigError(f"should be {' or '.join(self._styles)} for {self.name}", key="style", value=style)
        self.style, self.seed = style, seed
        if on_found not in ("replace", "drop"):
            raise ConfigError("should be replace or drop", key="on_found", value=on_found)
        unknown = sorted(set(kinds or ()) - set(self._known))
        if unknown:
            raise ConfigError(f"unknown: {', '.join(unknown)}; known: {', '.join(self._known)}", key="kinds")
        self.kinds, self.on_found = list(self._known if kinds is None else kinds), on_found
        self._patterns = [(k, re.compile(self._known[k][0]), self._known[k][1]) for k in self._known if k in self.kinds]

    def apply(self, document: Document) -> Document | Drop:
        text = document.text
        found: Counter[str] = Counter()
        for kind, pattern, check in self._patterns:
            text = self._scrubbed(text, kind, pattern, check, found)
        if not found:
            return document
        self.statistics.counts.update(found)
        if self.on_found == "drop":
            return Drop(f"holds {', '.join(sorted(found))}")
        return document.changed(text, self.name, **dict(sorted(found.items())))

    def _scrubbed(
        self, text: str, kind: str, pattern: re.Pattern[str], check: Check | None, found: Counter[str]
    ) -> str:
        parts: list[str] = []
        at = done = 0
        while match := pattern.search(text, at):
            end = match.end() if check is None else check(match)
            if not end:
                at = match.start() + 1  # something else may begin inside
                continue
            start = match.start()
            if "value" in pattern.groupindex and kind != "hub_token":
                start, end = match.span("value")
            at = end
            if self.style == "fakes":
                if is_fake(kind, text[start:end]):
                    continue
                made = fake(kind, text[start:end], self.seed)
            else:
                made = f"<{kind.upper()}>"
            found[kind] += 1
            parts += (text[done:start], made)
            done = end
        return "".join((*parts, text[done:])) if parts else text


class ScrubPersonal(_Scrub):
    """Replace e-mail addresses, telephone and card numbers, IBANs, US social security numbers and public IP addresses
    by <EMAIL>, <PHONE>, <CARD>, <IBAN>, <SSN>, <IP>; with ``style="fakes"`` by made-up ones, see ``fakes``."""

    name = "scrub_personal"
    _styles = ("tags", "fakes")
    _known = _PERSONAL


class ScrubSecrets(_Scrub):
    """Replace private keys, access tokens and passwords in code and configuration by <AWS_KEY> and the like."""

    name = "scrub_secrets"
    _known = _SECRETS
