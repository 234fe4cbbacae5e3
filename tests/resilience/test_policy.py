import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.resilience.base import SEVERITY, Verdict
from trainwright.resilience.policy import Policy

OK = ("quiet", Verdict())


def verdict(action, monitor="m", since=None):
    return monitor, Verdict(action, f"{monitor} saw it", monitor, since)


def test_all_quiet_is_ok_without_events():
    decision = Policy().decide(1, [OK, OK])
    assert decision.action == "ok" and decision.events == () and decision.lr_multiplier == 1.0


@given(st.lists(st.sampled_from(sorted(SEVERITY)), max_size=6))
def test_the_most_severe_wins_and_every_alarm_is_recorded(actions):
    decision = Policy(max_rollbacks=1).decide(7, [verdict(a, f"m{i}") for i, a in enumerate(actions)])
    assert SEVERITY[decision.action] == max([SEVERITY[a] for a in actions], default=0)
    raised = [(a, f"m{i}") for i, a in enumerate(actions) if a != "ok"]
    assert [(e["event"], e["monitor"]) for e in decision.events] == raised
    assert all(e["step"] == 7 for e in decision.events)
    json.dumps(decision.events, allow_nan=False)


def test_rollbacks_lower_the_rate_and_end_in_a_stop():
    policy = Policy(max_rollbacks=2, lr_factor=0.5, skip_steps=3)
    first, second, third = (policy.decide(i, [verdict("rollback", since=i - 2)]) for i in (10, 20, 30))
    assert [first.action, second.action, third.action] == ["rollback", "rollback", "stop"]
    assert [first.lr_multiplier, second.lr_multiplier, third.lr_multiplier] == [0.5, 0.25, 0.25]
    assert [first.skip_steps, third.skip_steps] == [3, 0] and first.since == 8
    assert "2 rollbacks" in third.reason and [e["event"] for e in third.events] == ["rollback", "stop"]


def test_no_rollback_allowed_means_stop_at_once():
    assert Policy(max_rollbacks=0).decide(5, [verdict("rollback")]).action == "stop"


def test_skips_are_free():
    policy = Policy(max_rollbacks=1)
    for step in range(100):
        assert policy.decide(step, [verdict("skip")]).action == "skip"
    assert policy.decide(100, [verdict("rollback")]).action == "rollback" and policy.lr_multiplier == 0.5


def test_state_round_trip():
    policy, other = Policy(max_rollbacks=1), Policy(max_rollbacks=1)
    policy.decide(1, [verdict("rollback")])
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert other.lr_multiplier == 0.5 and other.decide(2, [verdict("rollback")]).action == "stop"


@pytest.mark.parametrize("bad", [{"max_rollbacks": -1}, {"lr_factor": 0.0}, {"lr_factor": 1.5}, {"skip_steps": -1}])
def test_bounds(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Policy(**bad)
