"""Noise in traces: none is none, static stays local, dynamic spreads, and the validator tells them apart."""

import math
import random
from collections import Counter

import pytest

from trainwright.data.synthetic.tint import Tracer, apply, trace
from trainwright.data.synthetic.tint_check import (
    answers_changed,
    check,
    exact_match,
    split_completion,
    trace_validity,
    without_dynamic,
)
from trainwright.data.synthetic.tint_noise import DynamicNoise, StaticNoise, same_length
from trainwright.data.synthetic.tint_tasks import TASKS, Generator, Magnitude, task_named
from trainwright.data.synthetic.tint_text import Template, Visibility, render_lines, text_of


def generator(task="running_sum", n=5, **more):
    count = (2, 2) if TASKS[task].most == 2 else (n, n)
    return Generator(TASKS[task], Magnitude(10, 999), count, **more)


NOISES = [{"static": StaticNoise(0.0, u, m)} for u in ("value", "digit", "line") for m in ("replace", "delete", "swap")]
NOISES += [{"dynamic": (0.0, kind, 10)} for kind in ("add", "same_length")]


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.parametrize("task", sorted(TASKS))
def test_none_of_it_is_the_clean_text(noise, task):
    """(a) p=0 or rho=0: byte-identical."""
    want = [s.text for s in generator(task).samples(20)]
    assert [s.text for s in generator(task, **noise).samples(20)] == want
    loud = {"static": StaticNoise(0.9)} if "static" in noise else {"dynamic": (0.9, "add", 5)}
    assert [s.text for s in generator(task, rho=0.0, **loud).samples(20)] == want
    assert [s.text for s in generator(task, rho=1.0, **loud).samples(20)] != want


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("unit", ["value", "digit", "line"])
@pytest.mark.parametrize("mode", ["replace", "swap", "delete"])
def test_static_noise_leaves_the_answer(task, unit, mode):
    """(c) Never the answer, and but for deleted lines never the number of events."""
    clean, noisy = generator(task), generator(task, static=StaticNoise(0.5, unit, mode))
    changed = 0
    for a, b in zip(clean.samples(40), noisy.samples(40), strict=True):
        assert a.question == b.question and a.answer == b.answer
        if not (unit == "line" and mode == "delete"):
            assert a.trace.count("\n") == b.trace.count("\n")
        if mode == "replace" and unit != "line":
            assert len(a.trace) == len(b.trace)
        changed += a.trace != b.trace
    assert changed > 20


def within(hits, n, p):
    return abs(hits - n * p) <= 3 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize("unit", ["value", "digit", "line"])
def test_static_rates(unit):
    """(d) The share of units, and of samples."""
    noisy, clean = generator(n=6, static=StaticNoise(0.2, unit), rho=0.4), generator(n=6)
    units = chosen = noised = 0
    for a, b in zip(noisy.samples(600), clean.samples(600), strict=True):
        noised += a.noised
        if a.noised:
            values = "".join(c if c.isdigit() else " " for c in b.trace)
            units += {
                "value": len(values.split()), "digit": len(values.replace(" ", "")), "line": b.trace.count("\n")
            }[unit]  # fmt: skip
            chosen += a.static_units
        else:
            assert a.text == b.text
    assert within(chosen, units, 0.2) and within(noised, 600, 0.4)


@pytest.mark.parametrize("kind", ["add", "same_length"])
def test_dynamic_rates_and_how_often_the_answer_changes(kind):
    """(c), (d) Each step with probability p; of a running sum of k steps 1 - (1 - p)^k answers change."""
    p, k, n = 0.1, 5, 3000
    samples = list(generator(n=k + 1, dynamic=(p, kind, 50)).samples(n))
    assert within(sum(len(s.wrong_steps) for s in samples), n * k, p)
    assert all(len(s.run.events) == k for s in samples)
    changed = answers_changed(samples)
    # Errors that cancel make it a little less.
    cancelled = sum(bool(s.wrong_steps) and s.run.answer == s.true_answer for s in samples) / n
    assert cancelled < 0.01 and abs(changed + cancelled - (1 - (1 - p) ** k)) < 3 * math.sqrt(0.25 / n)
    assert all(int(s.answer) == s.run.answer for s in samples)


def test_one_injected_error_spreads_and_every_other_step_is_consistent():
    """(c) Locally right at every step but one; the answer goes with it unless the true one is kept."""
    for wrong in range(4):
        run = trace(
            TASKS["running_sum"].function, [11, 22, 33, 44, 55], Tracer(lambda k, op, x, w=wrong: x + 7 * (k == w))
        )
        ok = [e.result == apply(e.op, [o.value for o in e.operands]) for e in run.events]
        assert ok == [k != wrong for k in range(4)] and run.answer == 165 + 7
        for before, after in zip(run.events, run.events[1:], strict=False):
            assert after.operands[0].value == before.result
    kept = list(generator(dynamic=(0.5, "add", 9), keep_true_answer=True).samples(50))
    assert all(s.answer == str(s.true_answer) for s in kept) and any(s.run.answer != s.true_answer for s in kept)


def test_a_wrong_result_is_always_another():
    rng = random.Random(0)
    for value in (0, 1, 9, 10, 99, 100, -5, -10, 12345):
        drawn = {same_length(value, rng) for _ in range(300)}
        assert value not in drawn and all(len(str(abs(v))) == len(str(abs(value))) for v in drawn)
    assert {same_length(3, rng) for _ in range(300)} == set(range(10)) - {3}
    noise = DynamicNoise(1.0, rng, "add", 1)
    assert {noise(0, "+", 5) for _ in range(100)} == {4, 6}
    assert {noise(0, "<", 1) for _ in range(10)} == {0}  # a comparison has one other result


VERDICTS = {
    "clean": ({}, "clean"),
    "values": ({"static": StaticNoise(0.1)}, "static"),
    "digits": ({"static": StaticNoise(0.1, "digit")}, "static"),
    "lines": ({"static": StaticNoise(0.2, "line", "delete")}, "static"),
    "added": ({"dynamic": (0.1, "add", 10)}, "dynamic"),
    "same length": ({"dynamic": (0.1, "same_length", 10)}, "dynamic"),
}


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("noise", VERDICTS)
def test_the_validator_tells_the_kinds_apart(task, noise):
    """Users report: noise detection. Every wrong text is found, and nearly all are called what they are."""
    settings, want = VERDICTS[noise]
    clean = {s.question: s.completion for s in generator(task).samples(120)}
    found = Counter()
    for s in generator(task, **settings).samples(120):
        finding = check(task, s.inputs, s.completion)
        if s.completion == clean[s.question]:
            assert finding.verdict == "clean", s.text
            continue
        assert finding.verdict != "clean" and finding.answer_right == (s.answer == str(_text(s.true_answer)))
        found[finding.verdict] += 1
        if want == "dynamic" and finding.verdict == "dynamic":
            assert finding.roots == s.wrong_steps
    if want != "clean":
        # A wrong comparison that changes nothing later looks as if it had been changed on paper.
        share = 0.8 if task in ("median", "sort") else 0.95
        assert found[want] / found.total() >= share, found


def _text(value):
    return " ".join(map(str, value)) if isinstance(value, list) else value


def test_the_validator_says_where():
    lines = ["12 + 7 = 19", "19 + 5 = 24", "24 + 9 = 33"]
    values = [12, 7, 5, 9]

    def finding(*changed, answer="33"):
        text = "\n".join(changed or lines) + f"\nanswer: {answer}"
        return check("running_sum", values, text)

    assert finding().verdict == "clean" and finding().answer_right
    spread = finding("12 + 7 = 21", "21 + 5 = 26", "26 + 9 = 35", answer="35")
    assert (spread.verdict, spread.roots, spread.local, spread.answer_right) == ("dynamic", (0,), (), False)
    slip = finding("12 + 7 = 21", "19 + 5 = 24", "24 + 9 = 33")
    assert (slip.verdict, slip.roots, slip.local, slip.answer_right) == ("static", (), (0,), True)
    both = finding("12 + 8 = 19", "19 + 5 = 26", "26 + 9 = 35", answer="35")
    assert (both.verdict, both.roots, both.local) == ("mixed", (1,), (0,))
    short = finding("12 + 7 = 19", "24 + 9 = 33")
    assert short.verdict == "static" and "not the steps of the program" in short.structure
    odd = finding("12 + 7 = 19", "what?", "24 + 9 = 33")
    assert odd.verdict == "static" and odd.structure == "line 1 cannot be read: 'what?'"
    assert finding(answer="34").verdict == "static" and not finding(answer="34").answer_right
    with pytest.raises(ValueError, match="operands and results are visible"):
        check("running_sum", values, "", show=Visibility(operands=False))


def test_rendering_by_switches_and_templates():
    run = trace(TASKS["running_sum"].function, [1, 2, 3], Tracer(state=True))

    def text(show, template=None):
        return text_of(render_lines(run.events[1:], template or Template(), show))

    assert text(Visibility()) == "3 + 3 = 6\n"
    assert text(Visibility(operands=False)) == "= 6\n" and text(Visibility(result=False)) == "3 + 3\n"
    whole = text(Visibility(True, True, True, True))
    assert whole == "total = total + value : 3 + 3 = 6 [values=1 2 3, total=3, value=3]\n"
    own = Template(binary="{step}. {a_name}({a}) {op} {b_name}({b})", result="-> {result}", between=" ; ")
    assert text(Visibility(), own) == "1. t0(3) + x2(3) ; -> 6\n"
    assert own.read("1. t0(3) + x2(3) ; -> 6", Visibility())["result"] == "6"
    with pytest.raises(ValueError, match=r"has no field 'sum'; there are step, line"):
        Template(result="= {sum}")
    with pytest.raises(ValueError, match="not a format string"):
        Template(result="= {result")
    with pytest.raises(ValueError, match="nothing of an event would be visible"):
        Visibility(False, False, False, False)


def test_figures():
    samples = list(generator(dynamic=(0.3, "add", 9)).samples(60))
    right = [f"{s.true_answer}" for s in samples]
    assert exact_match([f"answer: {r}" for r in right], samples) == 1.0
    own = exact_match([s.completion for s in samples], samples)
    assert own == pytest.approx(1 - answers_changed(samples))
    valid = trace_validity([s.completion for s in samples], samples)
    assert valid == sum(not s.wrong_steps for s in samples) / 60
    kept = without_dynamic(samples)
    assert [s.question for s in kept] == [s.question for s in samples if not s.wrong_steps]
    assert split_completion("1 + 1 = 2\nanswer: 2\n") == (["1 + 1 = 2"], "2")
    assert split_completion("1 + 1 = 2\n") == (["1 + 1 = 2"], None)


def test_bad_settings():
    for bad, message in (
        (lambda: StaticNoise(1.5), r"p=1.5 is a probability"),
        (lambda: StaticNoise(-0.1), r"p=-0.1 is a probability"),
        (lambda: generator(rho=2.0), r"rho=2.0 is a probability"),
        (lambda: generator(dynamic=(1.1, "add", 3)), r"p=1.1 is a probability"),
        (lambda: generator(dynamic=(0.1, "add", 0)), "delta should be at least 1"),
        (lambda: generator(dynamic=(0.1, "flip", 3)), "kind should be add or same_length"),
        (lambda: StaticNoise(0.1, "word"), "unit should be"),
        (lambda: StaticNoise(0.1, "value", "drop"), "mode should be"),
        (lambda: Generator(TASKS["addition"], count=(2, 3)), "takes 2..2 inputs"),
        (lambda: Generator(TASKS["polynomial"], count=(2, 2)), "takes 3..any inputs"),
        (lambda: Generator(TASKS["addition"], Magnitude(-5, 5)), "takes no negative inputs"),
        (lambda: task_named("runing_sum"), "did you mean 'running_sum'"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
