"""Tests judged outside of the tested program's process."""

import collections
import decimal
import fractions
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.sandbox import Limits, Sandbox, _seccomp
from trainwright.data.build.documents import Document
from trainwright.data.synthetic.outside import canonical, outside, passed, program
from trainwright.data.synthetic.verifier import Problem, Verifier
from trainwright.data.synthetic.verify_code import VerifyCode

needs_sandbox = pytest.mark.skipif(not _seccomp.supported(), reason="needs seccomp")

atoms = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(allow_nan=False),
    st.sampled_from([0.0, -0.0, 2.0]), st.text(max_size=3), st.binary(max_size=2),
    st.complex_numbers(allow_nan=False, max_magnitude=3),
)  # fmt: skip


def nested(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.integers(-2, 2) | st.text(max_size=1), inner, max_size=3),
            st.frozensets(st.integers(-2, 2) | st.booleans() | st.floats(-2, 2), max_size=3),
        ),
        max_leaves=6,
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(nested(atoms | st.fractions() | st.decimals(allow_nan=False)), nested(atoms))
def test_texts_are_equal_where_values_are(a, b):
    assert (canonical(a) == canonical(b)) == (a == b)
    assert canonical(a) == canonical(a)


def test_texts_of_derived_classes():
    Point = collections.namedtuple("Point", "x y")
    counted = collections.defaultdict(int, a=1)
    for value, equal in (
        (Point(1, 2), (1, 2)), (collections.Counter("aab"), {"a": 2, "b": 1}), (counted, {"a": 1}),
        (collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}), (fractions.Fraction(1, 2), 0.5),
        (decimal.Decimal("2"), 2), ({"a": 1}.keys(), {"a"}), (bytearray(b"x"), b"x"), (10**5000, 10**5000),
        (float("inf"), float("inf")), ([[True, 2.0]], [[1, 2]]),
    ):  # fmt: skip
        assert value == equal and canonical(value) == canonical(equal)
    for value in (range(3), collections.deque([1]), object(), float("nan"), decimal.Decimal("0.1"), "1", ["1"]):
        for other in ([0, 1, 2], [1], None, 0.1, 1, [1], "?"):
            assert value != other and canonical(value) != canonical(other)


@pytest.mark.parametrize(
    ("test", "literals"),
    [
        ("assert f(1) == 2", 1),
        ("assert [1, 2] == f(1), 'why'", 1),
        ("assert f(1) == -2 and f(2) == {'a': (1, None)}", 2),
        ("candidate = f\nassert candidate([1]) == {1}\nassert candidate([]) == set()", 2),
        ("def test_a():\n    x = 1\n    assert f(x) == 2\ntest_a()", 1),
        ("assert f(1) == f(2)", 0),
        ("assert f(1)", 0),
        ("assert f(1) is True", 0),
        ("assert 1 == 1", 0),
        ("assert f(1) == 2 or f(1) == 3", 0),
        ("assert f(1) == 2\nassert f(2)", 0),
        ("for x in (1, 2):\n    assert f(x) == 2", 0),
        ("def test_a(x=1):\n    for y in (1, 2):\n        assert f(x) == 2\ntest_a()", 0),
        ("def check():\n    assert f(1) == 2", 0),
        ("x = 1", 0),
        ("assert f(", 0),
        ("", 0),
    ],
)
def test_which_tests_are_judged_outside(test, literals):
    found = outside(test)
    assert (found is not None) == (literals > 0)
    if found is not None:
        assert found.expected.count("',") + found.expected.count('",') + 1 >= literals
        assert "assert" not in found.test.partition("['canonical']")[2]


RIGHT = "def f(x):\n    return x + 1"
LIARS = {
    "equals everything": "class A:\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "a list that does": "class A(list):\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "a number that does": "class A(int):\n    def __eq__(s, o): return True\ndef f(x): return A(0)",
    "reads the test": textwrap.dedent("""
        import re, sys
        def f(x):
            frame = sys._getframe(1)
            names = [c for c in frame.f_code.co_consts if isinstance(c, int)]
            return names[-1] if names else 0"""),
    "no assertions": "import builtins\nclass AssertionError(BaseException): pass\ndef f(x): return 0",
    "ends early": "import os\ndef f(x):\n    os._exit(0)",
    "answers itself": textwrap.dedent("""
        import json, os
        def f(x):
            for number in range(3, 64):
                try:
                    os.write(number, json.dumps({"status": "ok", "values": ["[]"], "tests": [None]}).encode())
                except OSError:
                    pass
            os._exit(0)"""),
}


@needs_sandbox
def test_programs_that_lie_pass_nothing():
    tests = ["assert f(1) == 2", "assert f(5) == 6", "def test_f():\n    assert f(7) == 8\ntest_f()"]
    with Sandbox(2, Limits(wall_seconds=30, cpu_seconds=2)) as box:
        (found,) = Verifier(box, twice=False).outcomes([Problem("p", [RIGHT, *LIARS.values()], tests)])
        only = Verifier(box, twice=False).outcomes([Problem("p", [LIARS["equals everything"]], tests)])[0]
    assert found.passes.tolist() == [[True] * 3] + [[False] * 3] * len(LIARS)
    assert not found.sharing.any() and not found.flaky.any()
    assert not only.passes.any() and not only.sharing.any()


@needs_sandbox
def test_programs_with_names_of_their_own_pass():
    code = (
        "from collections import Counter, namedtuple\nimport fractions, decimal\n"
        "list = sorted = isinstance = str = None\n"
        "P = namedtuple('P', 'x y')\ndef c(x): return Counter(x)\ndef p(): return P(1, [2.0])\n"
        "def q(): return fractions.Fraction(1, 4), decimal.Decimal('2')\ndef g(): raise ValueError"
    )
    tests = [
        "assert c('aab') == {'a': 2, 'b': 1}", "assert p() == (1, [2])", "assert q() == (0.25, 2)", "assert g() == 1",
        "assert nothing() == 1", "assert c('a') == {'a': 2}", "assert c('') == {}", "assert c('a')['a'] == 1, 'why'",
        "assert c('a')", "assert not c('a')",
    ]  # fmt: skip
    want = [True, True, True, False, False, False, True, True, True, False]
    with Sandbox(1, Limits(wall_seconds=30, cpu_seconds=2)) as box:
        (result,) = box.map([program(code, tests)])
        assert passed(result, tests) == want
        (found,) = Verifier(box).outcomes([Problem("p", [code], tests)])
    assert found.passes.tolist() == [want] and found.usable.all()


@needs_sandbox
def test_the_stage_throws_liars_out():
    about = {"problem": "p", "tests": ["assert f(1) == 2", "assert f(5) == 6"]}
    documents = [Document(RIGHT, "right", metadata=about)]
    documents += [Document(code, name, metadata=about) for name, code in LIARS.items()]
    assert [d.id for d in VerifyCode(wall_seconds=30, cpu_seconds=2, twice=False).run(documents, workers=2)] == [
        "right"
    ]
