"""Small zh/en instruction data for panda_stage1.yaml and panda_stage2.yaml, made from packages on this machine.

    pip install --no-deps chatterbot-corpus==1.3.3      # BSD; questions and answers in 28 languages
    python recipes/panda_data.py data/panda

documents.jsonl   text     modules of Python's standard library
docstrings.jsonl  pairs    name of a function of it, and the first line of its docstring
en.jsonl, zh.jsonl  pairs  questions and answers of the corpus (left out where it is not installed)
chats.json        dialogues of the corpus with more than one turn: an array of turns each, as COIG has them
choices.jsonl     questions with four options, made of a tenth of the pairs, which are not in the other files
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sys
import sysconfig
from pathlib import Path

import yaml

Pair = tuple[str, str]


def docstrings(limit: int = 1500) -> list[Pair]:
    out = []
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                text = (ast.get_docstring(node) or "").split("\n")[0].strip()
                if 20 <= len(text) <= 100:
                    out.append((f"What does {path.stem}.{node.name} do?", text))
    return out[:limit]


def documents(limit: int = 400, most: int = 4000) -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.glob("**/*.py") if "site-packages" not in p.parts and "test" not in p.parts)
    out = []
    for path in random.Random(0).sample(paths, min(limit, len(paths))):
        try:
            text = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            continue
        if text:
            out.append(text[:most])
    return out


def corpus(language: str) -> tuple[list[Pair], list[list[dict[str, str]]]]:
    """Pairs and dialogues; none where the package is not installed."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    pairs: list[Pair] = []
    talks: list[list[dict[str, str]]] = []
    if spec is None or not spec.submodule_search_locations:
        return pairs, talks
    for path in sorted(Path(spec.submodule_search_locations[0], "data", language).glob("*.yml")):
        for talk in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            turns = [str(t).strip() for t in talk if t is not None and str(t).strip()]
            if len(turns) == 2:
                pairs.append((turns[0], turns[1]))
            elif len(turns) > 3:
                ends = range(0, len(turns) - 1, 2)
                talks.append([{"inputs": turns[i], "targets": turns[i + 1]} for i in ends])
    return pairs, talks


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    choices: list[dict[str, object]] = []

    def write(name: str, rows: list[object]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}: {len(rows)} rows")

    def pairs(name: str, found: list[Pair]) -> None:
        found = sorted(set(found))
        rng.shuffle(found)
        held, kept = found[: len(found) // 10], found[len(found) // 10 :]
        for prompt, answer in held:
            wrong = rng.sample(sorted({a for _, a in found} - {answer}), 3)
            place = rng.randrange(4)
            choices.append({"prompt": prompt, "options": [*wrong[:place], answer, *wrong[place:]], "answer": place})
        write(name, [{"inputs": p, "targets": a} for p, a in kept])

    write("documents.jsonl", [{"text": t} for t in documents()])
    pairs("docstrings.jsonl", docstrings())
    english, talks = corpus("english")
    chinese, more = corpus("chinese")
    if english:
        pairs("en.jsonl", english)
        pairs("zh.jsonl", chinese)
        (folder / "chats.json").write_text(json.dumps(talks + more, ensure_ascii=False), encoding="utf-8")
        print(f"{folder / 'chats.json'}: {len(talks + more)} dialogues")
    else:
        print("chatterbot-corpus is not installed, so there is no en.jsonl, zh.jsonl and chats.json")
    write("choices.jsonl", list(choices))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/panda"))
