"""Made-up personal data that look real and can be nobody's: from ranges that are kept free for examples.

Equal values get equal fakes, so that a text stays consistent, and a fake is left alone when it is met again.

    email  example.org, .com, .net (RFC 2606)         phone  +1 area 555 01nn (the range for fiction)
    card   4000 0000 00.. with a right check digit    iban   GB.. TEST .. with right check digits
    ssn    987-65-432n (never given out)              ip     192.0.2.n and the like, 2001:db8:: (RFC 5737, 3849)
"""

from __future__ import annotations

import random
import re

import xxhash

_NAMES = (
    "alex", "anna", "ben", "chris", "dana", "elena", "finn", "grace", "hana", "ivan", "jo", "kim", "lee", "maria",
    "nick",     "olga", "paul", "quinn", "rosa", "sam", "tara", "uma", "vera", "will", "yuki", "zoe",
)  # fmt: skip
_FAMILIES = (
    "adams", "baker", "chen", "diaz", "evans", "fischer", "garcia", "hill", "ito", "jones", "khan", "lopez", "meyer",
    "novak", "okafor", "patel", "rossi", "smith", "tanaka", "weber", "young",
)  # fmt: skip
_FAKE = {
    "email": re.compile(r".+@example\.(?:org|com|net)", re.I),
    "phone": re.compile(r".*\b555[ .\-]?01\d\d"),
    "card": re.compile(r"4000[ -]?0000[ -]?00\d\d[ -]?\d{4}"),
    "iban": re.compile(r"GB\d\d ?TEST.*"),
    "ssn": re.compile(r"987-65-432\d"),
    "ip": re.compile(r"(?:192\.0\.2|198\.51\.100|203\.0\.113)\.\d+|2001:db8:.*", re.I),
}


def is_fake(kind: str, value: str) -> bool:
    return kind in _FAKE and _FAKE[kind].fullmatch(value) is not None


def fake(kind: str, value: str, seed: int = 0) -> str:
    """What stands in for ``value``; depends on it and the seed alone, and keeps its grouping where there is one."""
    plain = re.sub(r"[\s.\-/()]", "", value).lower() if kind not in ("email", "ip") else value.lower()
    rng = random.Random(xxhash.xxh3_64_intdigest(f"{kind}\0{plain}".encode("utf-8", "surrogatepass"), seed=seed))
    if kind == "email":
        name = f"{rng.choice(_NAMES)}.{rng.choice(_FAMILIES)}{rng.randrange(1000)}"
        return f"{name}@example.{rng.choice(('org', 'com', 'net'))}"
    if kind == "phone":
        area, number = rng.randrange(201, 990), rng.randrange(100, 200)
        lead = "+1 " if value.lstrip().startswith("+") else ""
        return f"{lead}({area}) 555-0{number}" if "(" in value else f"{lead}{area}-555-0{number}"
    if kind == "card":
        digits = f"4000000000{rng.randrange(10**5):05d}"
        digits += _check_digit(digits)
        mark = next((c for c in value if c in " -"), "")
        return mark.join(digits[i : i + 4] for i in range(0, 16, 4))
    if kind == "iban":
        account = f"{rng.randrange(10**14):014d}"
        number = int("".join(str(int(c, 36)) for c in f"TEST{account}GB00"))
        code = f"GB{98 - number % 97:02d}TEST{account}"
        return " ".join(code[i : i + 4] for i in range(0, len(code), 4)) if " " in value else code
    if kind == "ssn":
        return f"987-65-432{rng.randrange(10)}"
    if kind == "ip":
        if ":" in value:
            return f"2001:db8::{rng.randrange(1, 65536):x}"
        return f"{rng.choice(('192.0.2', '198.51.100', '203.0.113'))}.{rng.randrange(1, 255)}"
    raise KeyError(kind)


def _check_digit(digits: str) -> str:
    total = 0
    for i, d in enumerate(reversed(digits)):
        value = int(d) * (2 - i % 2)
        total += value - 9 if value > 9 else value
    return str(-total % 10)
