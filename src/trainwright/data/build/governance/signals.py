"""What a site says of use for training, as it stood when a page was fetched. A signal, not legal advice.

robots.txt for the crawlers of model makers (package protego, extra ``data``: longest match, RFC 9309), ai.txt, the
TDM reservation protocol (header ``tdm-reservation``, meta tag, /.well-known/tdmrep.json) and noai / noimageai.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from urllib.parse import urlsplit

from trainwright.data.sources._files import need

# Who fetches pages for training; a site that shuts one of them out says something to all.
AGENTS = ("GPTBot", "CCBot", "Google-Extended", "ClaudeBot", "anthropic-ai", "Bytespider", "Applebot-Extended",
          "Meta-ExternalAgent", "cohere-ai", "Amazonbot", "PerplexityBot")  # fmt: skip


def may_fetch(robots: str, url: str, agent: str) -> bool:
    """Whether robots.txt lets ``agent`` fetch ``url``: the group that names it, in it the longest rule that matches,
    of equally long ones the one that allows."""
    try:
        from protego import Protego
    except ModuleNotFoundError:
        raise need("protego", "data") from None
    return bool(Protego.parse(robots).can_fetch(url, agent))


def opt_out_signals(
    url: str,
    *,
    robots: str | None = None,
    ai_txt: str | None = None,
    headers: Mapping[str, str] | None = None,
    html: str | None = None,
    tdmrep: str | None = None,
    agents: Iterable[str] = AGENTS,
) -> list[str]:
    """Signals against use, such as ``robots.txt: GPTBot``; empty where none was found. What is None was not fetched."""
    found: list[str] = []
    if robots is not None:
        found += [f"robots.txt: {agent}" for agent in agents if not may_fetch(robots, url, agent)]
    if ai_txt is not None:
        found += [f"ai.txt: {agent}" for agent in ("*",) if not may_fetch(_only_robots_lines(ai_txt), url, agent)]
    for name, value in (headers or {}).items():
        found += _of_pair(name, value, "header")
    if html is not None:
        reader = _Metas()
        reader.feed(html)
        for name, value in reader.found:
            found += _of_pair(name, value, "meta")
    if tdmrep is not None:
        found += _of_tdmrep(tdmrep, urlsplit(url).path or "/")
    return list(dict.fromkeys(found))


def _only_robots_lines(text: str) -> str:
    """ai.txt writes robots' rules, some files with other lines between; one without a group speaks to all."""
    lines = [x for x in text.splitlines() if re.match(r"\s*(user-agent|allow|disallow)\s*:", x, re.I)]
    if not any(re.match(r"\s*user-agent", x, re.I) for x in lines):
        lines.insert(0, "User-agent: *")
    return "\n".join(lines)


def _of_pair(name: str, value: str, where: str) -> list[str]:
    name, value = name.strip().lower(), value.strip().lower()
    if name == "tdm-reservation" and value == "1":
        return [f"{where}: tdm-reservation"]
    if name in ("robots", "x-robots-tag", "googlebot", "ai"):
        words = {w.strip() for w in re.split(r"[,:;\s]+", value)}
        return [f"{where}: {w}" for w in ("noai", "noimageai") if w in words]
    return []


class _Metas(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name") or given.get("http-equiv")
        if tag == "meta" and name:
            self.found.append((name, given.get("content") or ""))


def _of_tdmrep(text: str, path: str) -> list[str]:
    try:
        rules = json.loads(text)
    except ValueError:
        return ["tdmrep.json: cannot be read"]
    for rule in rules if isinstance(rules, list) else []:
        if not isinstance(rule, dict):
            continue
        pattern = re.escape(str(rule.get("location", "/"))).replace(r"\*", ".*").replace(r"\$", "$")
        if re.match(pattern, path):
            return ["tdmrep.json: tdm-reservation"] if str(rule.get("tdm-reservation")) == "1" else []
    return []


def site(url: str | None) -> str:
    """Host of a URL, lower case, without www."""
    return (urlsplit(url or "").hostname or "").lower().removeprefix("www.")
