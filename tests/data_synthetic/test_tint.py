"""TInt: values as plain integers give them, everything written down, and nothing that leaves it unseen."""

import operator
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.data.synthetic.tint import BINARY, TInt, TIntError, Tracer, apply, plain, replay, trace
from trainwright.data.synthetic.tint_tasks import TASKS, Length, Magnitude

INTS = st.integers(-(10**12), 10**12)


@given(INTS, INTS)
def test_every_operator_gives_the_plain_value_and_one_event(a, b):
    for sign, function in BINARY.items():
        if (sign in ("//", "%") and b == 0) or sign == "**":
            continue
        for x, y in ((TInt(a), b), (a, TInt(b)), (TInt(a), TInt(b))):
            tracer = x.tracer if isinstance(x, TInt) else y.tracer
            got = function(x, y)
            assert isinstance(got, TInt) and plain(got) == int(function(a, b)), sign
            assert len(tracer.events) == 1
            event = tracer.events[0]
            # Python asks the right operand of `a < TInt` by its mirror image.
            assert apply(event.op, [o.value for o in event.operands]) == event.result == plain(got)
    for function in (operator.neg, abs):
        value = TInt(a)
        assert plain(function(value)) == function(a) and len(value.tracer.events) == 1


def test_powers_divmod_and_sum():
    tracer = Tracer()
    a, b = tracer.inputs([3, 4])
    assert plain(a**b) == 81 and plain(2**b) == 16 and plain(pow(a, b, 5)) == 1
    assert [plain(x) for x in divmod(b, a)] == [1, 1] and [plain(x) for x in divmod(11, b)] == [2, 3]
    assert plain(sum([a, b])) == 7 and plain(max(a, b)) == 4
    assert replay(trace(lambda v: pow(v[0], v[1], 7), [3, 4])) == 4


def test_ten_thousand_random_inputs():
    """(b) The function of TInts is that of integers, and a clean trace replayed gives the answer."""
    rng = random.Random(1)
    tasks = list(TASKS.values())
    draws = (Magnitude(0, 999), Length(1, 6), Magnitude(-500, 500))
    for i in range(10_000):
        task = tasks[i % len(tasks)]
        draw = draws[i % 2 if not task.signed else i % 3]
        n = 2 if task.most == 2 else rng.randint(task.fewest, 4)
        values = [draw(rng) for _ in range(n)]
        run = trace(task.function, values, Tracer(lines=False))
        assert run.answer == task.function(values), (task.name, values)
        assert replay(run) == run.answer


def test_the_tasks_are_what_they_say():
    rng = random.Random(2)
    for _ in range(300):
        a, b = rng.randint(0, 10**5), rng.randint(0, 10**5)
        assert TASKS["addition"].function([a, b]) == a + b
        assert TASKS["multiplication"].function([a, b]) == a * b
        many = [rng.randint(-99, 99) for _ in range(rng.randint(3, 7))]
        assert TASKS["running_sum"].function(many) == sum(many)
        assert TASKS["modular_sum"].function(many) == sum(many) % 97
        assert TASKS["sort"].function(many) == sorted(many)
        assert TASKS["median"].function(many) == sorted(many)[(len(many) - 1) // 2]
        x, *rest = many
        assert TASKS["polynomial"].function(many) == (
            rest[0] if len(rest) == 1 else sum(c * x ** (len(rest) - 1 - i) for i, c in enumerate(rest)) % 1000
        )


def test_an_event_holds_all_of_it():
    def program(values):
        total = values[0]
        for value in values[1:]:
            total = total + value * 2
        return total

    run = trace(program, [5, 7, 9], Tracer(state=True))
    first, second = run.events[:2]
    assert (first.step, first.op, first.result, first.line) == (0, "*", 14, "total = total + value * 2")
    assert [(o.value, o.source, o.name) for o in first.operands] == [(7, ("input", 1), "x1"), (2, ("const", 2), "")]
    assert first.state == {"values": [5, 7, 9], "total": 5, "value": 7} and first.function == "program"
    assert [o.source for o in second.operands] == [("input", 0), ("step", 0)]
    assert run.answer == 37 and run.answer_sources == (("step", 3),) and run.events[3].state["total"] == 19


def test_what_is_not_traced_is_refused():
    a = TInt(6, "a")
    for bad, message in (
        (lambda: a / 2, "true division, which gives a float; use //"),
        (lambda: 2 / a, "true division"),
        (lambda: a & 1, "bit operations"),
        (lambda: 1 | a, "bit operations"),
        (lambda: a << 2, "bit operations"),
        (lambda: 2 >> a, "bit operations"),
        (lambda: ~a, "bit operations"),
        (lambda: a ^ a, "bit operations"),
        (lambda: float(a), r"float\(\)"),
        (lambda: complex(a), r"complex\(\)"),
        (lambda: a + 1.5, r"TInt \+ float is not traced"),
        (lambda: a + 0.5 * a, r"float is not traced"),
        (lambda: trace(lambda v: 0.5 * v[0], [1, 2]), r"returned float"),
        (lambda: a ** TInt(-1), "negative exponent"),
        (lambda: 2 ** TInt(-1), "negative exponent"),
        (lambda: pow(a, 2, 3.0), "takes integers"),
        (lambda: TInt(1.5), "takes an integer, got float"),
        (lambda: trace(lambda v: "text", [1, 2]), "returned str"),
    ):
        with pytest.raises(TIntError, match=message):
            bad()
    with pytest.raises(ZeroDivisionError):
        a // 0
    with pytest.raises(TypeError):
        a + "x"


def test_leaving_the_tracer_is_written_down_or_refused():
    """Bad input: control flow through bool() and int()."""

    def program(values):
        if values[0] > values[1]:
            return values[0] + int(values[1])
        return values[1] + values[0]

    run = trace(program, [5, 3])
    assert [(left.kind, left.value, left.step) for left in run.left] == [("bool", 1, 1), ("int", 3, 1)]
    assert run.left[0].line == "if values[0] > values[1]:"
    # What came back from int() is a constant of the program, and not an input.
    assert [o.source for o in run.events[1].operands] == [("input", 0), ("const", 3)]
    with pytest.raises(
        TIntError, match=r"bool\(\) of the TInt t0 in `if values\[0\] > values\[1\]:` leaves the tracer"
    ):
        trace(program, [5, 3], Tracer(leaving="raise"))
    with pytest.raises(TIntError, match=r"int\(\) of the TInt"):
        int(Tracer(leaving="raise").input(3))
    with pytest.raises(ValueError, match="leaving should be log or raise"):
        Tracer(leaving="ignore")
    assert repr(TInt(7)) == str(TInt(7)) == f"{TInt(7)}" == "7" and f"{TInt(7):03d}" == "007"


def test_two_tracers_and_endless_programs():
    a, b = TInt(1, "a"), TInt(2, "b")
    c = a + b
    assert c.tracer is a.tracer and c.tracer.events[0].operands[1].source == ("const", 2) and not b.tracer.events

    def endless(values):
        total = values[0]
        while True:
            total = total + 1

    with pytest.raises(RuntimeError, match="more than max_events=50 operations"):
        trace(endless, [1], Tracer(max_events=50))


def test_copies_are_plain():
    assert type(pickle.loads(pickle.dumps(TInt(5)))) is int
    assert {TInt(5): 1}[TInt(5)] == 1  # usable as a key; the comparison is noted


def test_sampling():
    rng = random.Random(3)
    drawn = [Length(1, 3)(rng) for _ in range(3000)]
    sizes = [sum(len(str(v)) == n for v in drawn) / 3000 for n in (1, 2, 3)]
    assert all(abs(s - 1 / 3) < 3 * (2 / 9 / 3000) ** 0.5 for s in sizes)  # the length first, uniform
    flat = [Magnitude(0, 999)(rng) for _ in range(3000)]
    assert abs(sum(v >= 100 for v in flat) / 3000 - 0.9) < 3 * (0.09 / 3000) ** 0.5
    for bad in (lambda: Magnitude(5, 4), lambda: Length(0, 3), lambda: Length(3, 2)):
        with pytest.raises(ValueError, match="low"):
            bad()
