"""Whether a teacher's ids mean what the student's mean."""

from __future__ import annotations

from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.tokenizers.base import Tokenizer


def vocabulary(tokenizer: Tokenizer) -> dict[str, int] | None:
    """Token -> id, special ones included; None where the tokenizer does not say."""
    inner: Any = tokenizer
    if hasattr(inner, "_as_fast"):
        inner = inner._as_fast()
    backend = getattr(inner, "backend", None)
    if backend is not None:
        return dict(backend.get_vocab(with_added_tokens=True))
    slow = getattr(inner, "_tokenizer", None)
    return dict(slow.get_vocab()) if slow is not None else None


def check_same_vocabulary(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raises ConfigError where an id stands for another token in the two, naming one."""
    if student.fingerprint() == teacher.fingerprint():
        return
    ours, theirs = vocabulary(student), vocabulary(teacher)
    way_out = "train the student with the teacher's tokenizer (tokenizer: {name: hf, path: TEACHER/tokenizer})"
    if ours is None or theirs is None:
        raise ConfigError(
            f"has another tokenizer than the run, of which no vocabulary can be read; {way_out}", key="teacher"
        )
    if ours != theirs:
        other = sorted(i for t, i in ours.items() if theirs.get(t) != i) or sorted(set(theirs.values()))
        names = {i: t for t, i in ours.items()}
        theirs_by_id = {i: t for t, i in theirs.items()}
        first = other[0]
        raise ConfigError(
            f"has another vocabulary than the run ({len(theirs)} and {len(ours)} tokens; id {first} is "
            f"{theirs_by_id.get(first)!r} there and {names.get(first)!r} here); {way_out}",
            key="teacher",
        )
    if student.eos_id != teacher.eos_id:
        raise ConfigError(
            f"ends documents by id {teacher.eos_id}, the run by {student.eos_id}; {way_out}", key="teacher"
        )
