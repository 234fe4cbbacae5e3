"""TInt: integers that write down what is done with them, for algorithmic chains of thought.

``TInt(value, name, tracer)`` is an ``int``. Every arithmetic operator and every comparison computes its result, appends
an event to the tracer (step, operator, operands, result, source line, variables) and gives back a TInt, so that any
Python function of integers can be run on TInts as it stands:

    tracer = Tracer()
    total = running_sum(tracer.inputs([3, 4, 5]))
    tracer.events                                # 3 events; total == 12

A tracer with noise changes results while the function runs, which then goes on with the wrong values (dynamic noise;
see tint_noise). An operand knows where it came from: an input, the result of a step, or a constant of the program.

What leaves the tracer: ``bool(x)`` (any ``if``) and ``int(x)`` give plain values. They are written down in
``tracer.left``, or refused with ``leaving="raise"``. Three ways out cannot be seen from Python, for CPython reads the
value of an ``int`` by itself there: an index or ``range`` bound, functions in C such as ``math.gcd``, and a float to
the left of an operator (what that gives is refused when it meets a TInt, or is returned).

Paper: Understanding the Effect of Noise in LLM Training Data with Algorithmic Chains of Thought, arXiv:2402.04004. The
paper gives no code; operators, events and the forms of noise follow its text, names are ours.
"""

from __future__ import annotations

import linecache
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, NoReturn, SupportsIndex

Leaving = Literal["log", "raise"]
# (step, operator, exact result) -> the result to go on with
ResultNoise = Callable[[int, str, int], int]

BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
UNARY: dict[str, Callable[[int], int]] = {"neg": operator.neg, "abs": operator.abs}
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


class TIntError(TypeError):
    """An operation that TInt does not trace, or one that leaves the tracer where that is refused."""


def apply(op: str, operands: Sequence[int]) -> int:
    """The exact result of an event's operation, of plain integers; comparisons give 0 or 1."""
    values = [int.__int__(v) for v in operands]
    if op == "pow":
        return pow(values[0], values[1], values[2])
    return int(UNARY[op](values[0]) if op in UNARY else BINARY[op](values[0], values[1]))


@dataclass(frozen=True)
class Operand:
    """A value and where it came from: ``("input", i)``, ``("step", k)`` or ``("const", value)``."""

    value: int
    source: tuple[str, int]
    name: str = ""


@dataclass(frozen=True)
class Event:
    """One operation. ``exact`` is what it should have given from these operands, ``result`` what went on."""

    step: int
    op: str
    operands: tuple[Operand, ...]
    result: int
    exact: int
    line: str = ""  # source line, stripped
    lineno: int = 0
    function: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)  # variables before the line is done


@dataclass(frozen=True)
class Left:
    """A value that left the tracer: ``kind`` is bool, int or float."""

    step: int  # events before it
    kind: str
    value: int
    line: str


class Tracer:
    """Collects the events of TInts.

    noise       changes results as they are made; None: all are right
    leaving     what ``bool()`` and ``int()`` of a TInt do: log (in :attr:`left`) or raise
    lines       keep the source line of every event
    state       keep the integer variables of the function that the line belongs to
    max_events  a function that goes on for longer (wrong values can keep a loop alive) raises RuntimeError
    """

    def __init__(
        self,
        noise: ResultNoise | None = None,
        *,
        leaving: Leaving = "log",
        lines: bool = True,
        state: bool = False,
        max_events: int = 100_000,
    ):
        if leaving not in ("log", "raise"):
            raise ValueError(f"leaving should be log or raise, got {leaving!r}")
        if max_events < 1:
            raise ValueError(f"max_events should be at least 1, got {max_events}")
        self.noise, self.leaving, self.lines, self.state, self.max_events = noise, leaving, lines, state, max_events
        self.events: list[Event] = []
        self.left: list[Left] = []
        self.given: list[int] = []

    def input(self, value: int, name: str = "") -> TInt:
        """A TInt that the function is given."""
        index = len(self.given)
        self.given.append(int.__int__(value))
        return TInt(value, name or f"x{index}", self, ("input", index))

    def inputs(self, values: Iterable[int], name: str = "x") -> list[TInt]:
        """``values`` as inputs named x0, x1, ..."""
        start = len(self.given)
        return [self.input(v, f"{name}{start + i}") for i, v in enumerate(values)]

    def record(self, op: str, operands: tuple[Any, ...]) -> TInt:
        step = len(self.events)
        if step >= self.max_events:
            raise RuntimeError(f"the function did more than max_events={self.max_events} operations; does it end?")
        seen = tuple(self._operand(v) for v in operands)
        exact = apply(op, [o.value for o in seen])
        result = exact if self.noise is None else int.__int__(self.noise(step, op, exact))
        line, lineno, function, state = self._place()
        self.events.append(Event(step, op, seen, result, exact, line, lineno, function, state))
        return TInt(result, f"t{step}", self, ("step", step))

    def leave(self, kind: str, value: TInt) -> None:
        line = self._place()[0]
        if self.leaving == "raise":
            where = f" in `{line}`" if line else ""
            raise TIntError(
                f"{kind}() of the TInt {value.name}{where} leaves the tracer: what is done with the plain value would "
                "not be seen; use leaving='log' to allow it, or write the step as arithmetic"
            )
        self.left.append(Left(len(self.events), kind, int.__int__(value), line))

    def _operand(self, value: Any) -> Operand:
        number = int.__int__(value)
        if isinstance(value, TInt) and value.tracer is self:
            return Operand(number, value.source, value.name)
        return Operand(number, ("const", number))

    def _place(self) -> tuple[str, int, str, dict[str, Any]]:
        if not (self.lines or self.state):
            return "", 0, "", {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        if frame is None:
            return "", 0, "", {}
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if self.lines else ""
        state = _integers(frame.f_locals) if self.state else {}
        return line, frame.f_lineno, frame.f_code.co_name, state


def _integers(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that are integers or lists of them, as plain values."""
    out: dict[str, Any] = {}
    for name, value in variables.items():
        if isinstance(value, int):
            out[name] = int.__int__(value)
        elif isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
            out[name] = [int.__int__(v) for v in value]
    return out


def _binary(op: str, reflected: bool = False) -> Callable[[TInt, Any], Any]:
    def method(self: TInt, other: Any) -> Any:
        if not isinstance(other, int):
            if isinstance(other, float | complex):
                raise TIntError(f"TInt {op} {type(other).__name__} is not traced: operands are integers")
            return NotImplemented
        if op == "**" and (int.__int__(self if reflected else other)) < 0:
            raise TIntError("a power with a negative exponent is a fraction, which TInt does not trace")
        return self.tracer.record(op, (other, self) if reflected else (self, other))

    return method


def _refused(what: str, way: str) -> Callable[..., NoReturn]:
    def method(self: TInt, *others: Any) -> NoReturn:
        raise TIntError(f"TInt does not trace {what}; {way}")

    return method


class TInt(int):
    """A traced integer; see the module. Raises TIntError for true division, bit operations and floats.

    ``tracer`` None gives it one of its own, ``value.tracer``. TInts of two tracers in one operation: the left one's
    notes it, the right one is a constant there.
    """

    name: str
    tracer: Tracer
    source: tuple[str, int]

    def __new__(
        cls, value: int, name: str = "", tracer: Tracer | None = None, source: tuple[str, int] | None = None
    ) -> TInt:
        if isinstance(value, float) or not isinstance(value, int):
            raise TIntError(f"TInt takes an integer, got {type(value).__name__}")
        if source is None:
            return (tracer or Tracer()).input(value, name)
        self = super().__new__(cls, int.__int__(value))
        assert tracer is not None
        self.name, self.tracer, self.source = name, tracer, source
        return self

    __add__, __radd__ = _binary("+"), _binary("+", True)
    __sub__, __rsub__ = _binary("-"), _binary("-", True)
    __mul__, __rmul__ = _binary("*"), _binary("*", True)
    __floordiv__, __rfloordiv__ = _binary("//"), _binary("//", True)
    __mod__, __rmod__ = _binary("%"), _binary("%", True)
    __lt__, __le__, __gt__, __ge__ = _binary("<"), _binary("<="), _binary(">"), _binary(">=")  # type: ignore[assignment]
    __eq__, __ne__ = _binary("=="), _binary("!=")  # type: ignore[assignment]
    __hash__ = int.__hash__

    def __pow__(self, other: Any, modulus: Any = None) -> Any:  # type: ignore[override]
        if modulus is None:
            return _POWER(self, other)
        if not isinstance(other, int) or not isinstance(modulus, int):
            raise TIntError("pow() of a TInt takes integers")
        return self.tracer.record("pow", (self, other, modulus))

    __rpow__ = _binary("**", True)  # type: ignore[assignment]

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> TInt:
        return self.tracer.record("neg", (self,))

    def __pos__(self) -> TInt:
        return self

    def __abs__(self) -> TInt:
        return self.tracer.record("abs", (self,))

    # -- what leaves the tracer, and what is refused ------------------------------------------------------------

    def __bool__(self) -> bool:
        self.tracer.leave("bool", self)
        return int.__int__(self) != 0

    def __int__(self) -> int:
        self.tracer.leave("int", self)
        return int.__int__(self)

    def __index__(self) -> int:
        self.tracer.leave("int", self)
        return int.__int__(self)

    __float__ = _refused("float()", "it computes with integers")
    __complex__ = _refused("complex()", "it computes with integers")
    __truediv__ = _refused("true division, which gives a float", "use // and %")
    __rtruediv__ = __truediv__
    __and__ = __or__ = __xor__ = _refused("bit operations", "use arithmetic, or `a * b` for `a and b`")  # type: ignore[assignment]
    __rand__ = __ror__ = __rxor__ = __lshift__ = __rshift__ = __rlshift__ = __rrshift__ = __and__  # type: ignore[assignment]
    __invert__ = __and__  # type: ignore[assignment]

    def __round__(self, ndigits: SupportsIndex = 0) -> TInt:
        return self

    __trunc__ = __floor__ = __ceil__ = __round__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return int.__repr__(self)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(int.__int__(self), spec)

    def __reduce__(self) -> Any:
        return int, (int.__repr__(self),)  # a copy elsewhere is a plain integer


_POWER = _binary("**")


def plain(value: Any) -> Any:
    """The integer, or list of integers, without its tracer and without a note of that."""
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return int.__int__(value)


@dataclass(frozen=True)
class Trace:
    """A function's run: its inputs, events and answer, and where the answer came from."""

    inputs: tuple[int, ...]
    events: tuple[Event, ...]
    answer: Any  # int or list of int
    answer_sources: tuple[tuple[str, int], ...]
    left: tuple[Left, ...] = ()


def trace(function: Callable[..., Any], values: Sequence[int], tracer: Tracer | None = None) -> Trace:
    """Run ``function(list of TInt)`` and return what it did. It has to return an integer or a list of them."""
    tracer = tracer or Tracer()
    out = function(tracer.inputs(values))
    parts = list(out) if isinstance(out, list | tuple) else [out]
    if not all(isinstance(p, int) for p in parts):
        raise TIntError(f"the traced function returned {type(out).__name__}; it should return integers")
    sources = tuple(p.source if isinstance(p, TInt) else ("const", int(p)) for p in parts)
    return Trace(tuple(tracer.given), tuple(tracer.events), plain(out), sources, tuple(tracer.left))


def replay(run: Trace) -> Any:
    """The answer computed from the inputs by the trace's operations alone; values written in events are not read."""
    results: list[int] = []

    def value(source: tuple[str, int]) -> int:
        kind, number = source
        return run.inputs[number] if kind == "input" else results[number] if kind == "step" else number

    for event in run.events:
        results.append(apply(event.op, [value(o.source) for o in event.operands]))
    out = [value(s) for s in run.answer_sources]
    return out if isinstance(run.answer, list) else out[0]
