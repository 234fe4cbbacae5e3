"""The rules, each with pass, warn or fail, a score over all of them, and the gate of a build.

    score = mean over documents of the worst that a rule says of it: pass 1, warn 0.8, fail 0
    grade   A >= 0.95 and nothing failed, B >= 0.8, C >= 0.6, else D

Signals for a person to look at, not legal advice.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.governance.manifest import Entry, Manifest, content_hash
from trainwright.data.build.governance.public_domain import public_domain
from trainwright.data.build.governance.signals import site
from trainwright.data.build.licences import OPEN, Policy, normalise

Judgement = tuple[str, str]  # pass, warn or fail; why
VALUE = {"pass": 1.0, "warn": 0.8, "fail": 0.0}
GRADES = ("A", "B", "C", "D")
PD = {"PD", "CC-PDM-1.0"}
HEAD = ("name", "licence", "contact", "deprecation")  # what a release has to say of itself


@dataclass
class Rule:
    name: str
    counts: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # reason -> ids

    @property
    def status(self) -> str:
        return "fail" if self.counts["fail"] else "warn" if self.counts["warn"] else "pass"


@dataclass
class Report:
    """What the rules found. ``str`` says it in a line a rule."""

    rules: dict[str, Rule]
    documents: int
    note: str = "signals, not legal advice"
    worst: dict[str, float] = field(default_factory=dict)  # of each document, by id

    @property
    def score(self) -> float:
        # Rounded, so that a mean of 0.8s is 0.8.
        return round(sum(self.worst.values()) / len(self.worst), 9) if self.worst else 0.0

    @property
    def grade(self) -> str:
        failed = any(r.counts["fail"] for r in self.rules.values())
        limits = ((0.95, "B" if failed else "A"), (0.8, "B"), (0.6, "C"))
        return next((g for least, g in limits if self.score >= least), "D")

    def ids(self, rule: str, status: str = "fail") -> set[str]:
        return {i for reason, ids in self.rules[rule].found.items() if reason.startswith(f"{status}: ") for i in ids}

    def to_json(self) -> dict[str, Any]:
        return {
            "note": self.note,
            "score": round(self.score, 4),
            "grade": self.grade,
            "documents": self.documents,
            "rules": {
                r.name: {"status": r.status, **r.counts, "reasons": {k: len(v) for k, v in r.found.items()}}
                for r in self.rules.values()
            },
        }

    def __str__(self) -> str:
        lines = [f"signal: grade {self.grade}, score {self.score:.3f} ({self.note})"]
        for rule in self.rules.values():
            why = "; ".join(f"{k.partition(': ')[2]} ({len(v)})" for k, v in rule.found.items())
            lines.append(f"signal: {rule.status:4} {rule.name}" + (f": {why}" if why else ""))
        return "\n".join(lines)


def check_manifest(
    manifest: Manifest,
    documents: Iterable[Document] | None = None,
    *,
    allow: Iterable[str] = OPEN,
    commercial: bool = True,
    takedown_sites: Iterable[str] = (),
    source_policies: Mapping[str, str] | None = None,
    now: dt.date | None = None,
) -> Report:
    """All rules over all entries. ``documents`` are needed to check hashes (a document at a time is held), ``now`` for
    what depends on a clock: without it such rules warn. ``source_policies``: the licence that a site states for all its
    pages. Raises ConfigError for an allow-list that does not fit, and an empty manifest."""
    if not manifest.entries:
        raise ConfigError("holds no document", key="manifest")
    policy = Policy(allow, commercial)
    hosts = {s.lower().removeprefix("www.") for s in takedown_sites}
    stated = {k.lower().removeprefix("www."): v for k, v in (source_policies or {}).items()}
    rules: dict[str, Callable[[Entry], Judgement]] = {
        "licence": lambda e: _licence(e, policy),
        "evidence": _evidence,
        "source policy": lambda e: _source_policy(e, stated),
        "public domain": lambda e: _public_domain(e, now),
        "opt-out": lambda e: _opt_out(e, hosts),
        "source": lambda e: ("pass", "") if e.source_url else ("fail", "no source URL"),
        "retrieved": lambda e: _retrieved(e, now),
        "processing": _processing,
        "quarantine": lambda e: _quarantine(e),
    }
    report = Report({n: Rule(n) for n in rules}, len(manifest.entries))

    def note(rule: str, name: str, judgement: Judgement) -> None:
        status, why = judgement
        row = report.rules.setdefault(rule, Rule(rule))
        row.counts[status] += 1
        if rule != "release":
            report.worst[name] = min(report.worst.get(name, 1.0), VALUE[status])
        if status != "pass":
            row.found[f"{status}: {why}"].append(name)

    for entry in manifest.entries.values():
        for rule, judge in rules.items():
            note(rule, entry.id, judge(entry))
    if documents is not None:
        seen = set()
        for document in documents:
            seen.add(document.id)
            known = manifest.entries.get(document.id)
            same = known is not None and known.content_hash == content_hash(document.text)
            note(
                "hash",
                document.id,
                ("pass", "") if same else ("fail", "stale hash" if known else "not in the manifest"),
            )
        for name in manifest.entries.keys() - seen:
            note("hash", name, ("fail", "missing"))
    for key in HEAD:
        there = bool(manifest.head.get(key))
        note("release", key, ("pass", "") if there else ("warn", f"the manifest names no {key}"))
    return report


def _licence(entry: Entry, policy: Policy) -> Judgement:
    if not entry.licence:
        return "fail", "no licence"
    verdict = policy.judge(entry.licence)
    if verdict.allowed:
        return ("warn", "share-alike") if "share-alike" in verdict.flags else ("pass", "")
    return "fail", verdict.reason if verdict.licence else "free-text licence that is not mapped"


def _evidence(entry: Entry) -> Judgement:
    return {"A": ("pass", ""), "B": ("pass", "")}.get(entry.grade, ("warn", "evidence of grade C"))


def _source_policy(entry: Entry, stated: Mapping[str, str]) -> Judgement:
    said = stated.get(site(entry.source_url))
    if said is None or not entry.licence:
        return "pass", ""
    same = normalise(said) == normalise(entry.licence)
    return ("pass", "") if same else ("fail", f"the site states {said}")


def _public_domain(entry: Entry, now: dt.date | None) -> Judgement:
    if normalise(entry.licence) not in PD or (
        entry.published is None and entry.died is None and not entry.jurisdiction
    ):
        return "pass", ""
    try:
        found = public_domain(entry.jurisdiction, now.year if now else None, entry.published, entry.died)
    except ValueError as error:
        return "fail", str(error)
    return {"yes": "pass", "no": "fail", "unknown": "warn"}[found.signal], found.reason


def _opt_out(entry: Entry, hosts: set[str]) -> Judgement:
    host = site(entry.source_url)
    if any(host == h or host.endswith(f".{h}") for h in hosts):
        return "fail", "its site opted out"
    return ("fail", f"said when fetched: {entry.opt_out_signals[0]}") if entry.opt_out_signals else ("pass", "")


def _retrieved(entry: Entry, now: dt.date | None) -> Judgement:
    if not entry.retrieved_at:
        return "warn", "no time of retrieval"
    try:
        day = dt.datetime.fromisoformat(entry.retrieved_at).date()
    except ValueError:
        return "fail", "the time of retrieval is no ISO 8601 date"
    if now is None:
        return "warn", "no clock: the time of retrieval is not checked"
    return ("fail", "retrieved in the future") if day > now else ("pass", "")


def _processing(entry: Entry) -> Judgement:
    named = all(isinstance(p, dict) and (p.get("step") or p.get("operator")) for p in entry.processing)
    return ("pass", "") if named else ("warn", "a step without a name")


def _quarantine(entry: Entry) -> Judgement:
    return ("pass", "") if entry.released else ("warn", "quarantined")


def gate(report: Report, min_grade: str) -> None:
    """Raises ConfigError where the report is worse than ``min_grade``."""
    if min_grade not in GRADES:
        raise ConfigError(f"should be one of {', '.join(GRADES)}", key="min_grade", value=min_grade)
    if GRADES.index(report.grade) > GRADES.index(min_grade):
        worst = [f"{r.name} ({', '.join(r.found)})" for r in report.rules.values() if r.status == "fail"]
        raise ConfigError(
            f"signal: the dataset has grade {report.grade}, score {report.score:.3f}; failed: "
            f"{'; '.join(worst) or 'none'} ({report.note})", key="min_grade", value=min_grade,
        )  # fmt: skip
