"""Two clearly different real sources that every Python brings along: its reference's prose and its modules' code."""

import ast
import random
import sysconfig
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from trainwright.data.build.documents import Document


def pieces(text, size):
    return [p for i in range(0, len(text), size) if len(p := text[i : i + size]) > size // 2]


@cache
def prose(size=600):
    return [p for name in sorted(topics) for p in pieces(topics[name], size)]


@cache
def code(size=600, modules=40):
    """Code alone: without docstrings, which are prose."""
    out = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:modules]:
        out += pieces(ast.unparse(ast.parse(path.read_text("utf-8"))), size)
    return out


@cache
def two_sources(count=300, seed=0):
    """Training texts and labels, test texts and labels; ``count`` of each source, half of them for the test."""
    rng = random.Random(seed)
    good, bad = rng.sample(prose(), count), rng.sample(code(), count)
    half = count // 2
    return (
        good[:half] + bad[:half], ["positive"] * half + ["negative"] * half,
        good[half:] + bad[half:], [True] * half + [False] * half,
    )  # fmt: skip


def documents(texts, source, start=0):
    return [Document(t, f"{source}{i}", source) for i, t in enumerate(texts, start)]
