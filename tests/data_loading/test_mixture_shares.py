"""Mixing: each source in its share at every moment, each through whole epochs of its own, also when the mix changes."""

import json
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_docs import contents, global_steps, mixture_loader, numbered, pairs, ranks, stream

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.mixture import Mixture

SOURCES = {"a": [4] * 10, "b": [4] * 7, "c": [4] * 5}  # a row a document; documents 0.., 1000.., 2000..
SHARES = {"a": 5.0, "b": 3.0, "c": 2.0}


def source_of(row):
    return "abcdef"[row[0] // 100_000 // 1000]


def document(row):
    return row[0] // 100_000


def mixture(weights):
    return Mixture({name: stream(numbered([4] * 3, name)) for name in weights}, weights)


def largest_error(names, weights):
    """The most rows by which a source is off its exact share at any prefix."""
    total = sum(Fraction(w) for w in weights.values())
    seen = dict.fromkeys(weights, 0)
    worst = Fraction(0)
    for n, name in enumerate(names, 1):
        seen[name] += 1
        worst = max(worst, *(abs(seen[k] - n * Fraction(w) / total) for k, w in weights.items()))
    return float(worst)


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 1.0, "b": 1.0},
        {"a": 0.9, "b": 0.1},
        {"a": 5.0, "b": 3.0, "c": 2.0},
        {"a": 0.97, "b": 0.01, "c": 0.01, "d": 0.01},
        {f"s{k:02d}": 1.0 for k in range(20)} | {"big": 3.0},
        {f"s{k:02d}": 1.0 / (k + 1) for k in range(20)},
        {f"s{k:02d}": float(w) for k, w in enumerate([1, 1, 10, 3, 33, 17, 1, 3, 3, 33, 1])},  # 1.24 by most credit
        {"a": 1.0, "b": 0.0},
        {"a": 1e-3, "b": 1e3},
    ],
    ids=lambda w: f"{len(w)} sources",
)
def test_each_source_is_within_a_row_of_its_share_at_every_prefix(weights):
    names = [ref.stream for ref in mixture(weights).take(2000)]
    assert largest_error(names, weights) <= 1
    assert all(weights[name] > 0 for name in names)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 100), min_size=2, max_size=12))
def test_any_weights_within_a_row(weights):
    named = {f"s{k:02d}": float(w) for k, w in enumerate(weights)}
    names = [ref.stream for ref in mixture(named).take(300)]
    assert largest_error(names, named) <= 1


def test_the_order_of_sources_and_the_scale_of_weights_do_not_matter():
    orders = [
        [ref.stream for ref in mixture(weights).take(100)]
        for weights in (SHARES, dict(reversed(SHARES.items())), {k: v / 10 for k, v in SHARES.items()})
    ]
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_source_goes_through_epochs_of_its_own(world_size):
    loaders = ranks(lambda **kw: mixture_loader(SOURCES, SHARES, batch=10, **kw), world_size)
    rows = [row for step in global_steps(loaders, 21) for row in step]
    for name, lengths in SOURCES.items():
        mine = [document(row) for row in rows if source_of(row) == name]
        assert len(mine) == 21 * SHARES[name]
        n = len(lengths)
        whole = [mine[i : i + n] for i in range(0, len(mine) - n + 1, n)]
        assert len(whole) >= 6
        assert all(sorted(epoch) == sorted(whole[0]) and len(set(epoch)) == n for epoch in whole)
        assert whole[0] != whole[1]


def test_a_mixture_resumes_on_other_ranks():
    expected = [row for step in global_steps([mixture_loader(SOURCES, SHARES, batch=1)], 60) for row in step]
    rows, state = [], None
    for world_size, batch in ((1, 5), (2, 6), (4, 7), (3, 3)):
        loaders = ranks(lambda **kw: mixture_loader(SOURCES, SHARES, batch=batch, **kw), world_size)  # noqa: B023
        for one in loaders:
            if state:
                one.load_state_dict(json.loads(state))
        rows += [row for step in global_steps(loaders, 2) for row in step]
        state = json.dumps(loaders[0].state_dict())
    assert rows == expected[: len(rows)]


def carried_over(before, after, steps=9):
    """Rows of ``steps`` batches of a mixture, and of as many after it has become another one."""
    old = mixture_loader(*before)
    first = [row for step in global_steps([old], steps) for row in step]
    new = mixture_loader(*after)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.rows == len(first)
    return first, [row for step in global_steps([new], steps) for row in step]


def check_epochs(rows, sources):
    """Every source goes through whole epochs, whatever happened on the way."""
    for name, lengths in sources.items():
        mine = [document(row) for row in rows if source_of(row) == name]
        n = len(lengths)
        for i in range(0, len(mine), n):
            assert len(set(mine[i : i + n])) == len(mine[i : i + n]), name


def test_weights_may_change_in_mid_run():
    new_shares = {"a": 1.0, "b": 1.0, "c": 8.0}
    first, second = carried_over((SOURCES, SHARES), (SOURCES, new_shares))
    check_epochs(first + second, SOURCES)
    assert largest_error([source_of(r) for r in second], new_shares) <= 1  # from the change on


@settings(max_examples=60, deadline=None)
@given(
    before=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1),
    after=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1),
    rows=st.integers(0, 60),
)
def test_any_change_of_the_mix_counts_shares_from_then_on(before, after, rows):
    before, after = ({name: float(w) for name, w in weights.items()} for weights in (before, after))
    old, new = mixture(before), mixture(after)
    refs = old.take(rows)
    new.set_position(json.loads(json.dumps(old.position())))
    more = new.take(60)
    assert new.rows == rows + 60
    if before != after:
        assert largest_error([ref.stream for ref in more], after) <= 1
    for name in before.keys() | after.keys():
        mine = [(ref.epoch, ref.row) for ref in refs + more if ref.stream == name]
        assert mine == [divmod(i, 3) for i in range(len(mine))]  # each source goes on where it was


def test_a_source_may_be_added_in_mid_run():
    old = {name: SOURCES[name] for name in "ac"}
    wide = SOURCES | {"b": [4] * 7}
    first, second = carried_over((old, {"a": 3.0, "c": 1.0}), (wide, SHARES))
    assert {source_of(r) for r in first} == {"a", "c"}
    check_epochs(first + second, SOURCES)
    assert largest_error([source_of(r) for r in second], SHARES) <= 1


def test_a_source_may_leave_and_come_back_where_it_was():
    some = {name: SOURCES[name] for name in "ab"}
    first = mixture_loader(SOURCES, SHARES)
    rows = [row for step in global_steps([first], 9) for row in step]
    state = first.state_dict()
    without = mixture_loader(some, {"a": 1.0, "b": 1.0})
    without.load_state_dict(state)
    more = [row for step in global_steps([without], 5) for row in step]
    assert largest_error([source_of(r) for r in more], {"a": 1.0, "b": 1.0}) <= 1
    back = mixture_loader(SOURCES, SHARES)
    back.load_state_dict(json.loads(json.dumps(without.state_dict())))
    last = [row for step in global_steps([back], 9) for row in step]
    check_epochs(rows + more + last, SOURCES)
    assert largest_error([source_of(r) for r in last], SHARES) <= 1


def test_a_source_that_came_back_with_other_content_is_refused():
    some = {name: SOURCES[name] for name in "ab"}
    first = mixture_loader(SOURCES, SHARES)
    global_steps([first], 9)
    without = mixture_loader(some, {"a": 1.0, "b": 1.0})
    without.load_state_dict(first.state_dict())
    global_steps([without], 2)
    back = mixture_loader(SOURCES | {"c": [4] * 6}, SHARES)
    with pytest.raises(DataError, match="content of source c changed"):
        back.load_state_dict(without.state_dict())


def test_a_source_under_another_name_goes_on_where_it_was():
    first = mixture_loader(SOURCES, SHARES)
    rows = [row for step in global_steps([first], 9) for row in step]
    moved = {"a": SOURCES["a"], "b": SOURCES["b"], "c_moved": SOURCES["c"]}
    second = mixture_loader(moved, {"a": 5.0, "b": 3.0, "c_moved": 2.0})
    second.load_state_dict(first.state_dict())
    rows += [row for step in global_steps([second], 9) for row in step]
    check_epochs(rows, SOURCES)
    assert largest_error([source_of(r) for r in rows], SHARES) <= 1  # nothing changed but a name


def test_changed_content_of_one_source_is_refused_by_name_and_restarts_only_that_one():
    old = mixture_loader(SOURCES, SHARES)
    rows = [row for step in global_steps([old], 4) for row in step]
    state = old.state_dict()
    changed = SOURCES | {"c": [4] * 6}
    new = mixture_loader(changed, SHARES)
    with pytest.raises(DataError, match=r"content of source c changed \(5 documents with 20 tokens then, 6 .* 24"):
        new.load_state_dict(state)
    new.load_state_dict(state, on_change="new_epoch")
    more = [row for step in global_steps([new], 12) for row in step]
    check_epochs(rows + more, {name: SOURCES[name] for name in "ab"})
    of_c = [document(r) for r in more if source_of(r) == "c"]
    assert sorted(of_c[:6]) == list(range(2000, 2006))


def test_mixing_or_not_is_part_of_the_order():
    one = mixture_loader({"pool": [4] * 9}, None)
    mixed = mixture_loader({"pool": [4] * 9}, {"pool": 1.0})
    with pytest.raises(DataError, match="mixed by weights was False and is True"):
        mixed.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"a": 1.0, "b": 1.0}, r"weights: name \['a', 'b'\] but the sources are \['a', 'b', 'c'\]"),
        ({"a": 1.0, "b": 1.0, "c": -1.0}, r"weights\.c=-1\.0"),
        ({"a": 1.0, "b": math.nan, "c": 1.0}, r"weights\.b=nan"),
        ({"a": 1.0, "b": math.inf, "c": 1.0}, r"weights\.b=inf"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, r"sum to zero"),
    ],
    ids=["missing", "negative", "nan", "inf", "zero"],
)
def test_bad_weights_are_refused(weights, named):
    with pytest.raises(ConfigError, match=named):
        mixture_loader(SOURCES, weights)


def test_all_batchers_count_rows_alike_in_a_mixture():
    lengths = {"a": [3, 9, 1, 4, 6], "b": [2, 2, 2, 30]}
    for batcher in ("packed", "padded", "best_fit"):
        one = mixture_loader(lengths, {"a": 2.0, "b": 1.0}, batch=3, batcher=batcher)
        rows = [row for step in global_steps([one], 60) for row in step]
        assert Counter(source_of(r) for r in rows) == {"a": 120, "b": 60}
        for name, first in (("a", 0), ("b", 1000)):
            seen = [p for row in rows if source_of(row) == name for p in pairs(row)]
            n = sum(lengths[name])
            expected = sorted((first + d, p) for d, size in enumerate(lengths[name]) for p in range(size))
            assert sorted(seen[:n]) == sorted(seen[n : 2 * n]) == expected


def test_one_source_with_a_weight_is_that_source():
    one = mixture_loader({"a": [4] * 6}, {"a": 0.3}, batch=3)
    rows = [document(row) for row in contents(one.next_batch()) + contents(one.next_batch())]
    assert sorted(rows) == list(range(6))
