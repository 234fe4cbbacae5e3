"""Made-up texts with copies whose similarity is known."""

import os
import random

from trainwright.data.build.documents import Document
from trainwright.data.build.stage import DocumentStage

WORDS = [f"{a}{b}{c}" for a in "bcdfglmnprst" for b in ("a", "e", "io", "u") for c in ("n", "rt", "mas", "ling", "sso")]


def text(rng, words=120):
    return " ".join(rng.choices(WORDS, k=words))


def near_copy(original, rng, changes=2):
    """``original`` with some words replaced; each change alters at most 5 of its 5-grams."""
    found = original.split(" ")
    for place in rng.sample(range(len(found)), changes):
        found[place] = f"changed{rng.randrange(10**9)}"
    return " ".join(found)


def shared_sources(originals=100, share=0.3, seed=0, sources="abc", changes=2):
    """Three sources; ``share`` of the documents of each have a near copy in another one. Documents, ids of copies."""
    rng = random.Random(seed)
    documents, copies = [], {}
    for s, source in enumerate(sources):
        for i in range(originals):
            own = text(rng)
            documents.append(Document(own, f"{source}{i}", source))
            if i < share * originals:
                other = sources[(s + 1) % len(sources)]
                copy = Document(near_copy(own, rng, changes), f"{other}-copy-of-{source}{i}", other)
                documents.append(copy)
                copies[copy.id] = f"{source}{i}"
    rng.shuffle(documents)
    return documents, copies


def ids(documents):
    return [d.id for d in documents]


# Stages for worker processes, which must be able to import them.
class Failing(DocumentStage):
    name = "failing"

    def apply(self, document):
        if document.id == "700":
            raise ValueError("document 700")
        return document


class Dying(DocumentStage):
    name = "dying"

    def apply(self, document):
        os._exit(1)
