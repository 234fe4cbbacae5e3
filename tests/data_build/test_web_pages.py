"""Text of pages, encodings by the labels of browsers, and which records of an archive are pages."""

import time
from io import BytesIO

import pytest

from trainwright.core.errors import DataError
from trainwright.data.build.bad_rows import BadRows
from trainwright.data.build.formats import open_reader
from trainwright.data.build.web_page import decode_page, html_text

BODY = "<p>Whales swim in the sea.</p>"
TEXT = "Whales swim in the sea."
CONTROLS = "<label>Name</label><input><textarea>x</textarea><select><option>a</select><button>Go</button>"
FORM = f"<form id=f><div>{CONTROLS}{{}}</div></form>"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        # A page inside a form; its controls are no text.
        (f"<html><body>{FORM.format(BODY)}</body></html>", TEXT),
        (FORM.format(""), ""),
        # Never closed: its text stays, for nothing tells where it ended.
        (f"<body><nav><a>Home</a><div>{BODY}</div></body>", f"Home\n{TEXT}"),
        (f"<body><div id=page><nav><a>Home</a><div>{BODY}</div></div></body>", f"Home\n{TEXT}"),
        (f"<body><button>Go<p>{BODY}</p></body>", f"Go\n{TEXT}"),
        (f"<body><header><h1>Site</h1><div>{BODY}</div>", f"Site\n{TEXT}"),
        # Closed: gone, and what was left open inside goes with it.
        (f"<body><nav><ul><li>Home<li>About</nav>{BODY}", TEXT),
        (f"<nav><div>a<div>b</nav>{BODY}</div>", TEXT),
        (f"<nav>a</a></b></nav></nav></div>{BODY}", TEXT),
        (f"<nav><b>a</nav>{BODY}</b><footer>Imprint</footer>", TEXT),
        (f"<header><h1>Site</h1></header><main>{BODY}</main>", TEXT),
        (f"<article><header><h1>The Whale</h1></header>{BODY}</article><header>x</header>", f"The Whale\n{TEXT}"),
        (f"<main><header><h1>The Whale</h1></header>{BODY}</main>", f"The Whale\n{TEXT}"),
        # Scripts are no text, closed or not.
        (f"{BODY}<script>if (a < b) {{ f('<p>') }}</script>", TEXT),
        (f"{BODY}<script>if (a < b)", TEXT),
        (f"{BODY}<template><p>x", TEXT),
        (f"<svg><title>x</title><text>y</text></svg>{BODY}", TEXT),
        (f"<svg><path/><text>y{BODY}", TEXT),
        (f"<svg/>{BODY}", TEXT),
        # Line breaks of the source are spaces; those of pre are not.
        ("<p>one two\nthree <b>four</b>\n five</p>", "one two three four five"),
        ("<p>one<br>two<br/>three", "one\ntwo\nthree"),
        ("<pre>def f(x):\n    if x:\n        return 1\n</pre>", "def f(x):\n    if x:\n        return 1"),
        ("<pre>\n<span>a</span>\n\n  <b>b</b><br>  c</pre><p>d", "a\n\n  b\n  c\nd"),
        ("<p>x<pre>  a\r\n\tb</pre>y", "x\n  a\n\tb\ny"),
        # Cells are words of their own.
        ("<table><tr><td>Name</td><td>Size</td></tr><tr><td>Whale<td>30 m</table>", "Name Size\nWhale 30 m"),
        ("<dl><dt>a<dd>b</dl>c", "a\nb\nc"),
        ("a &lt; b &amp;&amp; c &#8212; d", "a < b && c — d"),
    ],
)
def test_text_of_a_page(page, text):
    assert html_text(page) == text


def test_code_of_a_page_parses():
    code = "def f(xs):\n    for x in xs:\n        if x > 1:\n            return x\n\n\ndef g():\n    return f([2])"
    page = f"<p>See:<div><pre><code>{code.replace('>', '&gt;')}</code></pre></div>"
    assert html_text(page) == f"See:\n{code}"


@pytest.mark.parametrize(
    "part", ["<p>", "<b>", "<div>", "<nav>", "</div>", "<table><b></div>", "<svg>", "<pre>a</b>", "&"]
)
def test_no_page_takes_long(part):
    started = time.process_time()
    html_text("<div>" + part * 30_000 + "</i></div>" * 1000)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("label", "data", "text", "name"),
    [
        ("ISO-8859-1", b"\x93it\x92s\x94 caf\xe9 \x80", "“it’s” café €", "windows-1252"),
        ("latin1", b"\x85\x81", "…\x81", "windows-1252"),
        ("us-ascii", b"caf\xe9", "café", "windows-1252"),
        ("iso-8859-9", b"\x93\xfe\x94", "“ş”", "windows-1254"),
        ("gb2312", "镕€".encode("gb18030"), "镕€", "gb18030"),
        ("Shift_JIS", "①髙".encode("cp932"), "①髙", "shift_jis"),
        ("ks_c_5601-1987", "똠".encode("cp949"), "똠", "euc-kr"),
        ("big5", "啫".encode("big5hkscs"), "啫", "big5"),
        ("iso88592", b"\xb1", "ą", "iso88592"),
        ("x-cp1253", b"\xfe", "ώ", "windows-1253"),
        ("tis-620", b"\xa1\x85", "ก…", "windows-874"),
        ("UTF8", "ü".encode(), "ü", "utf-8"),
    ],
)
def test_labels_mean_what_browsers_read(label, data, text, name):
    assert decode_page(data, label) == (text, name.replace("iso88592", "iso8859-2"))


def archive(path, records):
    pytest.importorskip("warcio")
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        for name, status, headers, body in records:
            http = StatusAndHeaders(status, list(headers.items()), protocol="HTTP/1.1")
            writer.write_record(writer.create_warc_record(name, "response", BytesIO(body), http_headers=http))
    return path


HTML = {"Content-Type": "text/html"}


def test_pages_are_those_with_status_200(tmp_path):
    statuses = ("200 OK", "404 Not Found", "404 Not Found", "301 Moved", "206 Partial Content", "503 No", "what")
    path = archive(tmp_path / "a.warc.gz", [(f"http://x/{i}", s, HTML, BODY.encode()) for i, s in enumerate(statuses)])
    reader = open_reader(path)
    assert [(d.url, d.text) for d in reader] == [("http://x/0", TEXT)]
    counts = reader.statistics.counts
    assert {k: v for k, v in counts.items() if k.startswith("pages")} == {
        "pages with status 404": 2, "pages with status 301": 1, "pages with status 206": 1, "pages with status 503": 1,
        "pages without a status": 1,
    }  # fmt: skip


def test_encodings_of_pages(tmp_path):
    quoted = b"<p>\x93quoted\x94 it\x92s caf\xe9"
    records = [
        ({"Content-Type": "text/html; charset=ISO-8859-1"}, quoted),
        (HTML, b"<meta charset=latin1>" + quoted),
        ({"Content-Type": "text/html; charset=iso-8859-1"}, "\ufeff<p>“quoted” it’s café".encode()),
        (HTML, "<meta charset=utf-16><p>“quoted” it’s café".encode()),
        (HTML, "<meta charset=none-such><p>“quoted” it’s café".encode()),
    ]
    path = archive(tmp_path / "a.warc.gz", [(f"http://x/{i}", "200 OK", *r) for i, r in enumerate(records)])
    found = list(open_reader(path))
    assert [d.text for d in found] == ["“quoted” it’s café"] * 5
    named = [[s["encoding"] for s in d.provenance if s["step"] == "decode"] for d in found]
    assert named == [["windows-1252"], ["windows-1252"], [], [], []]


def test_packed_pages_are_told(tmp_path):
    packed = {**HTML, "Content-Encoding": "br"}
    latin = {"Content-Type": "text/html; charset=latin1", "Content-Encoding": "zstd"}
    records = [
        ("http://x/0", "200 OK", packed, BODY.encode()),  # says so and is not
        ("http://x/1", "200 OK", latin, b"\x28\xb5\x2f\xfd\x04\x00"),
    ]
    path = archive(tmp_path / "a.warc.gz", records)
    with pytest.raises(DataError, match="packed with zstd, which is not read"):
        list(open_reader(path))
    reader = open_reader(path, bad_rows=BadRows("skip", 1))
    assert [d.text for d in reader] == [TEXT] and reader.statistics.counts["bad rows: packed page"] == 1
