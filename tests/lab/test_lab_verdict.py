"""Verdicts by table: what is measured in, what is said out."""

import pytest

from trainwright.lab.claim import Check
from trainwright.lab.summary import ArmResult
from trainwright.lab.trial import TrialResult
from trainwright.lab.verdict import evaluate, judge

SHOWN, NOT, AGAINST = "shown", "not shown", "contradicted"


def arm(name, losses, status="ok", role="base", **figures):
    results = {
        seed: TrialResult("ok", val_loss=loss, curve=[[0, 0.0, 5.0], [100, 10.0, loss]], **figures)
        for seed, loss in enumerate(losses)
    }
    return ArmResult(name, role, status=status, error="" if status == "ok" else "because", results=results)


def check(**kwargs):
    return Check.model_validate({"quantity": "val_loss", "arm": "m", "versus": "b", **kwargs})


@pytest.mark.parametrize(
    ("threshold", "ours", "theirs", "outcome"),
    [
        # differences -0.10, -0.11, -0.09: interval about [-0.125, -0.075]
        ({"less_by": 0}, [1.90, 1.89, 1.91], [2, 2, 2], SHOWN),
        ({"less_by": 0.05}, [1.90, 1.89, 1.91], [2, 2, 2], SHOWN),
        ({"less_by": 0.08}, [1.90, 1.89, 1.91], [2, 2, 2], NOT),  # the mean does, the interval does not
        ({"less_by": 0.2}, [1.90, 1.89, 1.91], [2, 2, 2], NOT),  # right side, too small
        ({"greater_by": 0}, [1.90, 1.89, 1.91], [2, 2, 2], AGAINST),
        ({"greater_by": 0.05}, [2.1, 2.11, 2.09], [2, 2, 2], SHOWN),
        ({"less_by": 0}, [2.1, 2.11, 2.09], [2, 2, 2], AGAINST),
        ({"less_by": 0}, [2.1, 1.9, 2.0], [2, 2, 2], NOT),  # covers zero
        ({"less_by": -0.2}, [2.1, 2.11, 2.09], [2, 2, 2], SHOWN),  # within the tolerance
        ({"less_by": -0.11}, [2.1, 2.11, 2.09], [2, 2, 2], NOT),  # worse, but perhaps within the tolerance
        ({"less_by": -0.05}, [2.1, 2.11, 2.09], [2, 2, 2], AGAINST),
        ({"ratio_at_most": 0.97}, [1.90, 1.89, 1.91], [2, 2, 2], SHOWN),
        ({"ratio_at_most": 0.9}, [1.90, 1.89, 1.91], [2, 2, 2], NOT),
        ({"ratio_at_most": 0.9}, [2.1, 2.11, 2.09], [2, 2, 2], AGAINST),
        ({"ratio_at_least": 1.03}, [2.1, 2.11, 2.09], [2, 2, 2], SHOWN),
        ({"ratio_at_least": 1.03}, [1.90, 1.89, 1.91], [2, 2, 2], AGAINST),
        ({"less_by": 0}, [2.0, 2.0], [2.0, 2.0], SHOWN),  # equal is enough where not strict
        ({"less_by": 0, "strict": True}, [2.0, 2.0], [2.0, 2.0], NOT),
        # pairing: seeds differ by far more than the arms
        ({"less_by": 0}, [0.9, 4.92, 8.91], [1, 5, 9], SHOWN),
        # one seed can be no proof against
        ({"less_by": 0}, [1.9], [2.0], SHOWN),
        ({"less_by": 0}, [2.1], [2.0], NOT),
    ],
)
def test_losses(threshold, ours, theirs, outcome):
    result = evaluate(check(**threshold), arm("m", ours), arm("b", theirs))
    assert result.outcome == outcome, result
    assert (result.interval is None) == (len(ours) == 1) == (result.reason == "one seed: no interval")


@pytest.mark.parametrize(
    ("quantity", "threshold", "ours", "theirs", "outcome"),
    [
        ("optimizer_state_bytes", {"ratio_at_most": 0.375}, 3000, 8000, SHOWN),  # exact: one seed says all
        ("optimizer_state_bytes", {"ratio_at_most": 0.375, "strict": True}, 3000, 8000, NOT),
        ("optimizer_state_bytes", {"ratio_at_most": 0.3}, 3000, 8000, NOT),
        ("optimizer_state_bytes", {"ratio_at_most": 0.5}, 9000, 8000, AGAINST),
        ("tokens_per_s", {"ratio_at_least": 1.0}, 900.0, 1000.0, NOT),  # one noisy figure is no proof against
        ("tokens_per_s", {"ratio_at_least": 0.8}, 900.0, 1000.0, SHOWN),
    ],
)
def test_other_figures_with_one_seed(quantity, threshold, ours, theirs, outcome):
    a, b = arm("m", [2.0], **{quantity: ours}), arm("b", [2.0], **{quantity: theirs})
    result = evaluate(check(quantity=quantity, **threshold), a, b)
    assert result.outcome == outcome, result


def test_arms_that_did_not_end_well_show_nothing_and_are_named():
    wild, broken = arm("m", [], "diverged", "method"), arm("b", [], "failed")
    for ours, theirs in ((wild, arm("b", [2.0])), (arm("m", [1.0]), broken)):
        result = evaluate(check(less_by=0), ours, theirs)
        assert result.outcome == NOT and "because" in result.reason
    arms = {"m": arm("m", [], "diverged", "method"), "b": arm("b", [2.0])}
    verdict, reason = judge([evaluate(check(less_by=0), arms["m"], arms["b"])], arms)
    assert verdict == "not shown at this scale" and "method arm m diverged" in reason


def test_divergence_itself_can_be_checked():
    stable, wild = arm("m", [2.0, 2.0]), arm("b", [2.0, 2.0], "diverged")
    wild.results = {seed: TrialResult("diverged") for seed in (0, 1)}
    assert evaluate(check(quantity="diverged", less_by=0.5), stable, wild).outcome == SHOWN
    assert evaluate(check(quantity="diverged", less_by=0.5), wild, stable).outcome != SHOWN
    wild.results = {}  # its whole grid diverged
    assert evaluate(check(quantity="diverged", less_by=0.5), stable, wild).outcome == SHOWN


def test_tokens_to_loss():
    base, ours = arm("b", [3.0, 3.0]), arm("m", [1.0, 1.0])  # ours falls from 5 to 1: at 3 after half of the way
    result = evaluate(check(quantity="tokens_to_loss", ratio_at_most=0.6), ours, base)
    assert (result.outcome, result.value, result.arm, result.versus) == (SHOWN, 0.5, 50, 100)
    never = evaluate(check(quantity="tokens_to_loss", ratio_at_most=0.6), base, ours)
    assert "never reached the loss" in never.reason and never.value is None


def test_probes_and_differences_of_figures():
    ours, base = arm("m", [2.0, 2.1]), arm("b", [2.0, 2.1])
    for a, gap in ((ours, 0.1), (base, 0.4)):
        for seed, r in a.results.items():
            r.probes = {"truncated_loss": r.val_loss + gap + 0.001 * seed, "live_loss": None}
    result = evaluate(check(quantity="truncated_loss - val_loss", less_by=0.25), ours, base)
    assert result.outcome == SHOWN and result.value == pytest.approx(-0.3)
    missing = evaluate(check(quantity="live_loss", less_by=0), ours, base)
    assert missing.outcome == NOT and "not measured" in missing.reason


def test_an_arm_that_lost_at_the_edge_of_its_grid_decides_nothing():
    def outcome(ours, theirs, ours_edge="", theirs_edge=""):
        a, b = arm("m", ours), arm("b", theirs)
        a.edge, b.edge = ours_edge, theirs_edge
        return evaluate(check(less_by=0), a, b)

    worse, better = [2.1, 2.11, 2.09], [2.0, 2.0, 2.0]
    assert outcome(worse, better).outcome == AGAINST and outcome(better, worse).outcome == SHOWN
    assert outcome(worse, better, theirs_edge="x").outcome == AGAINST  # a better baseline would be further away
    assert outcome(better, worse, ours_edge="x").outcome == SHOWN
    for lost in (outcome(worse, better, ours_edge="x"), outcome(better, worse, theirs_edge="x")):
        assert lost.outcome == NOT and "edge of the grid" in lost.reason


def test_an_arm_that_lost_untuned_to_a_tuned_one_decides_nothing():
    def outcome(ours, theirs, ours_tuned, theirs_tuned, role="method"):
        a, b = arm("m", ours, role=role), arm("b", theirs)
        a.tuning, b.tuning = [{"setting": {}}] * ours_tuned, [{"setting": {}}] * theirs_tuned
        return evaluate(check(less_by=0), a, b)

    worse, better = [2.1, 2.11, 2.09], [2.0, 2.0, 2.0]
    for tuned in ((0, 0), (3, 3), (3, 0)):
        assert outcome(worse, better, *tuned).outcome == AGAINST
    for tuned in ((0, 0), (3, 3), (0, 3)):
        assert outcome(better, worse, *tuned).outcome == SHOWN
    for lost in (outcome(worse, better, 0, 3), outcome(better, worse, 3, 0)):
        assert lost.outcome == NOT and "lost without being tuned" in lost.reason
    assert outcome(worse, better, 0, 3, role="control").outcome == AGAINST, "a control is meant to be as it is"


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([SHOWN, SHOWN], "shown"),
        ([SHOWN, NOT], "not shown at this scale"),
        ([SHOWN, AGAINST], "contradicted"),
        ([NOT, AGAINST], "contradicted"),
    ],
)
def test_the_claim_is_as_its_checks(outcomes, verdict):
    losses = {SHOWN: [1.90, 1.89, 1.91], NOT: [2.1, 1.9, 2.0], AGAINST: [2.1, 2.11, 2.09]}
    arms = {"b": arm("b", [2, 2, 2])} | {o: arm("m", losses[o]) for o in outcomes}
    results = [evaluate(check(less_by=0), arms[o], arms["b"]) for o in outcomes]
    assert [r.outcome for r in results] == outcomes and judge(results, arms)[0] == verdict
    one = evaluate(check(less_by=0), arm("m", [1.0]), arm("b", [2.0]))
    assert judge([one], {})[0] == "shown (one seed)"


def test_checks_are_said_in_words():
    assert check(less_by=0.05).words() == "val_loss of m is below that of b by at least 0.05"
    assert check(less_by=-0.05).words() == "val_loss of m is above that of b by no more than 0.05"
    assert check(less_by=0, strict=True).words() == "val_loss of m is below that of b"
    assert check(ratio_at_least=2).words() == "val_loss of m is at least 2 times that of b"
