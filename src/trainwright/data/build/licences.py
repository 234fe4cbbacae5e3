"""Licences by one name each, and a list of those that a corpus may hold.

    "CC BY 4.0", "https://creativecommons.org/licenses/by/4.0/", "cc-by-4.0"  ->  CC-BY-4.0
    allowed: an entry of the list, or a version of it (CC-BY covers CC-BY-4.0); A OR B if one is, A AND B if both are

Names are SPDX ids where SPDX has one (package license-expression, extra ``data``, reads expressions and the long tail),
and PD, CC-BY, BSD, GPL and the like where a text says no version. What a text says of itself near its ends is held
against what its metadata says. A verdict is a signal for a person to look at, not legal advice.

Papers: Common Corpus, arXiv:2506.01732 (open licences only); Best practices for open datasets, arXiv:2501.08365.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from trainwright.core.errors import ConfigError, nearest
from trainwright.data.build.documents import Document, sha256
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop
from trainwright.data.sources._files import need

# What Common Corpus calls open: no restriction but naming the author or sharing alike.
OPEN = (
    "PD", "CC0", "CC-PDM", "PDDL", "Unlicense", "CC-BY", "CC-BY-SA", "ODC-By", "ODbL", "MIT", "MIT-0", "BSD", "0BSD",
    "Apache-2.0", "ISC", "Zlib", "BSL-1.0", "PSF-2.0", "Python-2.0", "etalab-2.0", "OGL-UK", "GFDL",
)  # fmt: skip
_SAME = {
    "public domain": "PD", "publicdomain": "PD", "pd": "PD", "us-pd": "PD", "pd-us": "PD", "us government work": "PD",
    "no known copyright": "PD", "no rights reserved": "PD", "public domain mark": "CC-PDM-1.0", "cc-pdm": "CC-PDM-1.0",
    "cc0": "CC0-1.0", "cc-0": "CC0-1.0", "cc zero": "CC0-1.0", "creative commons zero": "CC0-1.0", "pddl": "PDDL-1.0",
    "apache": "Apache-2.0", "apache 2": "Apache-2.0", "apache2": "Apache-2.0", "apache-2": "Apache-2.0",
    "apache 2.0": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache license, version 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0", "apache software license": "Apache-2.0", "asl 2.0": "Apache-2.0",
    "mit": "MIT", "mit license": "MIT", "the mit license": "MIT", "expat": "MIT", "mit/x11": "MIT",
    "x11": "X11", "isc license": "ISC",
    "bsd": "BSD", "bsd license": "BSD", "new bsd": "BSD-3-Clause", "modified bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause", "3-clause bsd": "BSD-3-Clause", "simplified bsd": "BSD-2-Clause",
    "bsd 2-clause": "BSD-2-Clause", "2-clause bsd": "BSD-2-Clause", "bsd-2": "BSD-2-Clause", "bsd-3": "BSD-3-Clause",
    "gpl": "GPL", "gnu gpl": "GPL", "gplv2": "GPL-2.0-only", "gplv3": "GPL-3.0-only", "gpl-2": "GPL-2.0-only",
    "gpl-3": "GPL-3.0-only", "gpl-2.0": "GPL-2.0-only", "gpl-3.0": "GPL-3.0-only", "gpl-2.0+": "GPL-2.0-or-later",
    "gpl-3.0+": "GPL-3.0-or-later", "lgpl": "LGPL", "lgplv3": "LGPL-3.0-only", "lgpl-2.1": "LGPL-2.1-only",
    "lgpl-3.0": "LGPL-3.0-only", "agpl": "AGPL", "agplv3": "AGPL-3.0-only", "agpl-3.0": "AGPL-3.0-only",
    "mpl": "MPL", "mpl 2.0": "MPL-2.0", "mpl-2": "MPL-2.0", "gfdl": "GFDL", "odc-by": "ODC-By-1.0",
    "odbl": "ODbL-1.0", "psf": "PSF-2.0", "python software foundation license": "PSF-2.0", "unlicense": "Unlicense",
    "the unlicense": "Unlicense", "wtfpl": "WTFPL", "ogl": "OGL-UK", "open government licence": "OGL-UK",
    "open government licence v3.0": "OGL-UK-3.0", "licence ouverte": "etalab-2.0", "licence ouverte 2.0": "etalab-2.0",
    "all rights reserved": "LicenseRef-proprietary", "proprietary": "LicenseRef-proprietary",
    "copyrighted": "LicenseRef-proprietary", "cc-by": "CC-BY", "cc-by-sa": "CC-BY-SA", "cc-by-nc": "CC-BY-NC",
    "cc-by-nd": "CC-BY-ND", "cc-by-nc-sa": "CC-BY-NC-SA", "cc-by-nc-nd": "CC-BY-NC-ND",
}  # fmt: skip
FAMILIES = {
    "PD", "CC0", "CC-PDM", "PDDL", "CC-BY", "CC-BY-SA", "CC-BY-NC", "CC-BY-ND", "CC-BY-NC-SA", "CC-BY-NC-ND", "BSD",
    "GPL", "LGPL", "AGPL", "MPL", "GFDL", "ODC-By", "ODbL", "OGL-UK",
}  # fmt: skip
_NOTHING = {"", "unknown", "none", "null", "n/a", "na", "other", "unspecified", "various", "noassertion", "?"}
_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:"
    r"creativecommons\.org/(?P<cc>licen[cs]es/(?P<kind>by(?:-(?:nc|nd|sa))*)/(?P<version>\d\.\d)"
    r"|publicdomain/(?P<pd>zero|mark)/1\.0)"
    r"|opensource\.org/licen[cs]es?/(?P<osi>[\w.+-]+)|apache\.org/licen[cs]es/license-(?P<apache>2\.0)"
    r"|gnu\.org/licen[cs]es/(?:old-licen[cs]es/)?(?P<gnu>a?l?gpl-\d\.\d)|spdx\.org/licen[cs]es/(?P<spdx>[\w.+-]+))",
    re.I,
)
_CC = re.compile(
    r"(?:cc|creative[ -]?commons)[ :_-]*(?P<by>by|attribution)?(?P<rest>[a-z \-_]*?)[ \-_v(]*(?P<version>\d\.\d)?"
    r"(?: ?(?:international|unported|generic|universal|deed|igo))?(?: ?licen[cs]e)?\)?",
    re.I,
)


class _Unmapped(Exception):
    pass


@lru_cache(65536)
def normalise(text: str | None) -> str | None:
    """The licence's one name, or None where the text names none that is known here."""
    plain = " ".join((text or "").split()).strip(" .\"'")
    if plain.lower() in _NOTHING:
        return None
    try:
        return _expression(plain)
    except _Unmapped:
        return None


def _expression(plain: str) -> str:
    found = _single(plain)
    if found is not None:
        return found
    if not re.search(r"\b(?:AND|OR|WITH)\b|[,;/|+&]", plain, re.I):
        raise _Unmapped
    parts = re.split(r"\s*[,;|&]\s*|\s+/\s+", plain)
    if len(parts) > 1 and all(parts):  # a list: each of them holds for some part of the text
        names = [_expression(p) for p in parts]
        return names[0] if len(set(names)) == 1 else " AND ".join(f"({n})" if " " in n else n for n in names)
    try:
        from license_expression import ExpressionError, get_spdx_licensing
    except ModuleNotFoundError:
        raise need("license-expression", "data") from None
    licensing = get_spdx_licensing()
    # Spaces inside a name would make an expression ambiguous, so only names of one word are mapped here.
    words = [w if w in ("(", ")") else _keyword(w) or _single(w) or w for w in re.findall(r"\(|\)|[^\s()]+", plain)]
    try:
        tree = licensing.parse(" ".join(words), validate=False)
    except (ExpressionError, ValueError, TypeError):
        raise _Unmapped from None
    unknown = [k for k in licensing.unknown_license_keys(tree) if k not in FAMILIES and not k.startswith("LicenseRef")]
    if tree is None or unknown:
        raise _Unmapped
    return str(tree)


def _keyword(word: str) -> str | None:
    return word.upper() if word.lower() in ("and", "or", "with") else None


def _single(plain: str) -> str | None:
    low = plain.lower()
    if low in _SAME:
        return _SAME[low]
    if re.fullmatch(r"licenseref-[\w.-]+", low):
        return "LicenseRef" + plain[10:]
    family = next((f for f in FAMILIES if f.lower() == low), None)
    if family is not None:
        return family
    if (match := _URL.match(low)) is not None:
        return _of_url(match)
    if (match := _CC.fullmatch(plain)) is not None and (match["by"] or match["rest"].strip(" -_")):
        return _creative_commons(match["by"], match["rest"], match["version"])
    return _spdx().get(low.replace(" ", "-")) or _spdx().get(re.sub(r"[ -]licen[cs]e$", "", low).replace(" ", "-"))


def _of_url(match: re.Match[str]) -> str | None:
    if match["pd"]:
        return "CC0-1.0" if match["pd"] == "zero" else "CC-PDM-1.0"
    if match["kind"]:
        return _creative_commons("by", match["kind"][2:], match["version"])
    if match["apache"]:
        return "Apache-2.0"
    name = match["osi"] or match["spdx"] or match["gnu"]
    return _single(name.removesuffix(".html").removesuffix(".php"))


def _creative_commons(by: str | None, rest: str, version: str | None) -> str | None:
    words = re.sub(r"non[ -]?commercial", "nc", rest, flags=re.I)
    words = re.sub(r"no[ -]?deriv(?:ative)?s?(?: works)?", "nd", words, flags=re.I)
    words = re.sub(r"share[ -]?alike", "sa", words, flags=re.I)
    parts = [w for w in re.split(r"[ \-_]+", words.lower()) if w]
    if "zero" in parts or "0" in parts:
        return "CC0-1.0"
    if not by or set(parts) - {"nc", "nd", "sa", "by"}:
        return None
    name = "-".join(["CC-BY", *(p.upper() for p in ("nc", "nd", "sa") if p in parts)])
    return f"{name}-{version}" if version else name


@lru_cache(1)
def _spdx() -> dict[str, str]:
    """SPDX ids by their lower-case form; without the package those that are known by heart."""
    known = {v.lower(): v for v in (*_SAME.values(), *OPEN)}
    try:
        from license_expression import get_spdx_licensing
    except ModuleNotFoundError:
        return known
    return {**{k.lower(): k for k in get_spdx_licensing().known_symbols}, **known}


def atoms(licence: str) -> list[str]:
    """The single licences of an expression."""
    return [w for w in re.findall(r"[^\s()]+", licence) if w not in ("AND", "OR", "WITH")]


def covers(entry: str, licence: str) -> bool:
    """Whether an entry of an allow-list means this licence: the same, or a version of it."""
    if entry == licence:
        return True
    rest = licence.removeprefix(f"{entry}-")
    # CC-BY means CC-BY-4.0 and not CC-BY-NC-4.0; BSD means BSD-3-Clause; GPL means GPL-3.0-only.
    return entry in FAMILIES and rest != licence and rest[:1].isdigit()


def flags(licence: str) -> list[str]:
    """What a licence asks for: attribution, share-alike, non-commercial, no-derivatives."""
    found = set()
    for name in atoms(licence):
        parts = name.upper().split("-")
        if name.startswith(("CC-BY", "ODC-By", "ODbL", "OGL", "etalab")):
            found.add("attribution")
        if "SA" in parts or parts[0] in ("GPL", "LGPL", "AGPL", "MPL", "GFDL", "ODBL", "EUPL", "CDDL", "EPL", "OSL"):
            found.add("share-alike")
        if "NC" in parts or "NONCOMMERCIAL" in parts:
            found.add("non-commercial")
        if "ND" in parts:
            found.add("no-derivatives")
    return sorted(found)


class Verdict(NamedTuple):
    """What a policy says of a licence. A signal, not legal advice."""

    allowed: bool
    licence: str | None  # by its one name
    reason: str = ""
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = "on the list" if self.allowed else self.reason
        return f"signal: {self.licence or 'no known licence'}: {said} (a signal, not legal advice)"


@dataclass(frozen=True)
class Policy:
    """An allow-list. Entries are names as people write them; ``CC-BY`` covers all its versions, ``CC-BY-4.0`` itself.

    commercial: refuse a list that names licences for non-commercial use or without derivatives.
    Raises ConfigError for an empty list, and for an entry that is no licence known here.
    """

    allow: tuple[str, ...] = OPEN
    commercial: bool = True

    def __init__(self, allow: Iterable[str] = OPEN, commercial: bool = True):
        given = [a.strip() for a in allow]
        if not given:
            raise ConfigError("names no licence; give at least one, such as CC0", key="licences")
        names = []
        for entry in given:
            name = next((f for f in FAMILIES if f.lower() == entry.lower()), None) or normalise(entry)
            if name is None:
                raise ConfigError(
                    f"is no licence known here; {nearest(entry, {*OPEN, *FAMILIES, *_SAME.values()})} (an SPDX id, or "
                    f"LicenseRef-NAME for one of your own)", key="licences", value=entry,
                )  # fmt: skip
            if len(atoms(name)) > 1:
                raise ConfigError("is an expression; list its licences one by one", key="licences", value=entry)
            bars = [f for f in flags(name) if f.startswith("no")]
            if commercial and bars:
                raise ConfigError(
                    f"is {' and '.join(bars)}, and the corpus is to be used commercially; take it off the list, or "
                    f"set commercial: false", key="licences", value=entry,
                )  # fmt: skip
            names.append(name)
        object.__setattr__(self, "allow", tuple(dict.fromkeys(names)))
        object.__setattr__(self, "commercial", commercial)

    def judge(self, licence: str | None) -> Verdict:
        name = normalise(licence)
        if name is None:
            return Verdict(False, None, "no licence given" if not (licence or "").strip() else "licence not known")
        marks = tuple(flags(name))
        if self._fits(name):
            return Verdict(True, name, "", marks)
        bars = [m for m in marks if m.startswith("no")]
        return Verdict(False, name, " and ".join(bars) if bars else "licence not allowed", marks)

    def _fits(self, name: str) -> bool:
        def one(atom: str) -> bool:
            return any(covers(entry, atom) for entry in self.allow)

        if " " not in name:
            return one(name)
        from license_expression import get_spdx_licensing

        def walk(node: Any) -> bool:
            kind = type(node).__name__
            if kind == "OR":
                return any(walk(a) for a in node.args)
            if kind == "AND":
                return all(walk(a) for a in node.args)
            base = getattr(node, "license_symbol", node)  # A WITH exception: the exception only permits more
            return one(str(base))

        return walk(get_spdx_licensing().parse(name, validate=False))


_TAG = re.compile(r"SPDX-License-Identifier:\s*([^\n*#/]+?)\s*(?:\*/|-->|$)", re.M)
_SAYS = re.compile(
    r"(?:licen[cs]ed|released|available|published|distributed) under (?:the |an? )?(?:terms of )?(?:the |an? )?"
    r"((?:creative commons|cc)[\w .\-]{2,60}?\d\.\d|mit|apache(?: license)?,?(?: version)? 2\.0|bsd|gpl|isc)\b",
    re.I,
)
_TEXTS = (
    (re.compile(r"Permission is hereby granted, free of charge, to any person obtaining a copy"), "MIT"),
    (re.compile(r"Redistribution and use in source and binary forms"), "BSD"),
    (re.compile(r"Licensed under the Apache License, Version 2\.0"), "Apache-2.0"),
    (re.compile(r"GNU Affero General Public License", re.I), "AGPL"),
    (re.compile(r"GNU Lesser General Public License", re.I), "LGPL"),
    (re.compile(r"(?:terms of|under) the GNU General Public License", re.I), "GPL"),
    (re.compile(r"(?:this (?:work|text|book|file) is|hereby placed|dedicated) (?:in|to|into) the public domain", re.I),
     "PD"),
)  # fmt: skip
_RESERVED = re.compile(r"all rights reserved", re.I)
HEADER = 3000  # characters at the beginning in which a text says what it is under; and half as many at the end


def said_by_text(text: str) -> list[str]:
    """Licences that a text names of itself near its beginning or end, each once. Only plain statements count."""
    ends = text if len(text) <= HEADER * 3 // 2 else text[:HEADER] + "\n" + text[-HEADER // 2 :]
    found: list[str] = []
    for match in _TAG.finditer(ends):
        found.append(normalise(match[1]) or "LicenseRef-unmapped")
    for match in _SAYS.finditer(ends):
        found += [n] if (n := normalise(match[1])) else []
    found += [n for match in _URL.finditer(ends) if (n := _of_url_or_none(match))]
    found += [name for pattern, name in _TEXTS if pattern.search(ends)]
    names = list(dict.fromkeys(found))
    # GPL beside GPL-3.0-only says one thing twice.
    names = [n for n in names if not any(o != n and covers(n, o) for o in names)]
    if not names and _RESERVED.search(ends):
        return ["LicenseRef-proprietary"]
    return names


def _of_url_or_none(match: re.Match[str]) -> str | None:
    return _of_url(match) if match["cc"] or match["apache"] or match["gnu"] else None


def agree(stated: str, said: str) -> bool:
    """Whether metadata and text mean the same licence, to the version that both give."""
    ours, theirs = atoms(stated), atoms(said)
    enough = any if " OR " in f"{stated}{said}" else all
    return enough(any(covers(a, b) or covers(b, a) for b in ours) for a in theirs)


class LicencePolicy(DocumentStage):
    """Keep documents whose licence is on the allow-list, by its one name; of the others say why they go.

    Thrown out: no licence, one not known, NC and ND, metadata and text that contradict each other, several licences in
    one document (split it). A licence that only the text gives is taken. Share-alike and attribution become the
    metadata ``licence_flags``, the text's hash ``source_hash``. A signal, not legal advice.
    """

    name = "licence_policy"

    def __init__(self, allow: Sequence[str] = OPEN, commercial: bool = True, read_text: bool = True):
        super().__init__()
        self.policy, self.read_text = Policy(allow, commercial), read_text
        self.statistics.figures["verdicts"] = "signals, not legal advice"

    def apply(self, document: Document) -> Document | Drop:
        stated = document.licence
        said = said_by_text(document.text) if self.read_text else []
        evidence = "metadata"
        name = normalise(stated)
        if len(said) > 1 and (name is None or not all(agree(name, s) for s in said)):
            return Drop("several licences in one document", f"{' and '.join(said)}; split it by licence")
        if said and stated:
            if name is not None and not agree(name, said[0]):
                return Drop("metadata and text contradict each other", f"metadata: {name}, text: {said[0]}")
            evidence = "metadata and text"
        elif said:
            stated, evidence = said[0], "text"
        verdict = self.policy.judge(stated)
        if name is not None and " AND " in name and not verdict.allowed:
            return Drop("several licences in one document", f"{name}; split it by licence")
        if not verdict.allowed:
            return Drop(verdict.reason, stated or "")
        assert verdict.licence is not None
        self.statistics.counts.update(f"licence {a}" for a in atoms(verdict.licence))
        self.statistics.counts.update(verdict.flags)
        given = {"licence_flags": list(verdict.flags)} if verdict.flags else {}
        given |= {"licence_evidence": evidence}  # type: ignore[dict-item]
        known = document.metadata.get("source_hash") or f"sha256:{sha256(document.text).hex()}"
        out = document.changed(document.text, self.name, was=document.licence, licence=verdict.licence)
        out.licence = verdict.licence
        out.metadata = {**document.metadata, **given, "source_hash": known}
        return out


def attributions(documents: Iterable[Document]) -> Iterator[dict[str, Any]]:
    """The ledger of what asks to be named: a row for each document whose licence wants attribution."""
    for document in documents:
        name = normalise(document.licence)
        if name is not None and ("attribution" in (marks := flags(name)) or "share-alike" in marks):
            row = {"id": document.id, "licence": name, "url": document.url, "source": document.source}
            for key in ("title", "creator", "author", "rights_holder", "date"):
                row[key] = document.metadata.get(key)
            yield {k: v for k, v in row.items() if v}
