"""Personal data and secrets, replaced by placeholders or by made-up values.

What has a check digit or a fixed form is checked by it, so that version numbers and sums stay. Names and postal
addresses need a model and are not looked for; nor are telephone numbers in a country's own form without its code
(020 7946 0958, (030) 123456) but for those of North America, since no form tells them from other numbers.
300.200.1000 is a telephone number only where a word near it says so, and 1.2.3.4 no address behind "version".
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.fakes import fake, is_fake
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop

Check = Callable[[re.Match[str]], bool]


def luhn(digits: str) -> bool:
    """The check digit of card numbers."""
    total = 0
    for i, d in enumerate(reversed(digits)):
        value = int(d) * (1 + i % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _card(match: re.Match[str]) -> bool:
    digits = re.sub(r"\D", "", match[0])
    return 13 <= len(digits) <= 19 and digits[0] in "3456" and len(set(digits)) > 1 and luhn(digits)


def _iban(match: re.Match[str]) -> bool:
    code = match[0].replace(" ", "").upper()
    if not 15 <= len(code) <= 34:
        return False
    return int("".join(str(int(c, 36)) for c in code[4:] + code[:4])) % 97 == 1


NEAR = 40  # characters before a number in which a word tells what it is
_CALL = re.compile(
    r"\b(?:(?:tele|mobile|cell)?phone|telefon|tel|fax|call|dial|text|sms|mobile|cell|ring|reach|contact)s?\b", re.I
)
_VERSION = re.compile(r"\b(?:v|ver|version|release|rev|revision|build|firmware|update)s?\.?[ :=]*\Z", re.I)


def _before(match: re.Match[str]) -> str:
    return match.string[max(0, match.start() - NEAR) : match.start()]


def _public_address(match: re.Match[str]) -> bool:
    if _VERSION.search(_before(match)):
        return False
    try:
        return ipaddress.ip_address(match[0]).is_global
    except ValueError:
        return False


_DOTTED = re.compile(r"\d{3}\.\d{3}[.\-]\d{4}")


def _phone(match: re.Match[str]) -> bool:
    if _DOTTED.fullmatch(match[0]) and not _CALL.search(_before(match)):
        return False
    return 8 <= sum(c.isdigit() for c in match[0]) <= 15


def _ssn(match: re.Match[str]) -> bool:
    area, group, serial = match[0].split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


_PERSONAL: dict[str, tuple[str, Check | None]] = {
    "email": (r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w-])", None),
    "iban": (r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", _iban),
    "card": (r"(?<![\d.,-])\d(?:[ -]?\d){12,18}(?![\d.,-]\d|\d)", _card),
    "ssn": (r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])", _ssn),
    "ip": (
        r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d|\w)"
        r"|(?<![\w:])(?:[0-9A-Fa-f]{1,4}:){2,7}(?::?[0-9A-Fa-f]{1,4}){1,6}(?![\w:])",
        _public_address,
    ),
    # A number is a telephone's where it has a country code, or the form (area) nnn-nnnn.
    "phone": (
        r"(?<![\w+.])(?:\+\d{1,3}[ .\-/]?(?:\(0?\d{1,4}\)[ .\-/]?)?\d{1,4}(?:[ .\-/]?\d{2,4}){2,4}"
        r"|\(\d{3}\) ?\d{3}[ .\-]\d{4}|\d{3}[.\-]\d{3}[.\-]\d{4})(?![\w\-]|\.\d)",
        _phone,
    ),
}


def _entropy(text: str) -> float:
    """Bits a character, by the text's own frequencies."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def _random_looking(match: re.Match[str]) -> bool:
    value = match["value"]
    varied = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return varied and _entropy(value) >= 3.0 and not re.search(r"example|placeholder|your[_-]|xxxx|\*\*\*", value, re.I)


_SECRETS: dict[str, tuple[str, Check | None]] = {
    "private_key": (
        r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]{0,20000}?"
        r"-----END (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----",
        None,
    ),
    "aws_key": (r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b", None),
    "github_token": (r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{60,255})\b", None),
    "google_key": (r"\bAIza[A-Za-z0-9_\-]{35}(?![\w-])", None),
    "slack_token": (r"\bxox[abeoprs]-[A-Za-z0-9-]{10,250}", None),
    "stripe_key": (r"\b[sr]k_live_[A-Za-z0-9]{16,250}\b", None),
    "model_api_key": (r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_\-]{32,250}(?![\w-])", None),
    "hub_token": (r"\bhf_[A-Za-z0-9]{30,60}\b", None),
    "jwt": (r"\beyJ[A-Za-z0-9_\-]{8,2000}\.eyJ[A-Za-z0-9_\-]{8,4000}\.[A-Za-z0-9_\-]{16,1000}", None),
    "url_password": (r"(?<=://)[\w.%+-]{1,100}:(?P<value>[^\s:/@]{3,100})(?=@)", None),
    "assigned": (
        r"""(?i:\b[\w-]{0,30}(?:password|passwd|secret|api_?key|access_?key|auth_?token))["']?\s{0,3}[:=]\s{0,3}"""
        r"""["'](?P<value>[^\s"']{8,200})["']""",
        _random_looking,
    ),
}


class _Scrub(DocumentStage):
    """Replace what patterns find; ``on_found="drop"`` drops the document instead.

    style: ``tags`` (<EMAIL>), or ``fakes`` where the stage has them: values that look real and are nobody's.
    """

    _known: ClassVar[dict[str, tuple[str, Check | None]]] = {}
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
            text = pattern.sub(lambda m, kind=kind, check=check: self._replace(m, kind, check, found), text)  # type: ignore[misc]
        if not found:
            return document
        self.statistics.counts.update(found)
        if self.on_found == "drop":
            return Drop(f"holds {', '.join(sorted(found))}")
        return document.changed(text, self.name, **dict(sorted(found.items())))

    def _replace(self, match: re.Match[str], kind: str, check: Check | None, found: Counter[str]) -> str:
        if check is not None and not check(match):
            return match[0]
        if self.style == "fakes":
            if is_fake(kind, match[0]):
                return match[0]
            found[kind] += 1
            return fake(kind, match[0], self.seed)
        found[kind] += 1
        mark = f"<{kind.upper()}>"
        if "value" in match.re.groupindex:
            start, end = match.span("value")
            return match[0][: start - match.start()] + mark + match[0][end - match.start() :]
        return mark


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
