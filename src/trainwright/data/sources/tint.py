"""``source: {name: tint}``: traced arithmetic with static or dynamic noise, made as it is asked for.

A document is a question, a trace and an answer; sample i depends on the settings and i alone. With noise or without,
the questions are the same, and rho and p at 0 give the clean documents byte for byte.

Paper: Understanding the Effect of Noise in LLM Training Data with Algorithmic Chains of Thought, arXiv:2402.04004.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr

from trainwright.core.errors import ConfigError, nearest
from trainwright.core.registry import register
from trainwright.data.chat.conversation import TextPair
from trainwright.data.chat.joint import JointMasker
from trainwright.data.chat.masks import TooLong
from trainwright.data.chat.source import ExampleSource
from trainwright.data.sources._files import hash_json
from trainwright.data.sources.base import Document, Split
from trainwright.data.synthetic.tint_noise import Kind, Mode, StaticNoise, Unit
from trainwright.data.synthetic.tint_tasks import TASKS, Generator, Length, Magnitude, Sample
from trainwright.data.synthetic.tint_text import Template, Visibility
from trainwright.data.tokenizers.base import Tokenizer

VERSION = 1  # changes when the same settings would give other documents


@register("source", "tint", paper="arXiv:2402.04004", seed_id="B058")
class TintSource(ExampleSource):
    """Traced arithmetic on integers: question, steps, answer, with static or dynamic noise in the steps."""

    too_long: ClassVar[TooLong] = "drop"  # type: ignore[misc]
    skip_bad_rows: ClassVar[bool] = False  # type: ignore[misc]
    max_bad_rows: ClassVar[float] = 0.0  # type: ignore[misc]

    task: str = Field("running_sum", description=f"What is computed: {', '.join(sorted(TASKS))}.")
    samples: PositiveInt = Field(10_000, description="Documents, both splits together.")
    seed: NonNegativeInt = Field(0, description="Seed of inputs and noise.")
    count: tuple[PositiveInt, PositiveInt] = Field((2, 2), description="Fewest and most inputs of a sample.")
    sampling: Literal["magnitude", "length"] = Field(
        "magnitude", description="magnitude: integers uniform in low..high; length: the number of digits first."
    )
    low: int = Field(0, description="Smallest input, or fewest digits with sampling length.")
    high: int = Field(99, description="Largest input, or most digits with sampling length.")
    noise: Literal["none", "static", "dynamic"] = Field(
        "none", description="static: on the written trace; dynamic: in the computation, which goes on with it."
    )
    p: float = Field(0.1, ge=0, le=1, description="Probability of noise in a unit (static) or step (dynamic).")
    rho: float = Field(1.0, ge=0, le=1, description="Share of the training samples that get noise.")
    unit: Unit = Field("value", description="What static noise acts on: value, digit or line.")
    mode: Mode = Field("replace", description="What static noise does: replace, delete or swap.")
    kind: Kind = Field("add", description="Dynamic noise: add up to delta, or another integer of the same_length.")
    delta: PositiveInt = Field(10, description="Largest change of a result by kind add.")
    keep_true_answer: bool = Field(False, description="Right answers behind traces with dynamic noise.")
    show_line: bool = Field(False, description="Write the source line of each step.")
    show_operands: bool = Field(True, description="Write the operands of each step.")
    show_result: bool = Field(True, description="Write the result of each step.")
    show_state: bool = Field(False, description="Write the program's variables at each step.")
    loss: Literal["completion", "all"] = Field(
        "completion", description="Train on trace and answer, or on the question too."
    )
    max_length: PositiveInt | None = Field(
        None, description="Most tokens of a sample; null: what a row holds. Longer ones are dropped and counted."
    )

    _bad: list[str] = PrivateAttr(default_factory=list)
    _made: Generator | None = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.generator()

    def generator(self, clean: bool = False) -> Generator:
        """The samples; ``clean`` leaves the noise out. Raises ConfigError for settings that do not fit."""
        if self.task not in TASKS:
            raise ConfigError(f"no such task; {nearest(self.task, TASKS)}", key="task", value=self.task)
        noise = "none" if clean else self.noise
        try:
            return Generator(
                TASKS[self.task],
                Magnitude(self.low, self.high) if self.sampling == "magnitude" else Length(self.low, self.high),
                self.count,
                self.seed,
                Visibility(self.show_line, self.show_operands, self.show_result, self.show_state),
                Template(),
                static=StaticNoise(self.p, self.unit, self.mode) if noise == "static" else None,
                dynamic=(self.p, self.kind, self.delta) if noise == "dynamic" else None,
                rho=self.rho,
                keep_true_answer=self.keep_true_answer,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def label(self) -> str:
        return f"{self.name}:{self.task}"

    def documents(self, split: Split, validation_fraction: float) -> Iterator[Document]:
        """Validation documents are without noise: they are what the model is held against."""
        for doc in super().documents(split, validation_fraction):
            if split == "validation" and self.noise != "none":
                index = int(doc.id.rsplit("/", 1)[1])
                yield self._document(self.generator(clean=True)(index), index)
            else:
                yield doc

    def _stream(self, split: Split | None) -> Iterator[Document]:
        generator = self.generator()
        for index in range(self.samples):
            yield self._document(generator(index), index)

    def _document(self, sample: Sample, index: int) -> Document:
        question, completion = f"{sample.question}\n", f"{sample.completion}\n"
        pair = TextPair("", question + completion) if self.loss == "all" else TextPair(question, completion)
        name = f"tint/{self.task}/{self.seed}/{index}"
        meta = {"example": pair, "format": "tint", "where": name, "noised": sample.noised}
        return Document(sample.text, name, meta)

    def fingerprint(self) -> str:
        settings = self.model_dump(mode="json", exclude=set(self.outside))
        return hash_json("tint", VERSION, settings)

    def _masker(self, tokenizer: Tokenizer) -> JointMasker:
        return JointMasker(tokenizer)
