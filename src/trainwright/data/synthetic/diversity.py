"""How alike two programs are, and the choice of a few that are as unlike as can be."""

from __future__ import annotations

import ast
import hashlib
import io
import itertools
import keyword
import tokenize
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError

Kind = Literal["ast", "token"]


def ast_features(code: str) -> Counter[str] | None:
    """Counts of (parent, child, grandchild) node types, with operators and called names but no other names.

    Two programs that differ in the names of their variables, comments or layout have the same. None: does not parse.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found: Counter[str] = Counter()
    todo: list[tuple[ast.AST, tuple[str, str]]] = [(tree, ("", ""))]
    while todo:
        node, (grand, parent) = todo.pop()
        name = type(node).__name__
        if isinstance(node, ast.Constant):
            name += f":{type(node.value).__name__}"
        elif isinstance(node, ast.Attribute):
            name += f":{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name += f":{node.func.id}"
        if not isinstance(node, ast.expr_context):
            found[f"{parent} {name}"] += 1
            found[f"{grand} {parent} {name}"] += 1
            todo += [(child, (parent, name)) for child in ast.iter_child_nodes(node)]
    return found


def token_features(code: str) -> Counter[str]:
    """Counts of pairs of tokens in a row; names that are no keywords stand as they are, comments are left out."""
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}
    words: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type not in skip:
                words.append(token.string if token.string.strip() else tokenize.tok_name[token.type])
    except (tokenize.TokenError, SyntaxError, IndentationError):
        words = code.split()
    marked = [f"kw:{w}" if keyword.iskeyword(w) else w for w in words]
    return Counter(f"{a} {b}" for a, b in itertools.pairwise(marked))


def similarity(one: str, other: str, kind: Kind = "ast") -> float:
    """Weighted Jaccard similarity of the features: 1 for the same, 0 for nothing in common."""
    return float(similarities([one, other], kind)[0, 1])


def similarities(programs: Sequence[str], kind: Kind = "ast") -> NDArray[np.float64]:
    """[N, N]. By syntax trees, or by tokens; by tokens too where one of the programs does not parse."""
    if kind not in ("ast", "token"):
        raise ConfigError("should be ast or token", key="diversity", value=kind)
    features = [ast_features(p) for p in programs] if kind == "ast" else []
    if kind == "token" or any(f is None for f in features):
        features = [token_features(p) for p in programs]
    out = np.eye(len(programs))
    for i, a in enumerate(features):
        for j in range(i):
            b = features[j]
            assert a is not None and b is not None
            union = (a | b).total()
            out[i, j] = out[j, i] = (a & b).total() / union if union else 1.0
    return out


def choose_diverse(programs: Sequence[str], most: int, kind: Kind = "ast") -> list[int]:
    """Positions of ``most`` programs by greedy max-min: the two least alike, then always the one whose closest
    neighbour among the chosen is farthest. The same set for any order of the programs.
    """
    if most < 1:
        raise ConfigError("should be at least 1", key="keep_each", value=most)
    if len(programs) <= most:
        return list(range(len(programs)))
    rank = sorted(range(len(programs)), key=lambda i: (hashlib.sha256(programs[i].encode()).digest(), i))
    if most == 1:
        return [rank[0]]
    alike = similarities([programs[i] for i in rank], kind)
    first, second = np.unravel_index(np.argmin(alike + np.eye(len(rank)) * 2), alike.shape)
    chosen = [int(first), int(second)]
    while len(chosen) < most:
        nearest = alike[:, chosen].max(1)
        nearest[chosen] = np.inf
        chosen.append(int(nearest.argmin()))
    return sorted(rank[i] for i in chosen)
