"""A tokenizer's chat template: messages to text and to ids, with the stretches that the assistant writes.

Text of a message that spells a special token stays text: no message can end a turn or open another.
"""

from __future__ import annotations

import bisect
import datetime as dt
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainwright.core.errors import DataError, ModelError
from trainwright.data.chat.ids import STAND_IN, Cut, make_encoder
from trainwright.data.tokenizers.base import Tokenizer

# Code points that are no characters and never will be. GUARD breaks up a special token that a message spells; the
# others stand around what a template has between {% generation %} and {% endgeneration %}.
GUARD, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
_OURS = re.compile(f"[{GUARD}{OPEN}{CLOSE}{STAND_IN}]")
_MARKS = re.compile(f"[{OPEN}{CLOSE}]")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# What the date is in training data, unless a recipe says another: the same rows have to give the same tokens every day.
# Llama 3's templates fall back to this one where they know none.
DATE = dt.date(2024, 7, 26)
# Keys that templates look for by name; any other may hold what a special token is spelt by.
_FIELDS = {"role", "content", "tool_calls", "type", "function", "name", "arguments", "id", "description", "parameters"}

Span = tuple[int, int]  # of characters


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Text of every special token -> its id."""
    ids = (tokenizer.token_byte_lengths() == 0).nonzero()[0]
    texts = {tokenizer.decode([int(i)], skip_special=False): int(i) for i in ids}
    return {text: i for text, i in texts.items() if text}


class ChatTemplate:
    """The chat template of ``tokenizer``, compiled once.

    special     text of every special token -> its id
    marks       whether the template says by ``{% generation %}`` what the assistant writes
    ending      the special tokens that it puts right behind the last answer; a model is stopped by the first
    mute        whether it leaves out what is said (it may want lists of parts, as those of image models do)
    ``date`` is the day that it is to the template, None the present one; it stays so for as long as the object lives.
    Raises ModelError where the tokenizer has no template or it is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, date: dt.date | None = None):
        import jinja2

        if not tokenizer.chat_template:
            raise ModelError(
                "its tokenizer has no chat template; give a text by --prompt, or train with tokenizer.chat_template set"
            )
        self.tokenizer = tokenizer
        self.special = special_tokens(tokenizer)
        names = {i: t for t, i in self.special.items()}
        self._names = {
            "bos_token": names.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else "",
            "eos_token": names.get(tokenizer.eos_id, ""),
            "pad_token": names.get(tokenizer.pad_id, ""),
        }
        ordered = sorted(self.special, key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(t) for t in ordered)) if ordered else None
        self._encoder = make_encoder(tokenizer, self.special)
        self.marks = bool(_GENERATION.search(tokenizer.chat_template))
        now = dt.datetime.now() if date is None else dt.datetime.combine(date, dt.time())
        try:
            self._template = _environment(now).from_string(tokenizer.chat_template)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid: {error}") from None
        self.ending: list[int] = []
        self.mute = False
        self._try_out()

    # -- messages to text ---------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text. Where a message spells a special token, a guard stands within, which :meth:`encode` takes out.

        Raises ModelError where the template refuses the messages.
        """
        return self.render_marked(messages, tools, add_generation_prompt)[0]

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """The text, and what of it the template marks as the assistant's."""
        import jinja2

        try:
            text = self._template.render(
                messages=_each_text(list(messages), self._guarded),
                tools=_each_text(list(tools), self._guarded) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"the chat template refuses these messages: {error}") from None
        return _without_marks(text)

    def _guarded(self, text: str) -> str:
        if not text.isascii() and _OURS.search(text):
            raise DataError("a message holds a code point of U+FDD0..U+FDD3, which are no characters; remove it")
        if self._special is None:
            return text
        return self._special.sub(lambda m: m[0][0] + GUARD + m[0][1:] if len(m[0]) > 1 else m[0], text)

    @property
    def end_token(self) -> int | None:
        """The special token that a model is stopped by, if the template puts one right behind an answer."""
        return self.ending[0] if self.ending else None

    def _try_out(self) -> None:
        mark = "\x02answer\x03"
        try:
            text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}])
        except ModelError:
            return  # it may want a system message, or refuse for another reason of its own
        before, _, behind = text.partition(mark)
        self.mute = before == text
        while not self.mute and self._special is not None and (found := self._special.match(behind)):
            self.ending.append(self.special[found[0]])
            behind = behind[found.end() :]

    # -- text to ids --------------------------------------------------------------------------------------------

    def encode(self, text: str, cuts: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Ids of a rendered chat, and the place among them of each of ``cuts`` (characters, ascending).

        They are those that the tokenizer gives the whole text, where special tokens that a message spells are text.
        No token reaches over a cut: the text is encoded apart there if one would, as it is when a model is given what
        comes before the cut and goes on by itself. Raises ModelError for a tokenizer that does not read the
        template's special tokens as such, and DataError where the text cannot be parted.
        """
        ids, places, _ = self.cut(text, cuts)
        return ids, places

    def cut(self, text: str, cuts: Sequence[int] = ()) -> Cut:
        """As :meth:`encode`, with the numbers of the cuts where the text is encoded apart."""
        special = list(self._special.finditer(text)) if self._special is not None else []
        before = _guards_before(text)
        made = self._encoder.encode(
            text.replace(GUARD, ""),
            [(m.start() - before(m.start()), m.end() - before(m.end()), self.special[m[0]]) for m in special],
            [cut - before(cut) for cut in cuts],
        )
        if GUARD in text:
            for name, written in Counter(m[0] for m in special).items():
                if made.ids.count(self.special[name]) > written:
                    raise DataError(
                        f"a message spells {name!r}, which the tokenizer reads as that token whoever writes it; take "
                        "it out of the message"
                    )
        return made

    def spells_special(self, text: str) -> bool:
        """Whether a rendered chat has a message that spells a special token."""
        return GUARD in text

    def plain(self, text: str) -> str:
        """A rendered chat without guards."""
        return text.replace(GUARD, "")

    def answer_end(self, text: str, start: int) -> int:
        """Where the answer that begins at ``start`` and is the last thing said in ``text`` ends.

        Behind the special token that stops a model, and others right behind it. Where there is none, behind the last
        special token if only white space follows, else at the end of the text.
        """
        every = list(self._special.finditer(text, start)) if self._special is not None else []
        stop = None
        for found in every:
            if (stop is None and self.special[found[0]] == self.end_token) or stop == found.start():
                stop = found.end()
        if stop is not None:
            return stop
        return every[-1].end() if every and not text[every[-1].end() :].strip() else len(text)


def _guards_before(text: str) -> Callable[[int], int]:
    """How many guards ``text`` has before a place in it."""
    guards = [m.start() for m in re.finditer(GUARD, text)]
    return lambda place: bisect.bisect_left(guards, place)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Texts changed, of values and of keys: those of arguments and schemas come from the data too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(k) if isinstance(k, str) and k not in _FIELDS else k: _each_text(v, change) for k, v in value.items()
        }
    return [_each_text(v, change) for v in value] if isinstance(value, list | tuple) else value


def _without_marks(text: str) -> tuple[str, list[Span]]:
    if OPEN not in text:
        return text, []
    parts: list[str] = []
    spans: list[Span] = []
    at = length = 0
    opened: int | None = None
    for mark in _MARKS.finditer(text):
        parts.append(text[at : mark.start()])
        length += mark.start() - at
        at = mark.end()
        if (mark[0] == OPEN) != (opened is None):
            raise ModelError("the chat template nests {% generation %}")
        if opened is None:
            opened = length
        else:
            spans.append((opened, length))
            opened = None
    return "".join([*parts, text[at:]]), [s for s in spans if s[0] < s[1]]


def _environment(now: dt.datetime) -> Any:
    """Jinja as transformers sets it up for chat templates, so that a template gives the same text here."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}...{% endgeneration %}``: what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return OPEN + caller() + CLOSE

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    return environment
