"""Prompts and targets as plain text, the way Panda LLM was tuned: loss on the target alone, tokenized jointly.

    text = prompt + separator + target + EOS        weights: 0 on the prompt's tokens, 1 on all others

Plain documents have full loss, all other rows conditional loss. A dialogue becomes a sample per turn, with everything
that was said before in its prompt. Rows are filled into one fixed template per source.

Paper: Panda LLM, arXiv:2305.03025; reference: dandelionsllm/pandallm. Stage 1 is a broad mix (lr 1e-5, one epoch),
stage 2 COIG alone (lr 3e-5, five epochs), both AdamW (0.9, 0.99), eps 1e-6, no weight decay, clipping at 5, 2,048
tokens, warm-up over 1 %. What differs here, and why: the reference counts the prompt's tokens apart, which can be off
by one at the joint; where a prompt fills the window it halves the mask and trains on prompt text, while here such a
sample is dropped and counted; it draws one of several templates at random when a file is read, here a source has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, PrivateAttr, field_validator

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.chat.conversation import TextPair, parse_row
from trainwright.data.chat.files import read_rows
from trainwright.data.chat.joint import JointMasker
from trainwright.data.chat.masks import TooLong
from trainwright.data.chat.source import ExampleSource
from trainwright.data.sources._files import FileSource, SourceFile, checked_text
from trainwright.data.sources.base import Document
from trainwright.data.tokenizers.base import Tokenizer

# Keys of a prompt and its target, by the sets that people have.
PAIRS = (("inputs", "targets"), ("prompt", "completion"), ("question", "answer"), ("prompt", "target"))


def pairs_of(row: Any, turn_separator: str = "\n\n", separator: str = " ") -> list[TextPair]:
    """The samples of a row; an empty prompt is that of a plain document.

    ``text``; ``inputs`` and ``targets``; ``prompt`` and ``completion``; ``question`` and ``answer``; ``instruction``,
    ``input?``, ``output``; a list of such turns; ``messages`` or ``conversations``. Raises DataError for any other.
    """
    if isinstance(row, Sequence) and not isinstance(row, str):
        turns = [t for part in row for t in pairs_of(part, turn_separator, separator)]
        return _dialogue([(t.prompt, t.completion.removeprefix(separator)) for t in turns], turn_separator, separator)
    if not isinstance(row, Mapping):
        raise DataError(f"expected an object, got {type(row).__name__}")
    if isinstance(row.get("text"), str) and row["text"].strip():
        return [TextPair("", row["text"])]
    for asked, answered in PAIRS:
        if isinstance(row.get(asked), str) and isinstance(row.get(answered), str):
            return [_pair(row[asked], row[answered], separator)]
    name, example = parse_row(row)
    if name == "preference" or isinstance(example, TextPair):
        raise DataError(f"is of the format {name}; give prompt_template and target_template to say what to use")
    prompt: list[str] = []
    out = []
    for message, weight in zip(example.messages, example.weights, strict=True):  # type: ignore[union-attr]
        if message.get("tool_calls"):
            raise DataError("has tool calls, for which a plain prompt has no form; the source chat has")
        if message["role"] == "assistant" and weight:
            out.append(_pair(turn_separator.join(prompt), message["content"], separator))
        prompt.append(message["content"])
    return out


def _dialogue(turns: Sequence[tuple[str, str]], turn_separator: str, separator: str) -> list[TextPair]:
    history: list[str] = []
    out = []
    for asked, answered in turns:
        out.append(_pair(turn_separator.join([*history, asked]), answered, separator))
        history += [asked, answered]
    return out


def _pair(prompt: str, target: str, separator: str) -> TextPair:
    if not target.strip():
        raise DataError("has an empty target")
    if not prompt.strip():
        raise DataError("has an empty prompt; a document without one belongs under the key text")
    return TextPair(prompt, separator + target)


def fields_of(template: str) -> list[str]:
    """Names in braces. Raises ValueError for a template that is no format string or has none."""
    try:
        names = [n for _, n, _, _ in Formatter().parse(template) if n is not None]
    except ValueError as error:
        raise ValueError(f"{template!r} is not a template: {error}; write a brace as {{{{ or }}}}") from None
    if not names or not all(n.isidentifier() for n in names):
        raise ValueError(f"{template!r} names no field of a row; write it in braces, such as {{instruction}}")
    return names


def fill(template: str, row: Mapping[str, Any], key: str) -> str:
    """``template`` with the row's fields. Raises DataError for one that the row lacks or that is no text or number."""
    values = {}
    for name in fields_of(template):
        value = row.get(name)
        if value is None or isinstance(value, list | Mapping):
            there = ", ".join(str(k) for k in row) or "(none)"
            raise DataError(f"{key} names the field {name!r}, which is missing or no text; there are {there}")
        values[name] = value
    return template.format(**values)


@register("source", "panda_llm", paper="arXiv:2305.03025", seed_id="B003")
class PandaSource(ExampleSource, FileSource):
    """Prompt and target pairs as plain text, loss on the target alone, one sample for each turn of a dialogue."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")

    prompt_template: str | None = Field(
        None, description="Prompt of a row, its fields in braces; null: by the keys that rows usually have."
    )
    target_template: str | None = Field(None, description="Target of a row, its fields in braces.")
    loss: Literal["conditional", "full"] = Field(
        "conditional", description="Loss on the target alone, or on the prompt too. Rows with text have full loss."
    )
    separator: str = Field(" ", description="Text between prompt and target; trained on with the target.")
    turn_separator: str = Field("\n\n", description="Text between what was said before and the next turn.")
    max_length: PositiveInt | None = Field(
        None, description="Most tokens of a sample, 2048 in the paper; null: what a row holds (train.seq_len)."
    )
    too_long: TooLong = Field(
        "truncate_right",
        description="What happens to longer ones: truncate_right (the paper's), truncate_left or drop; counted. One "
        "whose prompt fills the window is dropped.",
    )
    skip_bad_rows: bool = Field(
        False, description="Skip and count rows that cannot be used, instead of stopping at the first."
    )
    max_bad_rows: float = Field(
        0.1, ge=0, le=1, description="Share of unusable rows above which skip_bad_rows stops all the same."
    )

    _bad: list[str] = PrivateAttr(default_factory=list)

    @field_validator("prompt_template", "target_template")
    @classmethod
    def _has_fields(cls, template: str | None) -> str | None:
        if template is not None:
            fields_of(template)
        return template

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (self.prompt_template is None) != (self.target_template is None):
            missing = "target_template" if self.target_template is None else "prompt_template"
            raise ValueError(f"{missing} is missing: prompt_template and target_template go together")

    def _samples(self, row: Any) -> list[TextPair]:
        if self.prompt_template is None or self.target_template is None:
            return pairs_of(row, self.turn_separator, self.separator)
        if not isinstance(row, Mapping):
            raise DataError(f"expected an object, got {type(row).__name__}")
        prompt = fill(self.prompt_template, row, "prompt_template")
        return [_pair(prompt, fill(self.target_template, row, "target_template"), self.separator)]

    def _read(self, file: SourceFile) -> Iterator[Document]:
        for number, row in read_rows(file):
            where = f"{file.path}:{number}"
            try:
                if isinstance(row, DataError):
                    raise row
                samples = self._samples(row)
                for sample in samples:
                    checked_text(sample.text, where)
            except DataError as error:
                told = str(error) if str(error).startswith(where) else f"{where}: {error}"
                if not self.skip_bad_rows:
                    raise DataError(f"{told} (mend the row, or set skip_bad_rows: true)") from None
                self._bad_rows += 1
                self._bad.append(told)
                continue
            for turn, sample in enumerate(samples):
                kind = "conditional" if sample.prompt else "full"
                if self.loss == "full":
                    sample = TextPair("", sample.text)
                name = f"{file.id}:{number}" + (f"#{turn}" if len(samples) > 1 else "")
                meta = {"example": sample, "format": kind, "where": where, "row": f"{file.id}:{number}"}
                yield Document(sample.text, name, meta)

    def _filled(self, split: Any) -> Iterator[Document]:
        self._bad = []
        yield from super()._filled(split)

    def _split_key(self, doc: Document) -> str:
        return doc.meta["row"]  # the turns of a dialogue hold each other: they stay on one side

    def _masker(self, tokenizer: Tokenizer) -> JointMasker:
        return JointMasker(tokenizer)
