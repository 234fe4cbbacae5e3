"""Literal inputs: guesses for functions without any, and mutations that keep the type of each part."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from trainwright.core.errors import DataError
from trainwright.data.synthetic.pyx.tracer import parse_call

LARGEST = 64  # items of a mutated collection, characters of a mutated text
_LETTERS = "abcdefghijklmnopqrstuvwxyz ABC0123.,-"
# What functions in the wild take, the more usual first.
GUESSES: tuple[Any, ...] = (
    3, "abc", [3, 1, 2], "a,b c", 10, ["ab", "c", "ba"], {"a": 1, "b": 2}, 2.5, (1, 2), True, 0, "", [[1, 2], [3, 4]],
    "Hello World", b"ab", [], {1, 2, 3}, None,
)  # fmt: skip


def spell(function: str, arguments: Sequence[Any]) -> str:
    """``f(1, [2])``. Raises DataError for arguments that cannot be written out."""
    call = f"{function}({', '.join(map(repr, arguments))})"
    parse_call(call)
    return call


def mutate(value: Any, rng: random.Random, depth: int = 3) -> Any:
    """Another value of the same type; parts of collections keep their types as well.

    Raises DataError for what is no literal.
    """
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, -value, value * 2, value // 2, rng.randint(-10, 10), 0, 1])
    if isinstance(value, float):
        return rng.choice([value + 1.0, -value, value * 2.0, value / 2.0, 0.0, float(rng.randint(-10, 10))])
    if isinstance(value, str):
        return _text(value, rng)
    if isinstance(value, bytes):
        return _text(value.decode("latin-1"), rng).encode("latin-1")
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return type(value)(_items(list(value), rng, depth))
    if isinstance(value, set | frozenset):
        return type(value)(_items(sorted(value, key=repr), rng, depth))
    if isinstance(value, dict):
        keys, values = list(value), list(value.values())
        if not keys:
            return {}
        i = rng.randrange(len(keys))
        if rng.random() < 0.3:
            keys[i] = mutate(keys[i], rng, depth - 1)
        elif rng.random() < 0.3:
            del keys[i], values[i]
        elif depth > 0:
            values[i] = mutate(values[i], rng, depth - 1)
        return dict(zip(keys, values, strict=True))
    raise DataError(f"{type(value).__name__} is no literal type")


def _text(text: str, rng: random.Random) -> str:
    kind = rng.randrange(6)
    at = rng.randint(0, len(text))
    if kind == 0 or not text:
        out = text[:at] + rng.choice(_LETTERS) + text[at:]
    elif kind == 1:
        out = text[:at] + text[at + 1 :]
    elif kind == 2:
        out = text[at:] + text[:at]
    elif kind == 3:
        out = text.swapcase()
    elif kind == 4:
        out = text + text[: max(1, len(text) // 2)]
    else:
        out = text[::-1]
    return out[:LARGEST]


def _items(items: list[Any], rng: random.Random, depth: int) -> list[Any]:
    if not items:
        return items  # of nothing the type of an item is not known
    kind = rng.randrange(6)
    at = rng.randrange(len(items))
    if kind == 0 and depth > 0:
        items.insert(at, mutate(rng.choice(items), rng, depth - 1))
    elif kind == 1:
        del items[at]
    elif kind == 2:
        rng.shuffle(items)
    elif kind == 3:
        items.reverse()
    elif kind == 4:
        items.append(items[at])
    elif depth > 0:
        items[at] = mutate(items[at], rng, depth - 1)
    return items[:LARGEST]


def mutations(call: str, count: int, seed: int = 0) -> list[str]:
    """Up to ``count`` further calls with arguments mutated once or more, all different and not ``call`` itself.

    Raises DataError for arguments that are no literals.
    """
    function, arguments = parse_call(call)
    rng = random.Random(f"{seed}/{call}")
    found: dict[str, None] = {}
    pool = [arguments]
    for _ in range(20 * count):
        if len(found) >= count or not arguments:
            break
        new = list(rng.choice(pool))
        i = rng.randrange(len(new))
        new[i] = mutate(new[i], rng)
        spelled = spell(function, new)
        if spelled != call and spelled not in found:
            found[spelled] = None
            pool.append(new)
    return list(found)


def guesses(function: str, parameters: int, most: int = 24, seed: int = 0) -> Iterator[str]:
    """Calls with arguments of the usual types, for a function of which nothing is known."""
    rng = random.Random(f"{seed}/{function}/{parameters}")
    if parameters == 1:
        for guess in GUESSES[:most]:
            yield spell(function, [guess])
        return
    found: set[str] = set()
    for guess in GUESSES[: most // 3]:
        found.add(spell(function, [guess] * parameters))
    while len(found) < most:
        found.add(spell(function, [rng.choice(GUESSES[:12]) for _ in range(parameters)]))
    yield from sorted(found)
