"""B036, arithmetic: what passing tests says, against closed forms and simulations."""

import itertools
import math

import numpy as np
import pytest

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.synthetic.verification import (
    TAUS,
    agreement,
    blame,
    discrimination,
    false_reject,
    kept,
    needed,
    pass_rates,
    simulate,
    soft_kept,
    subsample,
    survival,
    sweep,
    useless,
)

GRID = np.random.default_rng(0).random((40, 10)) < 0.7
RUNS = np.random.default_rng(1).random(40) < 0.8


def three_sigma(p, n):
    return 3 * math.sqrt(p * (1 - p) / n)


def test_a_kept_sets_nest_and_their_ends_are_what_they_should_be():
    sets = [kept(GRID, tau, RUNS) for tau in np.linspace(0, 1, 21)]
    assert (sets[0] == RUNS).all()
    assert (sets[-1] == (GRID.all(1) & RUNS)).all()
    for wider, narrower in itertools.pairwise(sets):
        assert not (narrower & ~wider).any()
    assert 0 < sets[12].sum() < sets[4].sum() <= RUNS.sum()


@pytest.mark.parametrize(("tests", "tau", "least"), [(10, 0.8, 8), (10, 0.3, 3), (5, 0.6, 3), (3, 0.7, 3), (7, 0, 0)])
def test_rounding_costs_no_test(tests, tau, least):
    assert needed(tests, tau) == least
    passes = np.arange(tests)[None, :] < least
    assert kept(passes, tau).all()
    if least:
        assert not kept(np.arange(tests)[None, :] < least - 1, tau).any()


def test_b_right_solutions_survive_as_the_binomial_says():
    n = 20_000
    assert survival(0.05, 10) == pytest.approx(0.95**10, abs=1e-12) == pytest.approx(0.599, abs=5e-4)
    assert survival(0.05, 10, 0.8) == pytest.approx(0.988, abs=6e-4)
    assert false_reject(0.05, 10) == pytest.approx(1 - 0.95**10)
    passes, gold = simulate(n, 10, error=0.05, right=1.0)
    assert gold.all()
    for tau, expected in ((1.0, 0.599), (0.8, 0.9885)):
        assert abs(kept(passes, tau).mean() - expected) < three_sigma(expected, n)


def test_c_more_tests_lower_the_recall_and_raise_the_precision():
    recalls, precisions = [], []
    for tests in (1, 3, 5, 10, 20):
        passes, gold = simulate(20_000, tests, error=0.05)
        found = agreement(kept(passes), gold)
        assert abs(found.recall - 0.95**tests) < three_sigma(0.95**tests, 10_000)
        recalls.append(found.recall)
        precisions.append(found.precision)
    assert recalls == sorted(recalls, reverse=True) and len(set(recalls)) == 5
    assert precisions == sorted(precisions) and precisions[0] < 0.7 < 0.999 < precisions[-1]


@pytest.mark.parametrize("seed", range(3))
def test_effect_relaxing_gains_f1(seed):
    passes, gold = simulate(4000, 10, error=0.05, wrong_passes=0.5, seed=seed)
    rigid, relaxed = (agreement(kept(passes, tau), gold) for tau in (1.0, 0.8))
    # closed form: 0.748 and 0.968
    assert relaxed.f1 > rigid.f1 + 0.1 and abs(rigid.f1 - 0.748) < 0.02 and abs(relaxed.f1 - 0.968) < 0.02
    assert relaxed.precision < rigid.precision


def test_weak_tests_make_relaxing_a_loss():
    """What users report: relaxing helps only with strong, varied tests."""
    passes, gold = simulate(4000, 10, error=0.02, wrong_passes=0.85)
    assert agreement(kept(passes, 0.8), gold).f1 < agreement(kept(passes, 1.0), gold).f1


def test_soft_verification_lets_a_judge_speak_for_near_passes():
    passes = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0]], bool)
    judged = np.array([0.0, 0.9, 0.2, 0.9, np.nan])
    stay = soft_kept(passes, judged, tau=1.0, tau_low=0.75, least=0.5)
    assert stay.tolist() == [True, True, False, False, False]
    assert (soft_kept(passes, judged, tau=1.0, tau_low=1.0) == kept(passes)).all()
    nobody = soft_kept(passes, judged, tau=1.0, tau_low=0.75, runs=np.zeros(5, bool))
    assert not nobody.any()
    with pytest.raises(ConfigError, match="at most tau"):
        soft_kept(passes, judged, tau=0.5, tau_low=0.75)


def test_subsamples_nest_and_do_not_depend_on_the_order():
    tests = [f"assert f({i}) == {i}" for i in range(30)]
    sets = [{tests[i] for i in subsample(tests, k, seed=3)} for k in (1, 3, 5, 10, None)]
    assert [len(s) for s in sets] == [1, 3, 5, 10, 30]
    assert all(a <= b for a, b in itertools.pairwise(sets))
    turned = tests[::-1]
    assert {turned[i] for i in subsample(turned, 5, seed=3)} == sets[2]
    assert {tests[i] for i in subsample(tests, 5, seed=4)} != sets[2]
    with pytest.raises(ConfigError):
        subsample(tests, 0)


def test_discrimination_and_useless_tests():
    passes = np.array([[1, 0, 1, 1], [1, 0, 0, 1], [1, 0, 1, 0], [1, 0, 0, 1]], bool)
    assert discrimination(passes).tolist() == [0.0, 0.0, 0.25, 0.1875]
    assert useless(passes).tolist() == [True, True, False, False]
    # dropping what all pass or none changes no order of the solutions
    order = np.argsort(-pass_rates(passes), kind="stable")
    assert (order == np.argsort(-pass_rates(passes[:, ~useless(passes)]), kind="stable")).all()
    assert not useless(passes[:1]).any()


def test_blame_finds_the_side_that_differs():
    differs = np.zeros((5, 6), bool)
    differs[:, 2] = True  # a flaky test
    differs[3, [0, 4, 5]] = True  # a random solution
    solutions, tests = blame(differs)
    assert solutions.tolist() == [False, False, False, True, False] and tests.tolist() == [0, 0, 1, 0, 0, 0]
    one = np.array([[False, True, False]])
    solutions, tests = blame(one)
    assert not solutions.any() and tests.tolist() == [False, True, False]
    for seed in range(20):
        wild = np.random.default_rng(seed).random((6, 7)) < 0.3
        solutions, tests = blame(wild)
        assert not wild[~solutions][:, ~tests].any(), "no differing pair is left"


def test_agreement_and_sweep():
    chosen, gold = np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 0], bool)
    found = agreement(chosen, gold)
    assert (found.precision, found.recall, found.f1, found.labelled) == (0.5, 0.5, 0.5, 4)
    assert agreement(~gold & gold, gold).to_dict()["precision"] is None
    rows = sweep([1.0, 0.8, 0.5, -1.0], [10, 10, 10, 10], [True, True, False, None])
    assert [r["tau"] for r in rows] == list(TAUS) and [r["kept"] for r in rows] == [3, 3, 3, 2, 2, 1]
    assert rows[-1]["recall"] == 0.5 and rows[-2]["f1"] == 1.0
    assert "precision" not in sweep([1.0], [3], [None])[0]


def test_bad_input():
    with pytest.raises(DataError, match="no tests"):
        kept(np.zeros((3, 0), bool), 0.0)
    for tau in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match=r"\[0, 1\]"):
            kept(GRID, tau)
    with pytest.raises(ValueError, match="solutions, tests"):
        pass_rates(np.zeros(3, bool))
