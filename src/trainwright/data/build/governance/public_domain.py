"""Whether a work may be in the public domain, by place and years. A signal, not legal advice.

    US:             published before year - 95
    life + 70:      the author died before year - 70          (EU and most others; life + 50 and + 100 where listed)

Terms end with the calendar year, so a work published in 1929 came free in the US on 1 January 2025. What is not
known, or a place that is not listed, is "unknown": quarantine. Exceptions (works for hire, wars, governments) are not
looked at.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

US_YEARS = 95
# Years after the author's death.
LIFE = {
    **dict.fromkeys(
        (
            "AT", "AU", "BE", "BG", "BR", "CH", "CY", "CZ", "DE", "DK", "EE", "ES", "FI", "FR", "GB", "GR", "HR", "HU",
            "IE", "IL", "IS", "IT", "JP", "KR", "LT", "LU", "LV", "MT", "NL", "NO", "NZ", "PL", "PT", "RO", "RU", "SE",
            "SI", "SK", "TR", "UA", "EU", "CA",
        ),
        70,
    ),
    **dict.fromkeys(("CN", "ZA", "EG", "PK", "NP", "HK"), 50),
    "IN": 60,
    "MX": 100,
}  # fmt: skip


class PublicDomain(NamedTuple):
    signal: Literal["yes", "no", "unknown"]
    reason: str

    def __str__(self) -> str:
        return f"signal: public domain: {self.signal}: {self.reason} (a signal, not legal advice)"


def public_domain(
    jurisdiction: str | None, now: int | None, published: int | None = None, died: int | None = None
) -> PublicDomain:
    """``now``, ``published`` and ``died`` are years. Without a clock (``now`` None) nothing is known.

    Raises ValueError for years that cannot be.
    """
    for key, year in (("published", published), ("died", died)):
        if year is not None and now is not None and year > now:
            raise ValueError(f"{key}={year} lies after the year {now}")
    if now is None:
        return PublicDomain("unknown", "no clock: the year is not known")
    place = (jurisdiction or "").strip().upper()
    if not place:
        return PublicDomain("unknown", "no jurisdiction given")
    if place == "US":
        if published is None:
            return PublicDomain("unknown", "the year of publication is not known")
        free = published < now - US_YEARS
        return PublicDomain("yes" if free else "no", f"published {published}; US: before {now - US_YEARS}")
    if place not in LIFE:
        return PublicDomain("unknown", f"no term is listed for {place}")
    if died is None:
        return PublicDomain("unknown", "the year of the author's death is not known")
    free = died < now - LIFE[place]
    return PublicDomain("yes" if free else "no", f"died {died}; {place}: before {now - LIFE[place]}")
