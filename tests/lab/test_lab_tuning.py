import math

import pytest

from trainwright.core.errors import ConfigError
from trainwright.lab.tuning import Request, edge, halve, points, trials_per_arm

RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]


class Runner:
    """Loss by distance from the best rate, which moves when the budget does; rates above the cliff diverge."""

    def __init__(self, best, cliff=math.inf):
        self.best, self.cliff, self.asked = best, cliff, []

    def __call__(self, requests):
        self.asked += requests
        out = []
        for r in requests:
            rate, best = RATES[r.point], self.best[r.arm]
            shift = 1.0 if r.fraction == 0.5 else 1.5  # short runs like higher rates
            out.append(math.inf if rate > self.cliff else abs(math.log(rate / (best * shift))) + 2)
        return out


def test_each_arm_gets_its_best_rate_from_the_same_number_of_trials():
    run = Runner({"a": 3e-3, "b": 1e-3}, cliff=3e-2)
    found = halve({"a": {"optimizer.lr": RATES}, "b": {"optimizer.lr": RATES}}, run)
    assert found["a"].chosen == {"optimizer.lr": 3e-3} and found["b"].chosen == {"optimizer.lr": 1e-3}
    for arm in "ab":
        mine = [r for r in run.asked if r.arm == arm]
        assert len([r for r in mine if r.fraction == 0.25]) == 7 and len([r for r in mine if r.fraction == 0.5]) == 4
        assert len(mine) == trials_per_arm(7) == 11 == len(found[arm].losses)
        assert not found[arm].edge
    # the four nearest to 1.5 times the best
    assert {RATES[r.point] for r in run.asked if r.arm == "a" and r.fraction == 0.5} == {1e-3, 3e-3, 1e-2, 3e-2}


def test_the_longer_rung_decides():
    def run(requests):
        return [{0.25: [1.0, 1.1, 9, 9], 0.5: [2.0, 1.0, 9, 9]}[r.fraction][r.point] for r in requests]

    found = halve({"a": {"lr": [1, 2, 3, 4]}}, run)
    assert found["a"].best == 1 and found["a"].losses == [
        (0, 0.25, 1.0), (1, 0.25, 1.1), (2, 0.25, 9), (3, 0.25, 9), (0, 0.5, 2.0), (1, 0.5, 1.0)
    ]  # fmt: skip


def test_diverged_points_come_last_and_all_of_them_leave_none():
    found = halve({"a": {"lr": [1, 2, 3]}}, lambda requests: [math.nan, math.inf, 5.0][: len(requests)])
    assert found["a"].chosen == {"lr": 3}
    grids = {"a": {"lr": [1, 2]}, "b": {"lr": [1, 2]}}
    found = halve(grids, lambda requests: [math.inf if r.arm == "a" else 1.0 for r in requests])
    assert found["a"].best is None and found["a"].chosen == {} and found["b"].chosen == {"lr": 1}


def test_small_grids_skip_rungs_of_one():
    asked = []

    def run(requests):
        asked.extend(requests)
        return [float(r.point) for r in requests]

    assert halve({"a": {"lr": [5]}}, run)["a"].chosen == {"lr": 5} and not asked and trials_per_arm(1) == 0
    assert halve({"a": {"lr": [5, 6]}}, run)["a"].chosen == {"lr": 5}
    assert asked == [Request("a", 0, 0.25), Request("a", 1, 0.25)] and trials_per_arm(2) == 2


def test_an_unequal_number_of_points_is_refused():
    with pytest.raises(ConfigError, match=r"same number of points.*a: 2, b: 3"):
        halve({"a": {"lr": [1, 2]}, "b": {"lr": [1, 2, 3]}}, lambda rs: [1.0] * len(rs))


def test_the_edge_of_the_grid_is_said():
    assert edge({"lr": [1e-3, 1e-2]}, {"lr": 1e-2}) == "best rate at the edge of the grid (lr=0.01): widen it"
    assert edge({"lr": [1, 2, 3]}, {"lr": 2}) == "" == edge({"lr": [5]}, {"lr": 5})
    assert edge({"inner": ["a", "b"]}, {"inner": "a"}) == "", "names have no order"
    product = points({"lr": [1, 2], "wd": [0, 1]})
    assert product[1] == {"lr": 1, "wd": 1} and len(product) == 4
