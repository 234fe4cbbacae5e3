"""What is said of arms, with results made by hand."""

import io

import pytest
from rich.console import Console

from trainwright.cli import compare as cli
from trainwright.lab.arms import Arm
from trainwright.lab.budget import Budget
from trainwright.lab.comparison import Comparison, Plan
from trainwright.lab.render import forest, html_page, markdown, rates
from trainwright.lab.summary import summarise
from trainwright.lab.trial import TrialResult
from trainwright.lab.tuning import Tuned

REASON = "stopped at step 28 by non_finite: gradient norm is nan for 10 steps in a row; lower the learning rate"


def result(loss, **more):
    known = {"weights_digest": "w", "data_digest": "d", "curve": [[0, 0.0, 5.0], [100, 10.0, loss]]}
    return TrialResult("ok", val_loss=loss, tokens_per_s=1e3, **{**known, **more})


def diverged():
    return TrialResult("diverged", error=REASON, weights_digest="w", data_digest="d")


def comparison(results, tuned=None):
    """Of ``{arm: [result of each seed]}``, the first the baseline."""
    names = list(results)
    seeds = list(range(len(results[names[0]])))
    plan = Plan({}, [Arm(n) for n in names], {}, names[0], seeds, Budget("tokens", 100), "cpu")
    by_seed = {n: dict(enumerate(each)) for n, each in results.items()}
    keys = {n: {seed: f"{n}{seed}" for seed in seeds} for n in names}
    arms, notes = summarise(plan, {n: {} for n in names}, tuned or {}, {}, by_seed, keys)
    return Comparison(arms, names[0], "r", plan.budget, seeds, 1, notes=notes)


def losses(*values, **more):
    return [result(v, **more) for v in values]


def test_the_seeds_that_survived_give_no_verdict():
    ours = [result(1.0), result(1.1), diverged()]
    found = comparison({"base": losses(2.0, 2.1, 2.0), "wild": ours, "good": losses(1.9, 2.0, 1.9)})
    wild = found["wild"]
    assert (wild.status, wild.verdict, wild.difference, wild.difference_ci95) == ("diverged", "diverged", None, None)
    assert wild.tokens_to_baseline is None and wild.error == f"1 of 3 seeds: {REASON}"
    assert found["good"].verdict == "lower loss"
    chart = forest(found)
    assert chart["data"][0]["y"] == ["good"] and chart["data"][1]["y"] == ["wild"]
    assert chart["data"][1]["text"] == ["diverged"]
    found = comparison({"base": ours, "good": losses(0.9, 1.0, 0.9)})
    assert found["good"].verdict == "none: the baseline diverged" and found["good"].difference is None
    assert forest(found) is None


def test_the_reason_of_a_bad_end_stands_below_the_table(monkeypatch):
    found = comparison({"base": losses(2.0, 2.1), "wild": [diverged(), diverged()]})
    screen = Console(file=io.StringIO(), width=100)
    monkeypatch.setattr("trainwright.cli.output.out", lambda: screen)
    cli.show(found)
    lines = screen.file.getvalue().splitlines()
    below = next(i for i, line in enumerate(lines) if line.startswith("wild diverged: 2 of 2 seeds: stopped"))
    assert REASON in "".join(lines[below : below + 2]) and below < 20
    row = next(i for i, line in enumerate(lines) if line.startswith("wild (diverged)"))
    assert not any("stopped" in line or "gradient" in line for line in lines[:below]) and row < below
    assert REASON in markdown(found) and REASON in html_page(found)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({}, "same initial weights and same data order in all arms"),
        ({"weights_digest": ""}, "not checked for every seed: other"),
        ({"data_digest": ""}, "not checked for every seed: other"),
        ({"weights_digest": "x"}, "different initial weights than the baseline: other"),
        ({"data_digest": "x"}, "different data order than the baseline: other"),
    ],
)
def test_the_same_start_is_said_where_every_pair_has_digests(theirs, said):
    pairs = [result(1.0), result(1.0, **theirs)]
    found = comparison({"base": losses(2.0, 2.0), "same": losses(2.0, 2.0), "other": pairs})
    assert any(said in note for note in found.notes)
    alike = [note for note in found.notes if note.startswith("same initial weights and same data order")]
    assert alike and ("in all arms" in alike[0]) == (not theirs) and "first 2 batches" in alike[0]
    assert theirs == {} or alike[0].endswith(": same")


def test_without_any_digest_nothing_is_said_to_be_the_same():
    none = {"weights_digest": "", "data_digest": ""}
    found = comparison({"base": losses(2.0, 2.0, **none), "other": losses(1.0, 1.0, **none)})
    assert not any("same initial weights" in note for note in found.notes)


def test_shared_hardware_is_known_from_the_trials():
    found = comparison({"base": losses(2.0, 2.0, jobs=2), "other": losses(1.0, 1.0)})
    assert "2 of 4 trials ran up to 2 at the same time, so speeds are those of shared hardware" in found.notes
    found = comparison({"base": losses(2.0, 2.0), "other": losses(1.0, 1.0)})
    assert not any("shared" in note for note in found.notes)


def test_results_of_different_code_are_named():
    old, new = {"environment": {"code": "abc"}}, {"environment": {"code": "def"}}
    found = comparison({"base": losses(2.0, 2.0, **old), "other": losses(1.0, 1.0, **new)})
    assert "the package's source changed while the trials ran: code abc (2), def (2)" in found.notes
    found = comparison({"base": losses(2.0, **old), "other": losses(1.0, **old)})
    assert not any("source changed" in note for note in found.notes) and "(code abc)" in markdown(found)


@pytest.mark.parametrize(
    ("values", "axis", "places"),
    [
        ([1e-3, 1e-2, 1e-1], "log", [1e-3, 1e-2, 1e-1]),
        ([0.0, 2.5, 5.0], "linear", [0.0, 2.5, 5.0]),
        ([0.8, 0.9, 0.99], "linear", [0.8, 0.9, 0.99]),
        (["cosine", "linear", "wsd"], "category", ["schedule=cosine", "schedule=linear", "schedule=wsd"]),
        ([True, False], "category", ["schedule=True", "schedule=False"]),
    ],
)
def test_every_tuned_value_has_its_place_in_the_chart(values, axis, places):
    tuned = Tuned([{"schedule": v} for v in values], 1, [(i, 0.25, 2.0 + i) for i in range(len(values))])
    chart = rates(comparison({"base": losses(2.0), "other": losses(1.0)}, {"other": tuned}))
    assert chart["layout"]["xaxis"]["type"] == axis and chart["data"][0]["x"] == places
    assert chart["data"][0]["y"] == [2.0 + i for i in range(len(values))]


def test_two_tuned_settings_at_once_are_charted_in_words():
    points = [{"lr": 0.1, "beta": b} for b in (0.8, 0.9)]
    tuned = Tuned(points, 0, [(0, 0.25, 2.0), (1, 0.25, float("inf"))])
    chart = rates(comparison({"base": losses(2.0), "other": losses(1.0)}, {"other": tuned}))
    assert chart["data"][0]["x"] == ["lr=0.1, beta=0.8"] and chart["layout"]["xaxis"]["type"] == "category"
