"""Synthetic textbooks: every seed text x style x audience becomes a prompt, and a generator writes a document.

The generator is any callable from prompt to text, behind the same cache as the judge: a killed run generates nothing
twice. Each document's provenance holds the seed's id, the template's id, style, audience, and what generated it.

Paper: OpenCSG Chinese Corpus, arXiv:2501.08197 (Cosmopedia-chinese; its authors name too alike texts and too much
markdown as faults: the stage ``diversity`` reports both).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.judge import CachedCaller

STYLES: Mapping[str, str] = {
    "textbook": "a section of a textbook that introduces its terms, explains them in order and ends with two exercises",
    "story": "a story in which somebody comes to understand the matter, with dialogue and no lecture",
    "tutorial": "a practical tutorial, step by step, with the reason for each step",
    "blog": "a blog post in a personal tone that makes one clear point",
    "lecture": "the transcript of a lecture, as it is spoken",
}
AUDIENCES: Mapping[str, str] = {
    "children": "children of primary school, in short sentences and with everyday examples",
    "pupils": "pupils of secondary school",
    "students": "university students of the subject, with exact terms",
    "public": "adults who are curious and have no training in it",
}
TEMPLATE = """\
Below is an excerpt from a text. Write {style} about its subject, for {audience}.
Do not mention the excerpt and do not copy its sentences; take facts from it only where they are right. Write running
text; use headings or lists only where they are needed.

Excerpt:
{seed}
"""
TEMPLATE_ZH = """\
下面是一段文本的摘录。请围绕它的主题，写{style}，读者是{audience}。
不要提到摘录，也不要照抄其中的句子；只采用其中正确的事实。请写成连贯的文章，只在必要时使用标题或列表。

摘录：
{seed}
"""
STYLES_ZH: Mapping[str, str] = {
    "textbook": "教科书的一节，依次引入并讲解概念，最后给出两道练习",
    "story": "一个故事，人物在情节中逐渐理解这一内容，有对话，不说教",
    "tutorial": "一篇循序渐进的实用教程，并说明每一步的理由",
    "blog": "一篇语气亲切、观点鲜明的博客文章",
    "lecture": "一段课堂讲授的文字记录，保持口语",
}
AUDIENCES_ZH: Mapping[str, str] = {
    "children": "小学生，句子短，例子贴近生活",
    "pupils": "中学生",
    "students": "本专业的大学生，用语准确",
    "public": "没有专业基础但好奇的成年人",
}


@dataclass
class TextbookRecipe:
    """What is written about each seed: every style for every audience, or ``per_seed`` pairs of them in turn.

    template     with {style}, {audience} and {seed}; ``template_id`` names it in the provenance
    characters   of a longer seed the first ones are shown
    least        shorter answers are dropped, in characters
    """

    template: str = TEMPLATE
    template_id: str = "textbook-en-1"
    styles: Mapping[str, str] = field(default_factory=lambda: STYLES)
    audiences: Mapping[str, str] = field(default_factory=lambda: AUDIENCES)
    per_seed: int | None = None
    characters: int = 1500
    least: int = 200

    def __post_init__(self) -> None:
        for place in ("{style}", "{audience}", "{seed}"):
            if place not in self.template:
                raise ConfigError(f"has no place {place}", key="template")
        if not self.template_id:
            raise ConfigError("is empty; it names the template in each document's provenance", key="template_id")
        if not self.styles or not self.audiences:
            raise ConfigError("is empty", key="styles" if not self.styles else "audiences")
        pairs = len(self.styles) * len(self.audiences)
        if self.per_seed is not None and not 1 <= self.per_seed <= pairs:
            raise ConfigError(f"should be in 1..{pairs}", key="per_seed", value=self.per_seed)

    @classmethod
    def chinese(cls, **settings: Any) -> TextbookRecipe:
        return cls(
            TEMPLATE_ZH, "textbook-zh-1", STYLES_ZH, AUDIENCES_ZH, **settings
        )  # fmt: skip

    def pairs(self, number: int) -> list[tuple[str, str]]:
        """Style and audience for the seed of this number; with ``per_seed`` all pairs come up equally often."""
        every = [(s, a) for s in self.styles for a in self.audiences]
        if self.per_seed is None:
            return every
        first = number * self.per_seed
        return [every[(first + i) % len(every)] for i in range(self.per_seed)]

    def prompt(self, seed: str, style: str, audience: str) -> str:
        out = self.template.replace("{style}", self.styles[style]).replace("{audience}", self.audiences[audience])
        return out.replace("{seed}", seed[: self.characters])


def textbooks(
    seeds: Iterable[Document], generator: CachedCaller, recipe: TextbookRecipe | None = None
) -> Iterator[Document]:
    """The documents, one after the other, source ``textbooks``; deduplicate them as any others."""
    recipe = recipe or TextbookRecipe()
    for number, seed in enumerate(seeds):
        for style, audience in recipe.pairs(number):
            text = generator(recipe.prompt(seed.text, style, audience)).strip()
            if len(text) < recipe.least:
                continue
            yield synthetic(
                text, f"{seed.id}/{style}/{audience}", "textbooks", seed, recipe.template_id, generator,
                style=style, audience=audience,
            )  # fmt: skip


def synthetic(
    text: str, id: str, source: str, seed: Document | str, template_id: str, generator: CachedCaller, **details: Any
) -> Document:
    """A document that says in its provenance what it was made from and by what."""
    seed_id = seed if isinstance(seed, str) else seed.id
    step: dict[str, Any] = {
        "step": source, "seed_id": seed_id, "template_id": template_id, "generator": generator.model,
        "params": generator.params, **details,
    }  # fmt: skip
    licence = None if isinstance(seed, str) else seed.licence
    before: Sequence[dict[str, Any]] = () if isinstance(seed, str) else seed.provenance
    return Document(text, id, source, licence=licence, provenance=[*before, step])
