"""The checks of an open dataset (card B060)."""

import datetime as dt
import json

import pytest

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.composition import read_manifest
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import open_reader
from trainwright.data.build.governance import (
    Entry,
    Manifest,
    check_manifest,
    croissant,
    datasheet,
    entry_of,
    gate,
    opt_out_signals,
    public_domain,
    replay,
    take_down,
)
from trainwright.data.build.governance.signals import may_fetch
from trainwright.data.build.governance.takedown import TakenOut
from trainwright.data.build.pipeline import run_pipeline
from trainwright.data.build.stages import make_stages
from trainwright.data.build.writers import Writer, write_documents

NOW = dt.date(2026, 6, 1)
HEAD = {"name": "tiny", "licence": "CC-BY-4.0", "contact": "a@example.org", "deprecation": "a year's notice"}


def corpus(count=200):
    return [
        Document(
            f"text {i}", f"d{i}", "s", f"https://site{i % 5}.example.org/{i}", "CC0-1.0",
            {"language": "en", "retrieved_at": "2026-01-02T03:04:05"}, [{"step": "lengths"}],
        )
        for i in range(count)
    ]  # fmt: skip


def manifest_of(documents, **head):
    return Manifest.of((entry_of(d, evidence="page") for d in documents), **{**HEAD, **head})


def test_a_round_trip_and_hashes_are_exact(tmp_path):
    documents = corpus()
    manifest = manifest_of(documents)
    manifest.save(tmp_path / "m.jsonl")
    back = Manifest.load(tmp_path / "m.jsonl")
    assert back == manifest and back.corpus_hash == manifest.corpus_hash
    assert back.verify(documents) == []
    documents[7].text = "texT 7"
    assert back.verify(documents) == ["d7: its text is not the one that was hashed"]
    assert back.verify(documents[8:])[:1] == ["d0: missing"]
    assert back.verify([*corpus(), Document("more", "more")]) == ["more: not in the manifest"]
    raw = (tmp_path / "m.jsonl").read_text()
    for old, new in (("sha256:", "sha257:"), ('"d5"', '"e5"')):
        (tmp_path / "m.jsonl").write_text(raw.replace(old, new, 30))
        with pytest.raises(DataError, match="changed since it was written"):
            Manifest.load(tmp_path / "m.jsonl")
    for bad in ("", "{", '{"manifest": {}}\n', raw.replace('"source_url"', '"sauce"')):
        (tmp_path / "m.jsonl").write_text(bad)
        with pytest.raises(DataError, match=r"m\.jsonl"):
            Manifest.load(tmp_path / "m.jsonl")


ROBOTS = """
User-agent: *
Disallow: /private
Allow: /private/open
Disallow: /*.pdf$
Disallow: /same
Allow: /same
Allow: /
Disallow: /a/b/c

User-agent: GPTBot
Disallow: /
Allow: /press

User-agent: CCBot
User-agent: ClaudeBot
Disallow: /data/*/raw
Crawl-delay: 5

User-agent: Free
Disallow:
"""


@pytest.mark.parametrize(
    ("agent", "path", "allowed"),
    [
        ("SomeBot", "/", True),
        ("SomeBot", "/private", False),
        ("SomeBot", "/private/x", False),
        ("SomeBot", "/private/open/x", True),  # the longer rule
        ("SomeBot", "/x.pdf", False),
        ("SomeBot", "/x.pdf?page=1", True),  # $ ends it
        ("SomeBot", "/same/x", True),  # equally long: allowed
        ("SomeBot", "/a/b", True),
        ("SomeBot", "/a/b/c/d", False),
        ("SomeBot", "/Private", True),  # paths mind the case
        ("GPTBot", "/", False),
        ("GPTBot", "/press/1", True),
        ("GPTBot", "/private/open", False),  # its own group only
        ("gptbot", "/news", False),  # names do not
        ("CCBot", "/data/2020/raw/x", False),
        ("CCBot", "/data/raw", True),
        ("CCBot", "/private", True),
        ("ClaudeBot", "/data/a/b/raw", False),
        ("Free", "/private", True),  # an empty rule forbids nothing
        ("Free", "/anything", True),
    ],
)
def test_b_robots_by_the_longest_match(agent, path, allowed):
    pytest.importorskip("protego")
    assert may_fetch(ROBOTS, f"https://example.org{path}", agent) is allowed


def test_signals_of_a_site():
    pytest.importorskip("protego")
    url = "https://example.org/page"
    assert opt_out_signals(url) == []
    assert opt_out_signals(url, robots=ROBOTS) == ["robots.txt: GPTBot"]
    assert opt_out_signals(url, robots="User-agent: *\nDisallow: /", agents=["X"]) == ["robots.txt: X"]
    assert opt_out_signals(url, ai_txt="# none\nDisallow: /page") == ["ai.txt: *"]
    assert opt_out_signals(url, headers={"TDM-Reservation": "1"}) == ["header: tdm-reservation"]
    assert opt_out_signals(url, headers={"TDM-Reservation": "0", "X-Robots-Tag": "noindex"}) == []
    assert opt_out_signals(url, html='<meta name="robots" content="noai, noimageai">') == [
        "meta: noai", "meta: noimageai",
    ]  # fmt: skip
    assert opt_out_signals(url, html='<meta name="tdm-reservation" content="1">') == ["meta: tdm-reservation"]
    rules = json.dumps([{"location": "/free/*", "tdm-reservation": 0}, {"location": "/", "tdm-reservation": 1}])
    assert opt_out_signals(url, tdmrep=rules) == ["tdmrep.json: tdm-reservation"]
    assert opt_out_signals("https://example.org/free/a", tdmrep=rules) == []
    assert opt_out_signals(url, tdmrep="{") == ["tdmrep.json: cannot be read"]


def test_c_takedown():
    documents = corpus()
    manifest = manifest_of(documents)
    gone = ["d3", "d50", "d199"]
    found, diff = take_down(manifest, gone, reason="asked for")
    assert len(found.entries) == len(manifest.entries) - 3 and found.version == 2
    assert all(found.entries[k] is manifest.entries[k] for k in found.entries)
    assert diff["removed"] == gone and diff["documents"] == 197
    assert [t["id"] for t in found.tombstones] == gone and found.tombstones[0]["reason"] == "asked for"
    assert (
        take_down(manifest, reversed(gone)).manifest.corpus_hash
        == found.corpus_hash
        == replay(manifest, [diff]).corpus_hash
    )
    again, nothing = take_down(found, gone)
    assert again.corpus_hash == found.corpus_hash and nothing["removed"] == []
    of_site, second = take_down(found, sites=["site1.example.org"])
    assert len(of_site.entries) == 197 - 40 + 1 - 1 and of_site.version == 3 and second["from"] == 2
    assert replay(manifest, [diff, second]).corpus_hash == of_site.corpus_hash
    by_hash = take_down(manifest, hashes=[manifest.entries["d3"].content_hash]).diff
    assert by_hash["removed"] == ["d3"]
    kept = list(TakenOut(found).run(documents))
    assert len(kept) == 197 and found.verify(kept) == []
    with pytest.raises(ConfigError, match="not in version 1: nobody"):
        take_down(manifest, ["nobody"])
    with pytest.raises(ConfigError, match="names nothing"):
        take_down(manifest)
    with pytest.raises(ConfigError, match="for version 2, not 1"):
        replay(manifest, [second])


def test_d_rebuilding_gives_the_same_corpus(tmp_path):
    write_documents(corpus(), tmp_path / "in")
    hashes, manifests = set(), set()
    for name in "ab":
        out = tmp_path / name
        run_pipeline(make_stages(["licence_policy", "exact_dedup"]), open_reader(tmp_path / "in"), Writer(out))
        hashes.add(read_manifest(out)["corpus"])
        manifests.add(Manifest.of(map(entry_of, open_reader(out))).corpus_hash)
    assert len(hashes) == len(manifests) == 1


def test_effect_every_planted_fault_is_found_and_nothing_else():
    documents = corpus(400)
    entries = [entry_of(d, evidence="page") for d in documents]
    planted = {"no licence": range(0, 20), "nc": range(20, 40), "opted out": range(40, 60), "stale": range(60, 80)}
    for i in planted["no licence"]:
        entries[i] = Entry(**{**vars_of(entries[i]), "licence": ""})
    for i in planted["nc"]:
        entries[i] = Entry(**{**vars_of(entries[i]), "licence": "CC BY-NC 4.0"})
    for i in planted["opted out"]:
        entries[i] = Entry(**{**vars_of(entries[i]), "source_url": f"https://www.gone.example/{i}"})
    for i in planted["stale"]:
        documents[i].text += "."
    report = check_manifest(Manifest.of(entries, **HEAD), documents, takedown_sites=["gone.example"], now=NOW)
    ids = {k: {f"d{i}" for i in v} for k, v in planted.items()}
    assert report.ids("licence") == ids["no licence"] | ids["nc"]
    assert report.ids("opt-out") == ids["opted out"]
    assert report.ids("hash") == ids["stale"]
    others = set(report.rules) - {"licence", "opt-out", "hash"}
    assert all(report.rules[r].status == "pass" for r in others)
    assert report.score == pytest.approx(0.8) and report.grade == "B"
    clean = check_manifest(manifest_of(corpus()), corpus(), now=NOW)
    assert clean.score == 1 and clean.grade == "A" and all(r.status == "pass" for r in clean.rules.values())


def vars_of(entry):
    import dataclasses

    return {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)}


def test_grades_of_evidence_and_quarantine():
    document = corpus(1)[0]
    grades = {e: entry_of(document, evidence=e) for e in ("header", "page", "registry", "third-party")}
    assert {e: x.grade for e, x in grades.items()} == {"header": "A", "page": "B", "registry": "B", "third-party": "C"}
    assert [x.released for x in grades.values()] == [True, True, True, False]
    manifest = Manifest.of([grades["third-party"]], **HEAD)
    assert manifest.quarantined() == ["d0"]
    with pytest.raises(ConfigError, match="1 quarantined documents would be published"):
        manifest.publish()
    assert take_down(manifest, ["d0"]).manifest.publish(tokens=0).head["tokens"] == 0


@pytest.mark.parametrize(
    ("place", "published", "died", "signal"),
    [
        ("US", 1930, None, "yes"),  # before 2026 - 95 = 1931
        ("US", 1931, None, "no"),
        ("US", None, 1800, "unknown"),
        ("DE", None, 1955, "yes"),  # before 2026 - 70 = 1956
        ("de", None, 1956, "no"),
        ("DE", 1800, None, "unknown"),
        ("CN", None, 1970, "yes"),
        ("MX", None, 1930, "no"),
        ("ZZ", 1500, 1500, "unknown"),
        ("", 1500, 1500, "unknown"),
        (None, None, None, "unknown"),
    ],
)
def test_public_domain(place, published, died, signal):
    found = public_domain(place, 2026, published, died)
    assert found.signal == signal and "not legal advice" in str(found)


def test_without_a_clock():
    assert public_domain("US", None, 1900).signal == "unknown"
    report = check_manifest(manifest_of(corpus(3)))
    assert report.rules["retrieved"].status == "warn" and "no clock" in str(report)
    with pytest.raises(ValueError, match="lies after the year"):
        public_domain("US", 2026, 2030)


def test_rules_one_by_one():
    def judged(rule, **changes):
        entry = Entry(**{**vars_of(entry_of(corpus(1)[0], evidence="page")), **changes})
        policies = {"site0.example.org": "CC-BY-4.0"} if rule == "source policy" else {}
        return check_manifest(Manifest.of([entry], **HEAD), source_policies=policies, now=NOW).rules[rule].status

    assert judged("licence", licence="free to a good home") == "fail"  # free text that is not mapped
    assert judged("licence", licence="CC-BY-SA-4.0") == "warn"
    assert judged("source policy") == "fail"  # CC0 against the site's CC-BY
    assert judged("source policy", licence="cc by 4.0") == "pass"
    assert judged("public domain", licence="PD", jurisdiction="US", published=2001) == "fail"
    assert judged("public domain", licence="PD", jurisdiction="US", published=1901) == "pass"
    assert judged("public domain", licence="PD", jurisdiction="FR") == "warn"
    assert judged("opt-out", opt_out_signals=("meta: noai",)) == "fail"
    assert judged("retrieved", retrieved_at="") == "warn"
    assert judged("retrieved", retrieved_at="yesterday") == "fail"
    assert judged("retrieved", retrieved_at="2031-01-01") == "fail"
    assert judged("source", source_url="") == "fail"
    assert judged("processing", processing=({"what": 1},)) == "warn"
    assert judged("quarantine", released=False) == "warn"


def test_every_verdict_says_signal():
    for line in str(check_manifest(manifest_of(corpus(5)), now=NOW)).splitlines():
        assert line.startswith("signal: ")
    assert "not legal advice" in check_manifest(manifest_of(corpus(5))).to_json()["note"]


def test_the_gate():
    good = check_manifest(manifest_of(corpus(20)), now=NOW)
    gate(good, "A")
    bad = check_manifest(manifest_of([Document("x", "x")]), now=NOW)
    assert bad.grade == "D"
    with pytest.raises(ConfigError, match=r"signal: the dataset has grade .*licence"):
        gate(bad, "B")
    with pytest.raises(ConfigError, match="min_grade='E'"):
        gate(good, "E")
    with pytest.raises(ConfigError, match="holds no document"):
        check_manifest(Manifest.of([]))
    with pytest.raises(DataError, match="comes twice"):
        Manifest.of([entry_of(corpus(1)[0])] * 2)


def test_release(tmp_path):
    run_pipeline(make_stages([{"lengths": {"least": 1}}]), iter(corpus(30)), Writer(tmp_path / "out"))
    shards = read_manifest(tmp_path / "out")["shards"]
    manifest = take_down(manifest_of(corpus(30)), ["d1"]).manifest
    sheet = datasheet(
        manifest, check_manifest(manifest, now=NOW), {"stages": [{"stage": "s", "dropped": {"short": 3}}]}
    )
    for part in ("# tiny, version 2", "taken down so far: 1", "- CC0-1.0: 29", "- s: short: 3", "signal: grade A"):
        assert part in sheet
    found = croissant(manifest, shards)
    assert found["conformsTo"] == "http://mlcommons.org/croissant/1.0" and found["version"] == "2.0.0"
    assert found["distribution"][0]["sha256"] == shards[0]["sha256"].removeprefix("sha256:")
    assert {f["name"] for f in found["recordSet"][0]["field"]} >= {"text", "licence"}
    json.dumps(found)
