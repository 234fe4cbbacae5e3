"""Personal data and secrets: what goes, and what looks alike and stays."""

import pytest

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.scrubbing import ScrubPersonal, ScrubSecrets, luhn
from trainwright.data.build.statistics import Drop

TOKEN = "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("write to jane.doe+x@mail.example.org.", "write to <EMAIL>."),
        ("call +49 (0)30 1234567 now", "call <PHONE> now"),
        ("call (555) 123-4567, or 555-123-4567", "call <PHONE>, or <PHONE>"),
        ("Tel.: 212.555.0100 or 212.555.0199", "Tel.: <PHONE> or <PHONE>"),
        ("card 4111 1111 1111 1111 expires", "card <CARD> expires"),
        ("IBAN DE89 3704 0044 0532 0130 00 please", "IBAN <IBAN> please"),
        ("ssn 123-45-6789", "ssn <SSN>"),
        ("from 8.8.8.8 and 2001:4860:4860::8888", "from <IP> and <IP>"),
    ],
)
def test_personal(before, after):
    found = ScrubPersonal().apply(Document(before, "0"))
    assert found.text == after
    assert found.provenance[0]["step"] == "scrub_personal"


@pytest.mark.parametrize(
    "text",
    [
        "version 1.2.3.4.5 and 10.0.0.1 and 127.0.0.1",
        "pi is 3.14159265358979323846",
        "order 4111 1111 1111 1112 is no card",
        "GB00 WEST 1234 5698 7654 32 is no account",
        "in 1999-2004, pages 123-456, at 12:30:45",
        "user @ host, @decorator, a@b",
        "the years 1914 1918 1939 1945",
        "000-12-3456",
        "a shop tells 300.200.1000 from it",
        "version 1.2.3.4, v8.8.8.8 and firmware: 9.9.9.9",
        # No form tells these from other numbers; docs/data.md says so.
        "020 7946 0958 and (030) 123456",
        "x = arr[1:2:3]; std::vector<int>",
    ],
)
def test_what_looks_like_it_stays(text):
    document = Document(text, "0")
    assert ScrubPersonal().apply(document) is document


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("key = AKIAIOSFODNN7EXAMPLE", "key = <AWS_KEY>"),
        (f"ghp_{TOKEN}", "<GITHUB_TOKEN>"),
        (f"AIza{TOKEN[:35]}", "<GOOGLE_KEY>"),
        ("xoxb-123456789012-abcdefGHIJKL", "<SLACK_TOKEN>"),
        (f"sk_live_{TOKEN[:24]}", "<STRIPE_KEY>"),
        (f"sk-proj-{TOKEN}", "<MODEL_API_KEY>"),
        (f"hf_{TOKEN[:34]}", "<HUB_TOKEN>"),
        ("postgres://admin:hunter2@db:5432/x", "postgres://admin:<URL_PASSWORD>@db:5432/x"),
        ('DB_PASSWORD = "x7Kq9!mZp2"', 'DB_PASSWORD = "<ASSIGNED>"'),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\ndef\n-----END RSA PRIVATE KEY-----\nrest", "<PRIVATE_KEY>\nrest"),
    ],
)
def test_secrets(before, after):
    assert ScrubSecrets().apply(Document(before, "0")).text == after


@pytest.mark.parametrize(
    "text",
    [
        'password = "your_password_1"',
        'password = "aaaaaaaaa"',
        'secret = os.environ["SECRET_KEY"]',
        "the word password: strong",
        "sk-learn and ghp_short",
        "http://host:8080/path@v1",
    ],
)
def test_no_secrets(text):
    document = Document(text, "0")
    assert ScrubSecrets().apply(document) is document


def test_counts_kinds_and_dropping():
    stage = ScrubPersonal()
    stage.apply(Document("a@example.org b@example.org 8.8.8.8", "0"))
    assert stage.statistics.counts == {"email": 2, "ip": 1}
    only = ScrubPersonal(kinds=["ip"]).apply(Document("a@example.org 8.8.8.8", "0"))
    assert only.text == "a@example.org <IP>"
    assert ScrubSecrets(on_found="drop").apply(Document("AKIAIOSFODNN7EXAMPLE", "0")) == Drop("holds aws_key")
    with pytest.raises(ConfigError, match="unknown: name; known: email"):
        ScrubPersonal(kinds=["name"])
    with pytest.raises(ConfigError, match="on_found='hide'"):
        ScrubSecrets(on_found="hide")


def test_luhn():
    assert luhn("79927398713")
    assert not any(luhn(f"7992739871{d}") for d in "012456789")


def test_scrubbing_twice_changes_nothing():
    text = "a@example.org +49 30 1234567 8.8.8.8 4111111111111111"
    once = ScrubPersonal().apply(Document(text, "0"))
    assert ScrubPersonal().apply(once) is once


@pytest.mark.parametrize(
    "text", ["a" * 100_000, "1 " * 50_000, "1-" * 50_000, "a." * 50_000, "a:" * 50_000, "AB12" * 25_000]
)
def test_long_lines_take_no_time(text):
    """A pattern that goes back and forth would take minutes here."""
    import time

    started = time.process_time()
    ScrubPersonal().apply(Document(text, "0"))
    ScrubSecrets().apply(Document(text, "0"))
    assert time.process_time() - started < 5
