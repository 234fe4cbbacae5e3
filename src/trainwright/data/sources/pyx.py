"""``source: {name: pyx}``: rows about what code does, from files of the PyX form or made from small programs.

Without ``path`` small programs on integers and lists are made from the seed, run in the sandbox, traced and told
(data/synthetic/pyx). With ``path`` rows are read as the builder writes them, each of exactly one kind. Only the
response is trained on. A row that is longer than ``max_length`` is dropped and counted, never cut: its answer stands
at its end.

Paper: SemCoder, arXiv:2406.01006. Its code truncates and prints a count, and makes the attention mask from the padding
id, which hides real EOS where the two are the same. Here rows are dropped, and documents told apart by their bounds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr, field_validator, model_validator

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import register
from trainwright.core.sandbox import Limits, Sandbox
from trainwright.data.chat.conversation import TextPair
from trainwright.data.chat.files import read_rows
from trainwright.data.chat.joint import JointMasker
from trainwright.data.chat.masks import TooLong
from trainwright.data.chat.source import ExampleSource
from trainwright.data.sources._files import checked_text, find_files, hash_json, stat_files
from trainwright.data.sources.base import Document, Split
from trainwright.data.synthetic.pyx import rows as pyx_rows
from trainwright.data.synthetic.pyx.monologues import Style
from trainwright.data.synthetic.pyx.programs import Family, make
from trainwright.data.synthetic.pyx.rows import Kind, Reasoning, Row
from trainwright.data.synthetic.pyx.tracer import Rejected, Trace, trace_many
from trainwright.data.tokenizers.base import Tokenizer

VERSION = 1  # changes when the same settings would give other rows
TOGETHER = 100  # made programs in one process: they are our own, and end
LIMITS = Limits(wall_seconds=900.0, cpu_seconds=60.0)
Isolation = Literal["kernel", "audit"]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")


@functools.lru_cache(maxsize=4)
def made_traces(samples: int, seed: int, family: Family, lines: int, isolation: Isolation) -> tuple[Trace, ...]:
    """Traces of ``samples`` made programs, less repetitions. Held, for a source is read several times in a run."""
    made = (make(i, seed, family, lines) for i in range(samples))
    wanted = list(dict.fromkeys((m.code, m.call) for m in made))
    with Sandbox(2, LIMITS, isolation=isolation) as sandbox:
        traced = list(trace_many(wanted, sandbox, together=TOGETHER))
    for t in traced:
        if isinstance(t, Rejected) and t.reason.startswith("stopped"):
            # What is trained on must not depend on how busy the machine is.
            raise DataError(f"source pyx: running its own programs was {t.reason}; try again on a machine less busy")
    found = [t for t in traced if isinstance(t, Trace)]
    if not found:
        raise ConfigError("no made program could be traced", key="samples", value=samples)
    return tuple(found)


@register("source", "pyx", paper="arXiv:2406.01006", seed_id="B116")
class PyxSource(ExampleSource):
    """What code does when it runs: forward and backward monologues, code from descriptions, debugging."""

    too_long: ClassVar[TooLong] = "drop"  # type: ignore[misc]

    path: str | list[str] | None = Field(
        None, description="Files of PyX rows (nl, fwd_mnl, bwd_mnl, fault, response); null: small programs are made."
    )
    samples: PositiveInt = Field(2000, description="Made programs, both splits together.")
    seed: NonNegativeInt = Field(0, description="Seed of the made programs.")
    family: Family = Field("both", description="Made programs: integers, lists or both.")
    lines: PositiveInt = Field(4, description="Most statements of a made program, about.")
    kinds: list[Kind] = Field(
        ["forward", "backward"],
        description="Kinds of rows that are used: nl, forward, backward, debug; programs are made for forward and "
        "backward, in turn.",
    )
    reasoning: Reasoning = Field(
        "monologue",
        description="What comes before the answer of made rows: monologue, scratchpad (the baseline of states), or "
        "nothing (answer).",
    )
    style: Style = Field("words", description="Monologues of made rows: words, or brief (states with little around).")
    skip_bad_rows: bool = Field(False, description="Skip and count rows that cannot be used, instead of stopping.")
    max_bad_rows: float = Field(
        0.1, ge=0, le=1, description="Share of unusable rows above which skip_bad_rows stops all the same."
    )
    isolation: Isolation = Field(
        "kernel", description="How made programs are run: kernel, or audit on systems without seccomp."
    )
    max_length: PositiveInt | None = Field(
        None, description="Most tokens of a row; null: train.seq_len. The paper has 2048. Longer ones are dropped."
    )

    _bad: list[str] = PrivateAttr(default_factory=list)
    _formats: Counter[str] = PrivateAttr(default_factory=Counter)

    @field_validator("path")
    @classmethod
    def _some(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and not value:
            raise ValueError("names no file; null makes programs")
        return value

    @model_validator(mode="after")
    def _kinds(self) -> PyxSource:
        if not self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise ValueError(f"kinds should name some of {', '.join(get_args(Kind))}, each once")
        made = {"forward", "backward"}
        if self.path is None and set(self.kinds) - made:
            raise ValueError("kinds nl and debug come from files of rows; give path, or leave them out")
        return self

    @property
    def label(self) -> str:
        first = self.path if isinstance(self.path, str | None) else self.path[0]
        return f"{self.name}:{first or self.family}"

    def _filled(self, split: Split | None) -> Iterator[Document]:
        self._bad = []
        yield from super()._filled(split)

    def _stream(self, split: Split | None) -> Iterator[Document]:
        if self.path is None:
            for index, row in enumerate(self.rows()):
                yield self._document(row, f"pyx/{self.family}/{self.seed}/{index}")
            return
        for file in find_files(self.path, SUFFIXES):
            for number, value in read_rows(file):
                where = f"{file.path}:{number}"
                try:
                    if isinstance(value, DataError):
                        raise value
                    try:
                        row = pyx_rows.parse_row(value)
                        checked_text(row.question + row.response, where)
                    except DataError as error:
                        raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from None
                except DataError as error:
                    if not self.skip_bad_rows:
                        raise DataError(f"{error} (mend the row, or set skip_bad_rows: true)") from None
                    self._bad_rows += 1
                    self._bad.append(str(error))
                    continue
                if row.kind in self.kinds:
                    yield self._document(row, f"{file.id}:{number}", where)

    def rows(self) -> list[Row]:
        """The made rows, of distinct programs and calls: those of a call that could not be traced are left out."""
        traces = made_traces(self.samples, self.seed, self.family, self.lines, self.isolation)
        rows = []
        for i, t in enumerate(traces):
            kind = self.kinds[i % len(self.kinds)]
            tell = pyx_rows.forward_row if kind == "forward" else pyx_rows.backward_row
            rows.append(tell(t, self.reasoning, self.style))
        return rows

    def _document(self, row: Row, name: str, where: str | None = None) -> Document:
        pair = TextPair(**row.to_pair())
        meta = {"example": pair, "format": f"pyx {row.kind}", "where": where or name, "kind": row.kind}
        return Document(pair.text, name, meta)

    def fingerprint(self) -> str:
        settings = self.model_dump(mode="json", exclude=set(self.outside))
        files = None if self.path is None else stat_files(find_files(self.path, SUFFIXES))
        return hash_json("pyx", VERSION, settings, files)

    def on_disk(self) -> tuple[int, int] | None:
        if self.path is None:
            return None
        files = find_files(self.path, SUFFIXES)
        return len(files), sum(size for _, _, size, _ in stat_files(files))

    def _masker(self, tokenizer: Tokenizer) -> JointMasker:
        return JointMasker(tokenizer)
