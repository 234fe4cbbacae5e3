"""Each kind of personal data and secret in a dozen surroundings, and what looks like it and stays."""

import random

import pytest

from trainwright.data.build.documents import Document
from trainwright.data.build.scrubbing import _IBAN, ScrubPersonal, ScrubSecrets

SURROUNDINGS = [
    "{}",
    "Write to {} or come on Monday.",
    "It is {}.",
    "({})",
    '"{}"',
    "value: {}",
    "name,{},b",
    "name;{};17",
    "<td>{}</td>",
    "号{}。",
    "| {} | Wien |",
    "No.{}\n2024",
    "{} BIC CAIXESBB",
    "{} IN WIEN",
    "{} EUR",
]
NUMBERS_BEHIND = ["{} 12/27 cvv 123", "{} 100 EUR", "order 12345 {} 2024 17", "{}, 12, 13", "7 {}\t19 20"]
PERSONAL = {
    "email": [
        "jane.doe+x@mail.example-corp.co.uk", "müller@web.de", "info@bäckerei.de", "a_b@firm.io", "x@firm.photography",
        "bob@firm.xn--p1ai", "_x@firm.md",
    ],
    "iban": [
        "DE89370400440532013000", "DE89 3704 0044 0532 0130 00", "BE68539007547034", "BE68 5390 0754 7034",
        "ES9121000418450200051332", "AT611904300234573201", "NL91ABNA0417164300", "GB29 NWBK 6016 1331 9268 19",
        "FR14 2004 1010 0505 0001 3M02 606", "NO9386011117947", "de89 3704 0044 0532 0130 00",
        "DE89-3704-0044-0532-0130-00",
        "CH93\u00a00076\u00a02011\u00a06238\u00a05295\u00a07",
    ],
    "card": [
        "4111111111111111", "4111 1111 1111 1111", "4111-1111-1111-1111", "5500005555555559", "378282246310005",
        "3782 822463 10005", "3056 930902 5904", "6011000990139424", "3530 1113 3330 0000", "2223003122003222",
        "2223 0031 2200 3222", "4111.1111.1111.1111", "4111\u00a01111\u00a01111\u00a01111", "4222222222222",
    ],
    "ssn": ["123-45-6789"],
    "ip": ["93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "2600::", "2001:4860:4860:0:0:0:0:8888"],
}  # fmt: skip
PHONES = [
    "+49 30 1234567", "+49 (0)30 1234567", "+49 30 1234567-0", "+49 (0) 30 / 123 45 67", "+1 (415) 555-2671",
    "+1-415-555-2671", "+14155552671", "+1.415.555.2671", "+1 415.555.2671", "+44 20 7946 0958", "+33 6 12 34 56 78",
    "+34 612 345 678", "+420 601 234 567", "+354 555 1234", "+7 495 123-45-67", "+43 1 58858-0", "+91 98765 43210",
    "+49\u00a030\u00a01234567", "+44 20\u20117946\u20110958", "(415) 555-2671", "(415)555-2671", "415-555-2671",
    "1-800-555-0199",
]  # fmt: skip


def scrubbed(stage, text):
    return stage.apply(Document(text, "0")).text


@pytest.mark.parametrize("kind", PERSONAL)
def test_personal_data_in_every_surrounding(kind):
    stage, wrong = ScrubPersonal(), []
    for around in [*SURROUNDINGS, *NUMBERS_BEHIND]:
        for value in PERSONAL[kind]:
            if kind == "email":
                around = around.replace("No.", "to:")  # which would be a part of the address
            text = around.format(value)
            found = scrubbed(stage, text)
            if found != around.format(f"<{kind.upper()}>"):
                wrong.append((text, found))
    assert not wrong


def test_telephone_numbers_in_every_surrounding():
    stage, wrong = ScrubPersonal(), []
    for around in [*SURROUNDINGS, *NUMBERS_BEHIND]:
        for value in PHONES:
            text = around.format(value)
            found = scrubbed(stage, text)
            # How long a number is depends on the country: what stands behind may go with it.
            exact = around in NUMBERS_BEHIND or found == around.format("<PHONE>")
            if not exact or found.count("<PHONE>") != 1 or value in found:
                wrong.append((text, found))
    assert not wrong


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("call 0049 30 1234567", "call <PHONE>"),
        ("Tel. 415 555 2671", "Tel. <PHONE>"),
        ("<ip_address>12.1.2.3</ip_address>", "<ip_address><IP></ip_address>"),
        ("Phone: +1.4155552671", "Phone: <PHONE>"),
        ("Tel: +376 312 345", "Tel: <PHONE>"),
        ("+1 415 555 2671 x12", "<PHONE>"),
        ("4111 1111 1111 1111 5500 0055 5555 5559", "<CARD> <CARD>"),
        ("4111111111111111 4111111111111112", "<CARD> 4111111111111112"),
        ("DE89370400440532013000/BE68539007547034", "<IBAN>/<IBAN>"),
        ("8.8.8.8:53, 93.184.216.34/24, http://1.2.3.4/x and ssh root@1.2.3.4", None),
    ],
)
def test_personal_data_that_words_or_neighbours_tell(before, after):
    after = after or "<IP>:53, <IP>/24, http://<IP>/x and ssh root@<IP>"
    assert scrubbed(ScrubPersonal(), before) == after


NO_PERSONAL_DATA = [
    "icon@2x.png", "<img src='logo@3x.jpg'>", "photo@1.5x.webp", "git@github.com:user/repo.git", "git@github.com/u/r",
    "ssh://git@github.com/u/r", "npm i lodash@4.17.21", "a@b.c", "@pytest.fixture", "root@localhost", "x = A@B.T",
    "torch.ones(3)@w.transpose(0, 1)", "q@k.transpose(-1, -2)", "x@layer.weight",
    "12:30:45", "00:1a:2b:3c:4d:5e", "ab:cd:ef:01", "std::dead::beef", "1:2:3:4:5:6:7:8", "Genesis 1:1:2::3",
    "population +12 345 678 this year", "change of +10 000 000 in 2020", "+100 200 3000", "GMT +0100 2000",
    "tensor([+100.2000 300.4000])", "[+44.2031 12.3344]", "y = +123 456 789 012;", "+1 234 567 890", "+27 000 000",
    "+250 000 000 000", "+20 30 40 50", "+1 2 3 4 5 6 7 8", "100-200-3000", "ratio 123-456-7890 ml",
    "(123) 456-7890123", "0049 123 4567 89", "415 555 2671", "2024-05-12 10:00:00 +0200", "+999 123 456 7890",
    "section 1.2.3.4 says", "sections 1.2.3.4, 1.2.3.5 and 11.2.33.44", "chapter 11.22.33.44", "OID 2.5.4.3",
    "1.3.6.1", "Python 3.12.4.1", "3.12.4.1", "19.12.20.24", "Chrome/91.0.44.120", "foo==1.2.3.45", "foo-11.2.33.45",
    "version 1.2.3.4.5", "10.0.0.1 and 192.168.1.1 and 127.0.0.1", "fe80::1 and ::1 and 2001:db8::1",
    "doi:10.1000.10.5",
    "ISBN 978-3-16-148410-0", "3.141592653589793", "pi 3141592653589793238", "order 4111 1111 1111 1112",
    "1234-5678-9012", "0.4111111111111111", "sha a4111111111111111f", "4111 1111 1111", "+4915112345678901234",
    "1111 1111 1111 1111", "2012 2013 2014 2015 2016 2017", "3842 1923 4451 9982",
    "GB00 WEST 1234 5698 7654 32", "ZZ68539007547034", "BE685390075470345", "NO93 8601 1117 948",
    "'sd_IN@devanagari.UTF-8'", "list('-+0123456789.')", '"neptune": "1.3.2.1",',
    "000-12-3456", "666-12-3456", "123-45-67890", "600-00-1234",
]  # fmt: skip


@pytest.mark.parametrize("style", ["tags", "fakes"])
def test_what_is_no_personal_data_stays(style):
    stage = ScrubPersonal(style=style)
    wrong = []
    for around in ("{}", "so {} then", "({})", '"{}",'):
        for value in NO_PERSONAL_DATA:
            text = around.format(value)
            if scrubbed(stage, text) != text:
                wrong.append((text, scrubbed(stage, text)))
    assert not wrong


def test_ibans_of_every_country():
    rng = random.Random(0)
    stage = ScrubPersonal(kinds=["iban"])
    for country, length in _IBAN.items():
        account = "".join(rng.choice("0123456789") for _ in range(length - 4))
        number = int("".join(str(int(c, 36)) for c in account + country) + "00")
        code = f"{country}{98 - number % 97:02d}{account}"
        grouped = " ".join(code[i : i + 4] for i in range(0, length, 4))
        for value in (code, grouped):
            assert scrubbed(stage, f"to {value} IN THE BANK") == "to <IBAN> IN THE BANK"
            assert scrubbed(stage, f"to {value}5") == f"to {value}5"


# -- secrets

A = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0"
SECRETS = {
    "aws_key": ["AKIAIOSFODNN7EXAMPLE"],
    "github_token": ["ghp_" + A[:36]],
    "gitlab_token": ["glpat-" + A[:20]],
    "google_key": ["AIza" + A[:35]],
    "npm_token": ["npm_" + A[:36]],
    "pypi_token": ["pypi-AgEIcHlwaS5vcmc" + A + A],
    "slack_token": ["xoxb-123456789012-abcdefGHIJKL"],
    "stripe_key": ["sk_live_" + A[:24]],
    "model_api_key": ["sk-proj-" + A, "sk-ant-api03-" + A + "_" + A, "sk-" + A],
    # As they are given out: 34 letters.
    "hub_token": ["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", "api_org_" + "FKHwOEXFEMliTrYJKHxNafLruHIXCcmmwz"],
    "jwt": ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N"],
    "private_key": [
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\\nMIIE\\n-----END PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA",  # cut short
    ],
}
AROUND_TOKENS = [
    "{}", "key = {}", 'key = "{}"', "'{}',", "export KEY={}\n", "  key: {}\n", "<k>{}</k>", "`{}`", "{{'k': '{}'}}",
    "curl -H '{}' x", "see {} there", "({})", "https://x.org/?k={}&a=1", "[{}]",
]  # fmt: skip
PASSWORDS = ["x7Kq9!mZp2", "Tr0ub4dor&3x", "hunter2isgood99", "Pa$sw0rd#1z9"]
AROUND_PASSWORDS = [
    'password = "{}"', "DB_PASSWORD='{}'", '"password": "{}",', "'password' => '{}'", "passwd: `{}`", 'secret := "{}"',
    "{{\\\"api_key\\\": \\\"{}\\\"}}", 'connect(user="x", password="{}")', 'my-secret: "{}"', 'apiKey="{}";',
    "access_token = '{}'  # why", 'auth_token="{}"',
]  # fmt: skip


@pytest.mark.parametrize("kind", SECRETS)
def test_tokens_in_every_surrounding(kind):
    stage = ScrubSecrets(kinds=[kind])
    wrong = []
    for around in AROUND_TOKENS:
        for value in SECRETS[kind]:
            found = scrubbed(stage, around.format(value))
            if found != around.format(f"<{kind.upper()}>"):
                wrong.append((around.format(value), found))
            if value in scrubbed(ScrubSecrets(), around.format(value)):
                wrong.append(value)
    assert not wrong


def test_passwords_in_every_surrounding():
    wrong = []
    for around in AROUND_PASSWORDS:
        for value in [*PASSWORDS, "correct horse battery 9"]:
            found = scrubbed(ScrubSecrets(), around.format(value))
            if found != around.format("<ASSIGNED>"):
                wrong.append((around.format(value), found))
    assert not wrong


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DB_PASSWORD=hunter2isgood99", "DB_PASSWORD=<SETTING>"),
        ("A=1\nexport SECRET_KEY=x7Kq9!mZp2\nB=2", "A=1\nexport SECRET_KEY=<SETTING>\nB=2"),
        ("docker run -e DB_PASSWORD=hunter2is99 image", "docker run -e DB_PASSWORD=<SETTING> image"),
        ("api_key: Kx92mQ7vLp31RtYz88", "api_key: <SETTING>"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "aws_secret_access_key = <AWS_SECRET>"),
        ('"SecretAccessKey": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzEXAMPLEKE"', '"SecretAccessKey": "<AWS_SECRET>"'),
        ("AccountName=x;AccountKey=" + A + A + "ab/+12==;End", "AccountName=x;AccountKey=<AZURE_KEY>;End"),
        (f"Authorization: Bearer {A}", "Authorization: Bearer <BEARER>"),
        (f'{{"Authorization": "Bearer {A}"}}', '{"Authorization": "Bearer <BEARER>"}'),
        ("Authorization: Basic dXNlcjpodW50ZXIyaXNnb29kOTk=", "Authorization: Basic <BEARER>"),
        ("postgres://bob:s3cretpw@db:5432/x", "postgres://bob:<URL_PASSWORD>@db:5432/x"),
        ("redis://:s3cretpw@db:6379", "redis://:<URL_PASSWORD>@db:6379"),
        (
            "-----BEGIN PRIVATE KEY----- starts a key.\n\nLong prose.\n-----BEGIN RSA PRIVATE KEY-----\nMI\n"
            "-----END RSA PRIVATE KEY-----",
            "-----BEGIN PRIVATE KEY----- starts a key.\n\nLong prose.\n<PRIVATE_KEY>",
        ),
    ],
)
def test_secrets_of_settings_and_addresses(before, after):
    assert scrubbed(ScrubSecrets(), before) == after
    assert scrubbed(ScrubSecrets(), after) == after


NO_SECRETS = [
    'password: "enter-your-password1"', 'api_key="${API_KEY_1}"', 'secret = "get_secret_v2()"',
    'PASSWORD = "settings.DB_PASSWORD1"', '"secret": "https://x.org/a1b2c3"', 'apiKey: "process.env.KEY1"',
    'api_key = "your-api-key1"', 'password = "{{ vault_pw_12 }}"', 'password = "<put yours 12 here>"',
    '"password": "Must be at least 8 characters"', '"password": "Mindestens 8 Zeichen lang"', 'password = "abc"',
    "sk-learn-is-a-nice-library-that-i-use-often-and-more", "sk-this-is-a-long-css-class-2-name-for-skeleton-loading",
    "hf_transformersIsAReallyLongIdentifierName", "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",
    "http://user:{password}@host", "http://user:$PASS@host", "https://user:password@example.com",
    "http://user:%s@host", "http://host:8080@v2", "http://user:***@host", "http://<user>:<pw1>@host",
    "password = get_password_v2(user)", "password = password_2", "api_key=api_key_from_env_1", "f(password=password1)",
    "DB_PASSWORD=$OTHER_PASSWORD_1", "DB_PASSWORD=", "the password: strong", "token: 12345678", "password == 'x'",
    "bearer authentication_and_authorization", "Bearer ${TOKEN_12345678901234567890}", "npm_config_registry",
    "-----BEGIN PRIVATE KEY-----", "-----BEGIN CERTIFICATE-----\nMIIEabc\n-----END CERTIFICATE-----",
]  # fmt: skip


def test_what_is_no_secret_stays():
    wrong = []
    for around in ("{}", "x {}\n", "({})"):
        for value in NO_SECRETS:
            text = around.format(value)
            if scrubbed(ScrubSecrets(), text) != text:
                wrong.append((text, scrubbed(ScrubSecrets(), text)))
    assert not wrong
