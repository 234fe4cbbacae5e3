"""Tasks for TInt and their samples: a question, a trace and an answer, with noise on request.

Every draw of sample i comes from ``(seed, i)``, inputs and noise from streams of their own: a sample is the same in any
order and on any machine, and without noise it is the clean one byte for byte.

Paper: arXiv:2402.04004; its tasks are arithmetic on lists, the choice of these is ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.errors import nearest
from trainwright.core.seeds import derive
from trainwright.data.synthetic.tint import Trace, Tracer, plain, trace
from trainwright.data.synthetic.tint_noise import DynamicNoise, StaticNoise, check_probability
from trainwright.data.synthetic.tint_text import Template, Visibility, render_lines, text_of, value_text

# -- what inputs are drawn from ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Magnitude:
    """Integers uniform in ``low..high``, both included."""

    low: int = 0
    high: int = 99

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}")

    def __call__(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Length:
    """The number of digits uniform in ``low..high``, then each digit; the first of several is not 0."""

    low: int = 1
    high: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"digits low={self.low}, high={self.high} should be 1 <= low <= high")

    def __call__(self, rng: random.Random) -> int:
        digits = rng.randint(self.low, self.high)
        first = rng.randint(1 if digits > 1 else 0, 9)
        return int(str(first) + "".join(str(rng.randint(0, 9)) for _ in range(digits - 1)))


Sampling = Magnitude | Length

# -- programs; they run on plain integers as well ---------------------------------------------------------------------


def running_sum(values: Sequence[int]) -> int:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def modular_sum(values: Sequence[int], modulus: int = 97) -> int:
    total = values[0] % modulus
    for value in values[1:]:
        total = (total + value) % modulus
    return total


def polynomial(values: Sequence[int], modulus: int = 1000) -> int:
    """Horner's rule: the first value is x, the others are coefficients, highest power first."""
    x, total = values[0], values[1]
    for coefficient in values[2:]:
        total = (total * x + coefficient) % modulus
    return total


def addition(values: Sequence[int]) -> int:
    """Two numbers digit by digit, with carries."""
    a, b = values
    total: int = 0
    carry: int = 0
    for place in range(max(_digits(a), _digits(b))):
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        total = total + column % 10 * 10**place
        carry = column // 10
    return total + carry * 10 ** max(_digits(a), _digits(b))


def multiplication(values: Sequence[int]) -> int:
    """Two numbers by partial products, one for each digit of the second."""
    a, b = values
    total: int = 0
    for place in range(_digits(b)):
        partial = a * (b // 10**place % 10)
        total = total + partial * 10**place
    return total


def sort(values: Sequence[int]) -> list[int]:
    """Bubble sort."""
    out = list(values)
    for end in range(len(out) - 1, 0, -1):
        for i in range(end):
            if out[i] > out[i + 1]:
                out[i], out[i + 1] = out[i + 1], out[i]
    return out


def median(values: Sequence[int]) -> int:
    """The middle of the sorted values; of an even number the lower middle."""
    return sort(values)[(len(values) - 1) // 2]


def _digits(value: int) -> int:
    return len(str(abs(plain(value))))


@dataclass(frozen=True)
class Task:
    """A program, the question that asks for what it computes, and how many inputs it takes."""

    name: str
    function: Callable[[Sequence[int]], Any]
    question: str  # with {inputs}, and {0}, {1} for single ones
    fewest: int = 2
    most: int | None = None  # None: any number
    signed: bool = True  # whether inputs may be negative

    def ask(self, values: Sequence[int]) -> str:
        return self.question.format(*values, inputs=value_text(list(values)))


TASKS: dict[str, Task] = {
    t.name: t
    for t in (
        Task("running_sum", running_sum, "sum {inputs}"),
        Task("modular_sum", modular_sum, "sum mod 97 {inputs}"),
        Task("polynomial", polynomial, "horner mod 1000 {inputs}", fewest=3),
        Task("addition", addition, "{0} + {1}", most=2, signed=False),
        Task("multiplication", multiplication, "{0} * {1}", most=2, signed=False),
        Task("median", median, "median {inputs}"),
        Task("sort", sort, "sort {inputs}"),
    )
}

# -- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A sample as text, and what it was made from. ``noised`` says that rho chose it, whatever p then did."""

    question: str
    trace: str
    answer: str
    task: str
    inputs: tuple[int, ...]
    run: Trace
    true_answer: Any
    noised: bool = False
    static_units: int = 0  # units that static noise chose
    wrong_steps: tuple[int, ...] = ()  # steps that dynamic noise made wrong

    @property
    def completion(self) -> str:
        """What a model is to write behind the question."""
        return self.trace + f"answer: {self.answer}"

    @property
    def text(self) -> str:
        return f"{self.question}\n{self.completion}\n"


@dataclass(frozen=True)
class Generator:
    """Samples of one task: ``generator(i)`` is sample i, ``generator.samples(n)`` the first n.

    count                how many inputs: (fewest, most), both included
    static, dynamic      noise; either, both or none. ``dynamic`` is (p, kind, delta)
    rho                  share of the samples that get noise
    keep_true_answer     write the right answer behind a trace with dynamic noise
    Raises ValueError for settings that do not fit.
    """

    task: Task
    sampling: Sampling = field(default_factory=Magnitude)
    count: tuple[int, int] = (2, 2)
    seed: int = 0
    show: Visibility = field(default_factory=Visibility)
    template: Template = field(default_factory=Template)
    static: StaticNoise | None = None
    dynamic: tuple[float, Any, int] | None = None
    rho: float = 1.0
    keep_true_answer: bool = False

    def __post_init__(self) -> None:
        low, high = self.count
        if not self.task.fewest <= low <= high or (self.task.most is not None and high > self.task.most):
            limit = f"{self.task.fewest}..{self.task.most or 'any'}"
            raise ValueError(f"the task {self.task.name} takes {limit} inputs, got count={low}..{high}")
        if not self.task.signed and isinstance(self.sampling, Magnitude) and self.sampling.low < 0:
            raise ValueError(f"the task {self.task.name} takes no negative inputs, got low={self.sampling.low}")
        check_probability(self.rho, "rho")
        if self.dynamic is not None:
            DynamicNoise(self.dynamic[0], random.Random(0), *self.dynamic[1:])

    def inputs(self, index: int) -> list[int]:
        rng = random.Random(derive(self.seed, "tint", self.task.name, index))
        return [self.sampling(rng) for _ in range(rng.randint(*self.count))]

    def __call__(self, index: int) -> Sample:
        values = self.inputs(index)
        true_answer = self.task.function(values)
        rng = random.Random(derive(self.seed, "tint noise", self.task.name, index))
        noised = (self.static is not None or self.dynamic is not None) and rng.random() < self.rho
        dynamic = DynamicNoise(self.dynamic[0], rng, *self.dynamic[1:]) if noised and self.dynamic else None
        run = trace(self.task.function, values, Tracer(dynamic, lines=self.show.line, state=self.show.state))
        lines, units = render_lines(run.events, self.template, self.show), 0
        if noised and self.static is not None:
            lines, units = self.static(lines, rng)
        answer = true_answer if self.keep_true_answer else run.answer
        return Sample(
            question=self.task.ask(values),
            trace=text_of(lines),
            answer=value_text(answer),
            task=self.task.name,
            inputs=tuple(values),
            run=run,
            true_answer=true_answer,
            noised=noised,
            static_units=units,
            wrong_steps=tuple(dynamic.steps) if dynamic else (),
        )

    def samples(self, n: int, start: int = 0) -> Iterator[Sample]:
        for index in range(start, start + n):
            yield self(index)


def task_named(name: str) -> Task:
    """One of :data:`TASKS`. Raises ValueError with the nearest name."""
    if name not in TASKS:
        raise ValueError(f"no such task {name!r}; {nearest(name, TASKS)}")
    return TASKS[name]
