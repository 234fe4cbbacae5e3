"""Conversations to token ids and loss weights: exactly what the assistant writes is trained on.

A template says that by ``{% generation %}`` marks. For one without marks it is what the text gains over the text of
the messages before the answer with the generation prompt:

    answer i = render(messages[: i + 1]) - render(messages[:i], add_generation_prompt)

which needs a template that is prefix-stable: each of these texts begins with the one before it. One that is not (it
takes the thoughts out of earlier turns, say) is refused, for there is no telling what the model would have seen; with
the last answer alone as target it often is.

Ids are those of the whole text where no token reaches over the beginning or the end of an answer, else the text is
encoded apart there, as it is in use: the model is given the prompt's ids and makes the answer's.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from trainwright.core.errors import DataError, ModelError
from trainwright.data.chat.conversation import Conversation, Example, Preference, TextPair
from trainwright.data.chat.ids import Encoder, make_encoder
from trainwright.data.chat.template import DATE, ChatTemplate, Span
from trainwright.data.chat.tools import check_written
from trainwright.data.tokenizers.base import Tokenizer

TrainOn = Literal["all", "last"]
TooLong = Literal["drop", "truncate_left", "truncate_right"]


class UnstableTemplate(DataError):
    """The template has no marks and its texts do not extend each other."""


@dataclass
class Encoded:
    """Ids int32 ``[n]`` and the loss weight float32 ``[n]`` of each as a target."""

    ids: np.ndarray
    weights: np.ndarray
    spells_special: bool = False  # a message spells a special token; it is text all the same
    crossing: bool = False  # a token holds the end of the prompt and the beginning of the target
    notes: tuple[str, ...] = ()  # counts of a report that it belongs to (empty_answer, ...)

    @property
    def trained(self) -> int:
        """Targets of weight above 0. The first token of a document is never one."""
        return int(np.count_nonzero(self.weights[1:]))


class Masker:
    """Examples to :class:`Encoded`, for one tokenizer.

    train_on           all: every answer; last: the last one of each conversation
    train_end_of_turn  see to it that the model learns to stop: the token that the template puts right behind an answer
                       is trained on though its marks leave it out, and EOS is put behind the last answer where the
                       template ends it with no special token
    date               the day that it is to a template which writes the date
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        train_on: TrainOn = "all",
        train_end_of_turn: bool = True,
        date: dt.date = DATE,
    ):
        self.tokenizer, self.train_on, self.train_end_of_turn, self.date = tokenizer, train_on, train_end_of_turn, date
        self._template: ChatTemplate | None = None
        self._plain: Encoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_template": None, "_plain": None}  # made where it arrives

    @property
    def plain(self) -> Encoder:
        """For text without special tokens."""
        if self._plain is None:
            self._plain = make_encoder(self.tokenizer, {})
        return self._plain

    @property
    def date_written(self) -> str | None:
        """The date that conversations bear, if the template asks what day it is."""
        return str(self.date) if "strftime_now" in (self.tokenizer.chat_template or "") else None

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            if not self.tokenizer.chat_template:
                raise ModelError(
                    "the tokenizer has no chat template, which these conversations need; set tokenizer.chat_template, "
                    "or give rows of prompt and completion as plain text"
                )
            self._template = ChatTemplate(self.tokenizer, self.date)
            if self._template.mute:
                raise ModelError(
                    "the chat template leaves out what is said (it may be made for lists of parts, as those of models "
                    "with images are); set tokenizer.chat_template to one that takes text"
                )
        return self._template

    def __call__(self, example: Example) -> Encoded:
        """Raises DataError for an example that the template refuses or that has no answer to train on,
        :class:`UnstableTemplate`, and ModelError where there is no template."""
        if isinstance(example, Preference):
            encoded = self(example.chosen)
            return replace(encoded, notes=(*example.notes, *encoded.notes))
        return self._pair(example) if isinstance(example, TextPair) else self._conversation(example)

    def _pair(self, pair: TextPair) -> Encoded:
        bos = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        ids, (start,), _ = self.plain.encode(pair.prompt + pair.completion, cuts=[len(pair.prompt)])
        weights = [0.0] * (len(bos) + start) + [1.0] * (len(ids) - start + 1)
        return _encoded([*bos, *ids, self.tokenizer.eos_id], weights)

    def _conversation(self, talk: Conversation) -> Encoded:
        template = self.template
        try:
            text, spans, factors = self._marked(talk) if template.marks else self._derived(talk)
        except ModelError as error:
            raise DataError(str(error)) from None
        written = check_written(talk, template, text)
        asked = [i for i in (talk.answers[-1:] if self.train_on == "last" else talk.answers) if talk.weights[i]]
        # With a stretch for every answer the empty ones have theirs: the end of the turn.
        each = len(spans) == len(talk.answers if template.marks and self.train_on == "all" else asked)
        trained_empty = each and any(talk.is_empty(i) for i in asked)
        # What is not trained on is context, and read whole.
        spans, factors = [s for s, f in zip(spans, factors, strict=True) if f], [f for f in factors if f]
        cuts = sorted({c for span in spans for c in span})
        ids, places, within = template.cut(text, cuts)
        place = dict(zip(cuts, places, strict=True))
        weights = [0.0] * len(ids)
        for (start, stop), factor in zip(spans, factors, strict=True):
            first, last = place[start], place[stop]
            if self.train_end_of_turn and template.marks:
                for token in template.ending:
                    if ids[last : last + 1] != [token]:
                        break
                    last += 1
            weights[first:last] = [factor] * (last - first)
        if self.train_end_of_turn and self._ends_bare(talk, ids, spans, place):
            ids.append(self.tokenizer.eos_id)
            weights.append(factors[-1])
        # What comes before a later answer is then not read as it is in use, where nothing parts it.
        parted = bool(within) and cuts[within[0]] < spans[-1][0]
        noted = {"empty_answer": trained_empty, "left_out": not written, "parted": parted}
        notes = tuple(note for note, so in noted.items() if so)
        return replace(_encoded(ids, weights, template.spells_special(text)), notes=notes)

    def _ends_bare(self, talk: Conversation, ids: list[int], spans: list[Span], place: dict[int, int]) -> bool:
        """Whether the conversation ends with an answer that no special token ends."""
        answered = talk.messages[-1]["role"] == "assistant" and talk.weights[-1] > 0
        if not answered or not spans or self.template.end_token is not None:
            return False
        special = set(self.template.special.values())
        return not any(i in special for i in ids[max(place[spans[-1][1]] - 1, 0) :])

    # -- what the assistant writes ------------------------------------------------------------------------------

    def _marked(self, talk: Conversation) -> tuple[str, list[Span], list[float]]:
        text, spans = self.template.render_marked(talk.messages, talk.tools)
        if self.train_on == "last":
            spans = self._of_last(talk, text, spans)
            return text, spans, [talk.weights[talk.answers[-1]]] * len(spans)
        factors = [talk.weights[i] for i in talk.answers]
        if len(spans) != len(factors):
            if len(set(factors)) > 1:
                raise DataError(
                    f"the template marks {len(spans)} stretches in a conversation of {len(factors)} answers, so there "
                    "is no telling which weight belongs to which"
                )
            factors = [factors[0]] * len(spans)
        return text, spans, factors

    def _of_last(self, talk: Conversation, text: str, spans: list[Span]) -> list[Span]:
        """Those of ``spans`` that are the last answer's: all that are not there before it is given."""
        if len(talk.answers) == 1:
            return spans
        before, earlier = self.template.render_marked(talk.messages[: talk.answers[-1]], talk.tools)
        if [text[a:b] for a, b in spans[: len(earlier)]] == [before[a:b] for a, b in earlier]:
            return spans[len(earlier) :]
        if len(spans) == len(talk.answers):
            return spans[-1:]
        raise UnstableTemplate(
            f"the template marks {len(spans)} stretches in a conversation of {len(talk.answers)} answers and changes "
            "earlier ones when the last is given, so there is no telling which are the last one's; give "
            "tokenizer.chat_template one that marks a stretch for each answer"
        )

    def _derived(self, talk: Conversation) -> tuple[str, list[Span], list[float]]:
        template, messages, tools = self.template, talk.messages, talk.tools
        answers = talk.answers
        text = template.render(messages, tools)
        if self.train_on == "last":
            answers = answers[-1:]
        spans, factors = [], []
        for i in answers:
            if not talk.weights[i]:
                continue
            whole = text if i == len(messages) - 1 else template.render(messages[: i + 1], tools)
            prompt = template.render(messages[:i], tools, add_generation_prompt=True)
            if not whole.startswith(prompt):
                raise self._unstable(i, "does not continue its own generation prompt", prompt, whole)
            stop = template.answer_end(whole, len(prompt))
            if not text.startswith(whole[:stop]):
                raise self._unstable(i, "changes what came before when messages follow", whole[:stop], text)
            if stop > len(prompt):
                spans.append((len(prompt), stop))
                factors.append(talk.weights[i])
        return text, spans, factors

    def _unstable(self, turn: int, what: str, expected: str, found: str) -> UnstableTemplate:
        part = next((k for k, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(found))
        a, b = (self.template.plain(t[max(part - 20, 0) : part + 20]) for t in (expected, found))
        way = "" if self.train_on == "last" else ", or train on the last answer alone (train_on: last)"
        return UnstableTemplate(
            f"the chat template is not prefix-stable: at message {turn} it {what} ({a!r} became {b!r}), so its answers "
            f"cannot be told apart. Give tokenizer.chat_template one with {{% generation %}} marks{way}"
        )


def _encoded(ids: list[int], weights: list[float], spells_special: bool = False) -> Encoded:
    return Encoded(np.array(ids, dtype=np.int32), np.array(weights, dtype=np.float32), spells_special)


def fit(example: Encoded, max_length: int, too_long: TooLong) -> tuple[Encoded | None, str]:
    """``example`` in at most ``max_length`` tokens, or None, and what became of it.

    whole         as it was; tokens behind the last target are no loss and may be gone
    cut           tokens were cut off, by ``too_long``
    dropped       too long, by ``too_long``
    cut_before_answer  dropped, because no target would have been left
    untrained     dropped: it has no target at all
    """
    if not example.trained:
        return None, "untrained"
    n = len(example.ids)
    if n <= max_length:
        return example, "whole"
    n = int(np.flatnonzero(example.weights)[-1]) + 1
    if n > max_length and too_long == "drop":
        return None, "dropped"
    keep = slice(n - max_length, n) if n > max_length and too_long == "truncate_left" else slice(0, min(n, max_length))
    short = replace(example, ids=example.ids[keep], weights=example.weights[keep])
    if not short.trained:
        return None, "cut_before_answer"
    return short, "whole" if n <= max_length else "cut"
