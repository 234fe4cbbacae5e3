"""How much passing tests says about generated code, and which code to keep for it.

    passes[s, t]   whether solution s of a problem passes test t           [S, T] bool
    V(s)   = (1 / T) sum_t passes[s, t]                                     [S]
    kept   = runs and V(s) >= tau          tau = 1 is the usual rigid rule; kept sets nest as tau rises
    soft   = V(s) >= tau, or V(s) >= tau_low and judge(s) >= least          a judge speaks for what nearly passes

If each test is itself wrong with rate e, a right solution meets n tests with probability (1 - e)^n: 0.60 for e = 0.05
and n = 10. More tests at the same e keep less of what is right. Of n tests tau allows floor((1 - tau) n) to fail, so a
right solution is kept with P[Binomial(n, e) <= floor((1 - tau) n)]: 0.99 at tau = 0.8.

Paper: The Verification Ceiling, arXiv:2509.20837 (there is no public code; what follows is from its text).
Where we differ: a suite without tests keeps nothing (a vacuous V would be 1), and what does not even run is never kept,
at tau = 0 either.

Everything here is arithmetic on NumPy arrays; verifier.py makes the arrays by running programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
TAUS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # the paper's sweep


def check_share(value: float, key: str) -> float:
    """``value``, or a ConfigError where it is not in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError("should lie in [0, 1]: it is a share of the tests", key=key, value=value)
    return float(value)


def pass_rates(passes: Bools) -> Floats:
    """V(s) for each solution. Raises DataError for an empty suite: nothing is verified by no test."""
    if passes.ndim != 2:
        raise ValueError(f"passes should be [solutions, tests], not of shape {passes.shape}")
    if passes.shape[1] == 0:
        raise DataError("the suite has no tests, and no test is no pass; write tests or leave the problem out")
    return passes.mean(1)


def needed(tests: int, tau: float) -> int:
    """Fewest of ``tests`` tests to be passed: the least k with k / tests >= tau, safe against rounding (0.8 x 10)."""
    return math.ceil(check_share(tau, "tau") * tests - 1e-9)


def kept(passes: Bools, tau: float = 1.0, runs: Bools | None = None) -> Bools:
    """Which solutions stay: those that run and pass at least the share ``tau`` of the tests."""
    pass_rates(passes)
    enough = passes.sum(1) >= needed(passes.shape[1], tau)
    return enough if runs is None else enough & runs


def soft_kept(
    passes: Bools, judged: Floats, *, tau: float = 1.0, tau_low: float = 0.5, least: float = 0.5,
    runs: Bools | None = None,
) -> Bools:  # fmt: skip
    """``kept(tau)``, and of the others those above ``tau_low`` whose judge's score is at least ``least``.

    judged: [S]; NaN where the judge was not asked or gave none, which never speaks for a solution.
    """
    if tau_low > tau:
        raise ConfigError(f"should be at most tau={tau:g}", key="tau_low", value=tau_low)
    return kept(passes, tau, runs) | (kept(passes, tau_low, runs) & (judged >= least))


def subsample(tests: Sequence[str], most: int | None, seed: int = 0) -> list[int]:
    """Positions of at most ``most`` tests, chosen by a hash of their text: their order does not matter.

    Fewer are a part of more: the sets for 1, 3, 5, 10 nest.
    """
    if most is None or most >= len(tests):
        return list(range(len(tests)))
    if most < 1:
        raise ConfigError("should be at least 1: no test is no pass", key="max_tests", value=most)
    order = sorted(range(len(tests)), key=lambda i: derive(seed, "test", tests[i]))
    return sorted(order[:most])


def discrimination(passes: Bools) -> Floats:
    """Variance over the solutions of whether they pass, per test [T]: 0 tells nothing, 0.25 cuts them in half."""
    return passes.var(0) if len(passes) else np.zeros(passes.shape[1])


def useless(passes: Bools) -> Bools:
    """Tests that no solution passes, or every one: [T]. Of fewer than two solutions that is no fault of a test."""
    if len(passes) < 2:
        return np.zeros(passes.shape[1], bool)
    return np.asarray(passes.all(0) | ~passes.any(0), bool)


def blame(differs: Bools) -> tuple[Bools, Bools]:
    """Who is to blame where two runs of a pair differ: (unstable solutions [S], flaky tests [T]).

    A random solution differs under many tests, a flaky test with many solutions: whichever has the greater share of
    differing pairs goes first, a test where they are equal, until no such pair is left. No random pair is kept.
    """
    left = differs.copy()
    solutions, tests = np.zeros(differs.shape[0], bool), np.zeros(differs.shape[1], bool)
    while left.any():
        rows = left.sum(1) / max((~tests).sum(), 1)
        columns = left.sum(0) / max((~solutions).sum(), 1)
        if columns.max() >= rows.max():
            tests[columns.argmax()] = True
            left[:, tests] = False
        else:
            solutions[rows.argmax()] = True
            left[solutions] = False
    return solutions, tests


def survival(error: float, tests: int, tau: float = 1.0) -> float:
    """Probability that a right solution is kept when each test is wrong with rate ``error``, independently."""
    check_share(error, "error")
    allowed = tests - needed(tests, tau)
    return sum(math.comb(tests, k) * error**k * (1 - error) ** (tests - k) for k in range(allowed + 1))


def false_reject(error: float, tests: int, tau: float = 1.0) -> float:
    """1 - survival: at tau = 1 this is 1 - (1 - error)^tests."""
    return 1.0 - survival(error, tests, tau)


@dataclass(frozen=True)
class Agreement:
    """A choice against gold labels. NaN where nothing was kept (precision) or nothing is right (recall)."""

    precision: float
    recall: float
    f1: float
    labelled: int

    def to_dict(self) -> dict[str, Any]:
        return {
            k: (v if isinstance(v, int) or not math.isnan(v) else None)
            for k, v in ((k, getattr(self, k)) for k in ("precision", "recall", "f1", "labelled"))
        }


def agreement(chosen: Bools, gold: Bools) -> Agreement:
    """Precision, recall and F1 of ``chosen`` where ``gold`` says what is right; both [N]."""
    hits = int((chosen & gold).sum())
    precision = hits / int(chosen.sum()) if chosen.any() else math.nan
    recall = hits / int(gold.sum()) if gold.any() else math.nan
    both = int(chosen.sum()) + int(gold.sum())
    return Agreement(precision, recall, 2 * hits / both if both else math.nan, len(gold))


def simulate(
    solutions: int, tests: int, *, error: float, wrong_passes: float = 0.5, right: float = 0.5, seed: int = 0
) -> tuple[Bools, Bools]:
    """Outcomes as the model above has them: (passes [solutions, tests], gold [solutions]).

    A share ``right`` of the solutions is right and fails a test with probability ``error``; a wrong one passes with
    ``wrong_passes``.
    """
    rng = np.random.default_rng(seed)
    gold = np.arange(solutions) < round(solutions * right)
    chance = np.where(gold, 1.0 - error, wrong_passes)
    return rng.random((solutions, tests)) < chance[:, None], gold


def sweep(
    rates: Sequence[float], counts: Sequence[int], gold: Sequence[bool | None], taus: Sequence[float] = TAUS
) -> list[dict[str, Any]]:
    """Per tau: how many would be kept, and against gold labels where there are some. rates: of what runs, all problems.

    counts: the number of tests behind each rate.
    """
    passed = np.array([round(r * n) for r, n in zip(rates, counts, strict=True)], int)
    labelled = np.array([g is not None for g in gold], bool)
    labels = np.array([bool(g) for g in gold], bool)
    rows = []
    for tau in taus:
        least = np.array([needed(n, tau) for n in counts], int)
        chosen = passed >= least
        row: dict[str, Any] = {"tau": tau, "kept": int(chosen.sum())}
        if labelled.any():
            row |= agreement(chosen[labelled], labels[labelled]).to_dict()
        rows.append(row)
    return rows
