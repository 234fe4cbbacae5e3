"""Licences by one name, allow-lists, what a text says of itself (card B098: a, bad input)."""

import pytest

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document, sha256
from trainwright.data.build.licences import (
    OPEN,
    LicencePolicy,
    Policy,
    attributions,
    covers,
    flags,
    normalise,
    said_by_text,
)
from trainwright.data.build.statistics import Drop

MIT_TEXT = "Permission is hereby granted, free of charge, to any person obtaining a copy of this software"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("CC BY 4.0", "CC-BY-4.0"),
        ("cc-by-4.0", "CC-BY-4.0"),
        ("https://creativecommons.org/licenses/by/4.0/legalcode", "CC-BY-4.0"),
        ("Creative Commons Attribution 4.0 International License", "CC-BY-4.0"),
        ("Creative Commons Attribution-NonCommercial-ShareAlike 3.0 Unported", "CC-BY-NC-SA-3.0"),
        ("CC BY-NC-ND 4.0 International", "CC-BY-NC-ND-4.0"),
        ("cc by sa", "CC-BY-SA"),
        ("CC0", "CC0-1.0"),
        ("http://creativecommons.org/publicdomain/zero/1.0/", "CC0-1.0"),
        ("Public  Domain.", "PD"),
        ("MIT License", "MIT"),
        ("https://opensource.org/licenses/MIT", "MIT"),
        ("Apache License, Version 2.0", "Apache-2.0"),
        ("http://www.apache.org/licenses/LICENSE-2.0", "Apache-2.0"),
        ("BSD 3-Clause", "BSD-3-Clause"),
        ("bsd", "BSD"),
        ("gpl-3.0-or-later", "GPL-3.0-or-later"),
        ("odc-by", "ODC-By-1.0"),
        ("mit or apache-2.0", "MIT OR Apache-2.0"),
        ("MIT, CC-BY-4.0", "MIT AND CC-BY-4.0"),
        ("LicenseRef-House", "LicenseRef-House"),
        ("free for all who ask nicely", None),
        ("Creative Commons", None),
        ("MIT OR something else", None),
        ("other", None),
        ("unknown", None),
        ("", None),
        (None, None),
    ],
)
def test_one_name(given, name):
    assert normalise(given) == name
    if name:
        assert normalise(name) == name


def test_every_name_on_the_open_list_stands_for_something():
    for name in OPEN:
        assert Policy([name]).allow and not [f for f in flags(name) if f.startswith("no")]


@pytest.mark.parametrize(
    ("entry", "licence", "fits"),
    [
        ("CC-BY", "CC-BY-4.0", True),
        ("CC-BY", "CC-BY-NC-4.0", False),
        ("CC-BY", "CC-BY-SA-4.0", False),
        ("CC-BY-4.0", "CC-BY-3.0", False),
        ("CC-BY-4.0", "CC-BY", False),
        ("BSD", "BSD-3-Clause", True),
        ("MIT", "MIT-0", False),
        ("GPL", "LGPL-3.0-only", False),
        ("CC0", "CC0-1.0", True),
    ],
)
def test_what_an_entry_covers(entry, licence, fits):
    assert covers(entry, licence) is fits


def test_expressions():
    policy = Policy(["MIT", "CC-BY"])
    assert policy.judge("MIT OR GPL-3.0-only").allowed
    assert not policy.judge("MIT AND GPL-3.0-only").allowed
    assert policy.judge("(MIT OR GPL-3.0-only) AND CC-BY-4.0").allowed
    assert not policy.judge("(MIT OR CC-BY) AND CC-BY-NC").allowed
    assert Policy(["GPL"]).judge("GPL-2.0-only WITH Classpath-exception-2.0").allowed


def test_verdicts():
    policy = Policy()
    assert policy.judge("CC BY-NC 4.0").reason == "non-commercial"
    assert policy.judge("CC BY-ND 4.0").reason == "no-derivatives"
    assert policy.judge("of my own making").reason == "licence not known"
    assert policy.judge(None).reason == policy.judge(" ").reason == "no licence given"
    assert policy.judge("GPL-3.0-only").reason == "licence not allowed"
    assert policy.judge("CC BY-SA 4.0").flags == ("attribution", "share-alike")
    for licence in ("MIT", "GPL-3.0-only", None):
        assert str(policy.judge(licence)).startswith("signal: ") and "not legal advice" in str(policy.judge(licence))


def test_lists_refused():
    with pytest.raises(ConfigError, match="non-commercial, and the corpus is to be used commercially"):
        Policy(["MIT", "CC-BY-NC-4.0"])
    with pytest.raises(ConfigError, match="no-derivatives"):
        Policy(["CC-BY-ND"])
    assert Policy(["CC-BY-NC"], commercial=False).judge("cc-by-nc-4.0").allowed
    with pytest.raises(ConfigError, match=r"is no licence known here; did you mean 'Apache-2\.0'"):
        Policy(["Apachee-2.0"])
    with pytest.raises(ConfigError, match="names no licence"):
        Policy([])
    with pytest.raises(ConfigError, match="one by one"):
        Policy(["MIT OR CC0-1.0"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# SPDX-License-Identifier: MIT\nx = 1", ["MIT"]),
        ("/* SPDX-License-Identifier: GPL-2.0-only */", ["GPL-2.0-only"]),
        ("// SPDX-License-Identifier: MIT OR Apache-2.0\n", ["MIT OR Apache-2.0"]),
        ("This article is licensed under a Creative Commons Attribution 4.0 License.", ["CC-BY-4.0"]),
        ("See https://creativecommons.org/licenses/by-nc/4.0/ for terms.", ["CC-BY-NC-4.0"]),
        (f"Copyright (c) X. All rights reserved. {MIT_TEXT}", ["MIT"]),
        ("Copyright X. All rights reserved.", ["LicenseRef-proprietary"]),
        ("This book is in the public domain.", ["PD"]),
        ("An essay about the MIT campus and the rights of all.", []),
        (("word " * 2000) + "all rights reserved" + (" word" * 2000), []),
    ],
)
def test_what_a_text_says(text, said):
    assert said_by_text(text) == said


def document(licence, text="a text of its own", **more):
    return Document(text, "d", "s", "https://example.org/d", licence, **more)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (document(None), "no licence given"),
        (document("my licence"), "licence not known"),
        (document("CC-BY-NC-4.0"), "non-commercial"),
        (document("CC-BY-NC-ND-4.0"), "no-derivatives and non-commercial"),
        (document("MIT", "# SPDX-License-Identifier: GPL-3.0-only"), "metadata and text contradict each other"),
        (document("CC-BY-4.0", "All rights reserved."), "metadata and text contradict each other"),
        (document("MIT AND CC-BY-NC-4.0"), "several licences in one document"),
        (
            document(None, f"{MIT_TEXT}\n# SPDX-License-Identifier: Apache-2.0"),
            "several licences in one document",
        ),
    ],
)
def test_documents_thrown_out(given, reason):
    answer = LicencePolicy().apply(given)
    assert isinstance(answer, Drop) and answer.reason == reason


def test_a_what_goes_on_has_a_licence_of_the_list_and_a_source_with_its_hash(open_documents):
    stage = LicencePolicy()
    out = list(stage.run(open_documents))
    assert len(out) == 12
    policy = Policy()
    for before, after in zip(open_documents, out, strict=True):
        assert policy.judge(after.licence).allowed and after.licence == normalise(after.licence)
        assert after.url and after.metadata["source_hash"] == f"sha256:{sha256(before.text).hex()}"
        assert after.provenance[-1] == {"step": "licence_policy", "was": before.licence, "licence": after.licence}
    assert out[2].metadata["licence_flags"] == ["attribution", "share-alike"]
    assert stage.statistics.counts["share-alike"] == 2
    again = list(LicencePolicy().run(out))
    assert [d.licence for d in again] == [d.licence for d in out]
    assert again[0].metadata["source_hash"] == out[0].metadata["source_hash"]


def test_the_text_fills_in_what_metadata_leaves_out():
    out = LicencePolicy().apply(document(None, "# SPDX-License-Identifier: MIT"))
    assert (out.licence, out.metadata["licence_evidence"]) == ("MIT", "text")
    out = LicencePolicy().apply(document("CC BY 4.0", "licensed under CC BY 4.0"))
    assert out.metadata["licence_evidence"] == "metadata and text"
    # A version that one of the two leaves open is no contradiction, and neither is one of two licences to choose from.
    assert LicencePolicy().apply(document("BSD", "# SPDX-License-Identifier: BSD-3-Clause")).licence == "BSD"
    assert LicencePolicy().apply(document("MIT", "# SPDX-License-Identifier: MIT OR Apache-2.0")).licence == "MIT"


def test_the_ledger_names_who_wants_to_be_named(open_documents):
    rows = list(attributions(open_documents))
    assert {r["licence"] for r in rows} == {"CC-BY-4.0", "CC-BY-SA-4.0"} and len(rows) == 4
    assert rows[0] == {
        "id": "d1", "licence": "CC-BY-4.0", "url": "https://site1.example.org/1", "source": "science",
        "creator": "author 1",
    }  # fmt: skip
