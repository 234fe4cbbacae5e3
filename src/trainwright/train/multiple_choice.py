"""Multiple choice without generation: the option that the model finds likeliest is its answer.

    score(o) = log P(separator + o | prompt), as it is, by UTF-8 bytes, or by tokens

Prompt and option are tokenized as one text (data/chat/joint.py), so options are scored by the ids that training on the
pair would have seen. Long options have lower sums; scores by bytes take that out (lm-evaluation-harness' acc_norm).
Panda LLM (arXiv:2305.03025) evaluates LogiQA-v2 and C3 this way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import DataError
from trainwright.data.chat.joint import encode_joint
from trainwright.data.tokenizers.base import Tokenizer
from trainwright.models.base import LanguageModel
from trainwright.models.scoring import continuation_logprobs

Normalise = Literal["sum", "bytes", "tokens"]


@dataclass(frozen=True)
class Question:
    """A prompt, its options and the number of the right one."""

    prompt: str
    options: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if len(self.options) < 2:
            raise DataError(f"a question has {len(self.options)} options; it needs at least 2")
        if not all(o.strip() for o in self.options):
            raise DataError("an option is empty")
        if not 0 <= self.answer < len(self.options):
            raise DataError(f"answer={self.answer} is none of the {len(self.options)} options (they count from 0)")


def option_scores(
    model: LanguageModel,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    separator: str = " ",
    normalise: Normalise = "sum",
    batch_size: int = 8,
) -> list[list[float]]:
    """The score of every option of every question. The model should be in eval mode."""
    begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    pairs: list[tuple[list[int], list[int]]] = []
    for question in questions:
        for option in question.options:
            ids, inside, _ = encode_joint(tokenizer, question.prompt, separator + option)
            # A model without BOS has EOS before every document.
            context = [begin, *ids[:inside]] if tokenizer.bos_id is not None or not inside else ids[:inside]
            pairs.append((context, ids[inside:]))
    scores = iter(zip(continuation_logprobs(model, pairs, tokenizer.pad_id, batch_size), pairs, strict=True))
    out = []
    for question in questions:
        row = []
        for option in question.options:
            (logprob, _), (_, continuation) = next(scores)
            size = {"sum": 1, "bytes": len(option.encode()), "tokens": max(len(continuation), 1)}[normalise]
            row.append(logprob / size)
        out.append(row)
    return out


def multiple_choice(
    model: LanguageModel, tokenizer: Tokenizer, questions: Sequence[Question], **settings: Any
) -> dict[str, float]:
    """``accuracy``, ``chance`` (of guessing) and ``questions``; settings as for :func:`option_scores`."""
    if not questions:
        raise DataError("there is no question to answer")
    scores = option_scores(model, tokenizer, questions, **settings)
    right = sum(max(range(len(s)), key=s.__getitem__) == q.answer for s, q in zip(scores, questions, strict=True))
    chance = sum(1 / len(q.options) for q in questions)
    n = len(questions)
    return {"accuracy": right / n, "chance": chance / n, "questions": float(n)}


def read_questions(path: Path | str) -> list[Question]:
    """Questions of a JSON Lines file: ``prompt`` (or ``question``), ``options`` (or ``choices``), ``answer`` as a
    number from 0, a letter from A, or the option itself. Raises DataError that names the line."""
    out = []
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                out.append(question_of(json.loads(line)))
            except (ValueError, DataError) as error:
                raise DataError(f"{path}:{number}: {error}") from None
    return out


def question_of(row: Any) -> Question:
    if not isinstance(row, dict):
        raise DataError(f"expected an object, got {type(row).__name__}")
    prompt = row.get("prompt", row.get("question"))
    options = row.get("options", row.get("choices"))
    answer = row.get("answer", row.get("label"))
    if not isinstance(prompt, str) or not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise DataError("needs a prompt, a list of options and an answer")
    if isinstance(answer, str):
        letter = "ABCDEFGHIJ".find(answer.strip().upper()) if len(answer.strip()) == 1 else -1
        answer = options.index(answer) if answer in options else letter
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise DataError(f"answer should be a number, a letter or an option, got {answer!r}")
    return Question(prompt, tuple(options), answer)


def from_pairs(pairs: Iterable[tuple[str, str]], options: int = 4, seed: int = 0) -> list[Question]:
    """Questions from prompts and answers: the wrong options are other prompts' answers, drawn by ``seed``."""
    import random

    kept = list(pairs)
    answers = sorted({a for _, a in kept})
    if len(answers) < options:
        raise DataError(f"{len(answers)} different answers are too few for questions of {options} options")
    rng = random.Random(seed)
    out = []
    for prompt, answer in kept:
        wrong = rng.sample([a for a in answers if a != answer], options - 1)
        place = rng.randrange(options)
        out.append(Question(prompt, (*wrong[:place], answer, *wrong[place:]), place))
    return out
