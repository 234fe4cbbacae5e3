"""Writes the methods page from the registry each time the site is built, so that it cannot fall behind."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    return markdown.replace("<!-- methods -->", methods_table()) if page.file.src_path == "methods.md" else markdown


def methods_table() -> str:
    from trainwright.core.registry import SLOTS, methods

    out = []
    for slot in SLOTS:
        rows = methods(slot)
        if not rows:
            continue
        out.append(f"## {slot}\n")
        for m in rows:
            paper = f" ({m.paper})" if m.paper else ""
            out.append(f"### `{m.name}`{paper}\n\n{m.summary}\n")
            fields = [(n, f) for n, f in m.config.model_fields.items() if n != "name"]
            if fields:
                out.append("| key | default | what it is |\n|---|---|---|")
                for name, info in fields:
                    default = "required" if info.is_required() else f"`{info.get_default(call_default_factory=True)!r}`"
                    out.append(f"| `{name}` | {default} | {(info.description or '').replace('|', chr(92) + '|')} |")
                out.append("")
    return "\n".join(out)
