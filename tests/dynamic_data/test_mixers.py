"""Mixers alone: proportions by the published equations, held against float64 written out here."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.data.mixers.base import MixContext, MixStats, find_name, short_names
from trainwright.data.mixers.doremi import DoReMiMixer
from trainwright.data.mixers.odm import OdmMixer, exploration
from trainwright.data.mixers.schedule import ScheduleMixer, apportion, whole_rows
from trainwright.data.mixers.static import StaticMixer

EVEN = {"a": 1.0, "b": 1.0, "c": 1.0}


def stats(step=1, **losses):
    return MixStats(step, losses)


def test_odm_follows_exp3_with_a_moving_average():
    mixer, pi, rewards = OdmMixer(EVEN), [1 / 3] * 3, [0.0] * 3
    losses = [(3.0, 2.0, 1.0), (2.5, 2.4, 1.1), (2.0, 2.2, 1.3)]
    for t, line in enumerate(losses, 1):
        rewards = [0.9 * r + 0.1 * loss / p for r, loss, p in zip(rewards, line, pi, strict=True)]
        before = 1 / 3 if t == 1 else min(1 / 3, math.sqrt(math.log(3) / (3 * (t - 1))))
        now = min(1 / 3, math.sqrt(math.log(3) / (3 * t)))
        e = [math.exp(before * r) for r in rewards]
        pi = [(1 - 3 * now) * x / sum(e) + now for x in e]
        found = mixer.mix(stats(t, **dict(zip("abc", line, strict=True))))
        assert list(found.values()) == pytest.approx(pi, abs=1e-14)


def test_odm_leaves_the_reward_of_a_source_that_was_not_drawn():
    mixer = OdmMixer(EVEN)
    mixer.mix(stats(a=1.0, b=2.0, c=3.0))
    before = mixer.rewards.copy()
    mixer.mix(stats(a=1.0, c=math.nan))
    assert (mixer.rewards[1:] == before[1:]).all() and mixer.rewards[0] != before[0]


def test_odm_of_one_source_gives_it_all():
    mixer = OdmMixer({"only": 2.0})
    for t in range(1, 5):
        assert mixer.mix(stats(t, only=3.0)) == {"only": 1.0}


@settings(max_examples=60, deadline=None)
@given(k=st.integers(2, 8), data=st.data())
def test_proportions_are_at_least_the_floor_and_sum_to_one(k, data):
    names = [f"s{i}" for i in range(k)]
    odm = OdmMixer(dict.fromkeys(names, 1.0))
    doremi = DoReMiMixer(dict.fromkeys(names, 1.0), eta=2.0, smoothing=0.01)
    for t in range(1, 9):
        losses = data.draw(st.lists(st.floats(0, 20), min_size=k, max_size=k))
        pi = list(odm.mix(MixStats(t, dict(zip(names, losses, strict=True)))).values())
        assert math.fsum(pi) == pytest.approx(1, abs=1e-12) and min(pi) >= exploration(k, t) - 1e-15
        a = list(doremi.mix(MixStats(t, {}, dict(zip(names, losses, strict=True)))).values())
        assert math.fsum(a) == pytest.approx(1, abs=1e-12) and min(a) >= 0.01 / k - 1e-15


def test_doremi_update_and_average():
    mixer = DoReMiMixer(EVEN, eta=1.0, smoothing=1e-3, reference_losses={"a": 1.0, "b": 1.0, "c": 3.0})
    a, seen = np.full(3, 1 / 3), []
    for line in ([2.0, 1.5, 2.0], [1.8, 1.2, 2.0]):
        excess = np.maximum(np.array(line) - [1.0, 1.0, 3.0], 0)
        a = a * np.exp(excess)
        a = (1 - 1e-3) * a / a.sum() + 1e-3 / 3
        seen.append(a)
        found = mixer.mix(stats(**dict(zip("abc", line, strict=True))))
        assert list(found.values()) == pytest.approx(a.tolist(), abs=1e-14)
    assert list(mixer.average.values()) == pytest.approx(np.mean(seen, 0).tolist(), abs=1e-14)


def test_doremi_keeps_the_last_excess_of_a_source_that_was_not_drawn():
    mixer = DoReMiMixer(EVEN)
    mixer.mix(MixStats(1, {}, {"a": 1.0, "b": 0.5, "c": 0.0}))
    mixer.mix(MixStats(2, {}, {"a": 0.2}))
    assert mixer.excess.tolist() == [0.2, 0.5, 0.0]


@pytest.mark.parametrize("eta", [0.1, 1.0, 50.0])
def test_equal_excess_keeps_doremi_uniform(eta):
    mixer = DoReMiMixer(EVEN, eta=eta)
    for t in range(20):
        found = mixer.mix(MixStats(t, {}, {"a": 1.7, "b": 1.7, "c": 1.7}))
    assert list(found.values()) == pytest.approx([1 / 3] * 3, abs=1e-14)


def test_large_excess_does_not_overflow():
    found = DoReMiMixer(EVEN, eta=1e4).mix(MixStats(1, {}, {"a": 1e3, "b": 0.0, "c": 1.0}))
    assert found["a"] == pytest.approx(1 - 2e-3 / 3) and math.isfinite(found["b"])


@pytest.mark.parametrize("make", [lambda: OdmMixer(EVEN), lambda: DoReMiMixer(EVEN)], ids=["odm", "doremi"])
def test_state_goes_on_exactly(make):
    def feed(mixer, steps):
        losses = [{"a": 1 + t / 7, "b": 2 - t / 9, "c": 1.5} for t in steps]
        return [mixer.mix(MixStats(t, x, x)) for t, x in zip(steps, losses, strict=True)]

    whole, first, second = make(), make(), make()
    expected = feed(whole, range(1, 9))
    feed(first, range(1, 5))
    second.load_state_dict(first.state_dict())
    assert feed(second, range(5, 9)) == expected[4:]


def test_state_of_other_sources_is_refused():
    with pytest.raises(ConfigError, match="mixed"):
        OdmMixer({"a": 1.0, "x": 1.0}).load_state_dict(OdmMixer(EVEN).state_dict())


def test_static_gives_the_weights():
    assert StaticMixer({"a": 3.0, "b": 1.0}).mix(stats()) == {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "doremi"}, "reference"),
        ({"name": "doremi", "reference": "x", "reference_losses": {"a": 1.0}}, "one of the two"),
        ({"name": "odm", "update_step": 0}, "update_step"),
        ({"name": "odm", "alpha": 1.0}, "alpha"),
        ({"name": "schedule", "segments": []}, "last at 1"),
        ({"name": "schedule", "segments": [{"until": 0.5, "shares": {"a": 1}}]}, "last at 1"),
        ({"name": "schedule", "segments": [{"until": 1, "shares": {"a": 0}}]}, "not all 0"),
    ],
)
def test_settings_that_cannot_be(spec, message):
    with pytest.raises(ConfigError, match=message):
        build("mixer", spec)


def test_reference_losses_name_every_source():
    config = build("mixer", {"name": "doremi", "reference_losses": {"a": 1.0, "b": 1.0}})
    with pytest.raises(ConfigError, match="source c"):
        config.build(MixContext({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}))
    config = build("mixer", {"name": "doremi", "reference_losses": {"a": 1.0, "b": 1.0, "d": 1.0}})
    with pytest.raises(ConfigError, match="no such source"):
        config.build(MixContext({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}))


def test_doremi_alone_without_reference_says_so():
    with pytest.raises(ValueError, match="reference"):
        DoReMiMixer(EVEN).mix(stats(a=1.0))


def test_sources_by_the_end_of_their_name():
    names = ["text:/x/web", "jsonl:/x/code.jsonl", "text:/y/b/same", "text:/y/c/same"]
    assert list(short_names(names).values()) == ["web", "code.jsonl", "text:/y/b/same", "text:/y/c/same"]
    assert find_name("web", names, "k") == names[0] and find_name("code", names, "k") == names[1]
    assert find_name("text:/y/c/same", names, "k") == names[3]
    with pytest.raises(ConfigError, match="no such source"):
        find_name("same", names, "k")


# Schedules


def test_apportion_is_whole_and_within_one():
    counts = apportion(10, np.array([1.0, 1.0, 1.0]))
    assert counts.tolist() == [4, 3, 3]
    assert apportion(7, np.array([0.0, 1.0])).tolist() == [0, 7]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), segments=st.integers(1, 5), k=st.integers(1, 5))
def test_schedules_keep_every_total_and_every_stretch(data, segments, k):
    lengths = data.draw(st.lists(st.integers(0, 60), min_size=segments, max_size=segments))
    raw = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=k, max_size=k), min_size=segments, max_size=segments))
    shares = np.array([[x + (not any(line)) for x in line] for line in raw], float)
    shares /= shares.sum(1, keepdims=True)
    if not sum(lengths):
        return
    counts = whole_rows(lengths, shares)
    exact = np.array(lengths)[:, None] * shares
    assert counts.min() >= 0 and counts.sum(1).tolist() == lengths
    assert np.abs(counts.sum(0) - exact.sum(0)).max() < 1
    totals = apportion(sum(lengths), exact.sum(0) + 1e-9)
    assert whole_rows(lengths, shares, totals).sum(0).tolist() == totals.tolist()


def test_schedule_gives_its_shares_by_step():
    mixer = ScheduleMixer([40, 60], [{"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 0.5}], step_rows=10)
    assert mixer.totals == {"a": 70, "b": 30}
    assert [mixer.mix(stats(t))["a"] for t in (0, 3, 4, 9, 50)] == [1.0, 1.0, 0.5, 0.5, 0.5]
