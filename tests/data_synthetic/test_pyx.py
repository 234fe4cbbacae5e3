"""B116: functions, inputs, traces, monologues, rows, and the filter by execution."""

import ast
import json
import random
import time

import pytest

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.sandbox import Limits, Sandbox, _seccomp
from trainwright.data.synthetic.pyx import rows as pyx_rows
from trainwright.data.synthetic.pyx.builder import Builder, agree, reaches_outside
from trainwright.data.synthetic.pyx.inputs import guesses, mutate, mutations
from trainwright.data.synthetic.pyx.monologues import backward, forward, label_lines, scratchpad
from trainwright.data.synthetic.pyx.programs import make
from trainwright.data.synthetic.pyx.rows import Row, parse_row
from trainwright.data.synthetic.pyx.seeds import Function, cleaned, from_stdlib, functions_of
from trainwright.data.synthetic.pyx.tracer import Rejected, Trace, parse_call, trace, trace_many

pytestmark = pytest.mark.skipif(not _seccomp.supported(), reason="needs seccomp")

LOOP = """def f(xs, k):
    total = 0
    for x in xs:
        if x > k:
            total += x
        else:
            del x
    xs.append(total)
    return total
"""
RECURSIVE = "def f(n):\n    if n < 2:\n        return n\n    return f(n - 1) + f(n - 2)\n"
TRY = "def f(xs):\n    try:\n        y = xs[5]\n    except IndexError:\n        y = -1\n    return y\n"
COMPREHENSION = "def f(xs):\n    ys = [x * 2 for x in xs if x]\n    a, *b = ys\n    return {a: b}\n"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(2, Limits(wall_seconds=30, cpu_seconds=1)) as box:
        yield box


# -- (a) traces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "call"),
    [(LOOP, "f([1, 5, 7], 2)"), (RECURSIVE, "f(5)"), (TRY, "f([1])"), (COMPREHENSION, "f([0, 1, 2, 3])")],
)
def test_a_states_replay_to_the_real_locals(sandbox, code, call):
    """The oracle is this process: the same code, run here with no tracer but a profile hook at its end."""
    found = trace(code, call, sandbox)
    assert isinstance(found, Trace), found
    import sys

    space, last = {}, {}
    exec(compile(code, "<here>", "exec"), space)

    def hook(frame, event, argument):
        if event == "return" and frame.f_code.co_name == "f":
            last["locals"] = {k: repr(v) for k, v in frame.f_locals.items()}

    sys.setprofile(hook)
    try:
        value = eval(call, space)
    finally:
        sys.setprofile(None)
    assert found.replay() == last["locals"] == found.final and found.result == repr(value)


def test_a_made_programs_replay(sandbox):
    made = [make(i, seed=5) for i in range(120)]
    found = list(trace_many([(m.code, m.call) for m in made], sandbox, together=40))
    assert all(isinstance(t, Trace) and t.replay() == t.final for t in found)
    for m, t in zip(made, found, strict=True):
        space = {}
        exec(m.code, space)
        assert repr(eval(m.call, space)) == t.result
    alone = trace(made[0].code, made[0].call, sandbox)
    assert alone == found[0], "the same alone as together"


def test_a_steps_are_lines_and_changes(sandbox):
    found = trace(LOOP, "f([5], 2)", sandbox)
    assert [(s.kind, s.line, s.changes) for s in found.steps] == [
        ("call", 1, {"xs": "[5]", "k": "2"}), ("line", 2, {"total": "0"}), ("line", 3, {"x": "5"}), ("line", 4, {}),
        ("line", 5, {"total": "5"}), ("line", 3, {}), ("line", 8, {"xs": "[5, 5]"}), ("line", 9, {}),
        ("return", 9, {}),
    ]  # fmt: skip
    assert trace(LOOP, "f([1], 2)", sandbox).steps[4].gone == ("x",)
    depths = {s.depth for s in trace(RECURSIVE, "f(3)", sandbox).steps}
    assert depths == {0, 1, 2}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(x):\n    return [*{'ab', 'bc', 'cd', 'de', 'ef', x}]", "not deterministic"),
        ("def f(x):\n    import random\n    return random.random()", "not deterministic"),
        ("def f(x):\n    import time\n    return time.time_ns()", "not deterministic"),
        ("def f(x):\n    y = object()\n    return 1", "does not replay"),
        ("def f(x):\n    return f", "not deterministic"),
        ("def f(x):\n    return 1 / 0", "raises"),
        ("def f(:", "raises"),
        ("def f(x):\n    return 'a' * 1000", "too long"),
        ("def f(x):\n    for i in range(9999):\n        x = i\n    return 1", "too long"),
        ("def f(x):\n    return float('nan')", "no literal result"),
    ],
)
def test_a_other_samples_are_rejected(sandbox, code, reason):
    found = trace(code, "f('q')", sandbox)
    assert isinstance(found, Rejected) and found.reason == reason, found


# -- (d) harm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass", "open('PLACE', 'w').write('x')",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import subprocess; subprocess.run(['true'])", "import os; os.kill(os.getppid(), 9)", "import os; os._exit(0)",
        "import os\n    try: os.fork()\n    finally: x = 2", "return [0] * 10**9", "import sys; sys.exit()",
        "import sys; sys.settrace(None); open('PLACE', 'w')", "import time; time.sleep(99)",
    ],
)  # fmt: skip
def test_d_harm_is_stopped_in_time_and_rejected(body, tmp_path):
    place = tmp_path / "made"
    code = f"def f(x):\n    {body.replace('PLACE', str(place))}\n    return x\n"
    started = time.monotonic()
    with Sandbox(limits=Limits(wall_seconds=4, cpu_seconds=1)) as box:
        found = trace(code, "f(1)", box)
        assert isinstance(found, Rejected) and time.monotonic() - started < 40, found
        assert not place.exists() and isinstance(trace(RECURSIVE, "f(2)", box), Trace)
    assert reaches_outside(code) is not None or body in ("while True: pass", "return [0] * 10**9")


def test_d_what_catches_its_refusal_is_rejected_all_the_same(sandbox):
    code = "def f(x):\n    try:\n        open('/etc/passwd')\n    except OSError:\n        pass\n    return x\n"
    builder = Builder(sandbox)
    assert list(builder.rows([Function("f", code, 1, calls=("f(1)",))])) == []
    assert builder.report["functions that reach outside"] == 1
    assert reaches_outside("import math, collections.abc\nfrom itertools import chain") is None
    assert reaches_outside("def f(x):\n    return x.__class__.__name__") == "__name__"
    assert reaches_outside("import os.path") == "os.path"
    with pytest.raises(DataError, match="parse"):
        reaches_outside("def f(:")


def test_unsandboxed_is_refused():
    with pytest.raises(ConfigError, match="allow_unsandboxed"):
        Sandbox(isolation="none")
    with (
        Sandbox(isolation="none", allow_unsandboxed=True) as box,
        pytest.raises(ConfigError, match="isolation"),
    ):
        Builder(box)


# -- inputs --------------------------------------------------------------------------------------------------------


def test_inputs_have_to_be_literals(sandbox):
    assert parse_call("f(1, [2, {'a': (3,)}], -4)") == ("f", [1, [2, {"a": (3,)}], -4])
    for call in ("f(x)", "f(g(1))", "f(*[1])", "f([x for x in y])", "f(a=1)", "f", "m.f(1)", "f(1", "f(lambda: 1)"):
        with pytest.raises(DataError):
            parse_call(call)
    with pytest.raises(DataError, match="no literal"):
        trace(RECURSIVE, "f(open('x'))", sandbox)


def shape(value):
    """Types of a value, with those of its parts as a set."""
    if isinstance(value, dict):
        return dict, frozenset(map(shape, [*value.keys(), *value.values()]))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), frozenset(map(shape, value))
    return type(value)


@pytest.mark.parametrize(
    "value",
    [3, -7, True, 2.5, "abc", "", b"ab", None, [1, 2, 3], ["a", "bc"], (1, 2), {1, 2}, {"a": 1, "b": 2}, [[1], [2, 3]]],
)
def test_mutation_keeps_types(value):
    rng, different = random.Random(0), 0
    for _ in range(200):
        new = mutate(json.loads(json.dumps(value)) if type(value) in (list, dict) else value, rng)
        assert type(new) is type(value)
        if isinstance(value, list | tuple | set | dict) and new:
            assert shape(new)[1] - {(list, frozenset())} <= shape(value)[1], "a list may become empty, no more"
        different += new != value
    assert different > 50 or value is None


def test_mutated_calls_are_new_and_repeatable():
    call = "f([1, 5, 7], 'ab')"
    found = mutations(call, 12, seed=1)
    assert len(found) == len(set(found)) == 12 and call not in found and found == mutations(call, 12, seed=1)
    assert all(isinstance(parse_call(c)[1][0], list) and isinstance(parse_call(c)[1][1], str) for c in found)
    assert mutations("f()", 3) == [] and mutations("f(None)", 3) == []
    tried = list(guesses("f", 2))
    assert len(set(tried)) == len(tried) == 24 and all(len(parse_call(c)[1]) == 2 for c in tried)
    with pytest.raises(DataError):
        mutate(object(), random.Random(0))


# -- functions ------------------------------------------------------------------------------------------------------


def test_functions_that_stand_alone_are_found():
    source = (
        "import os\nLIMIT = 3\n"
        "def good(a: int, b='x') -> str:\n    '''Doc.'''\n    c: int = len(a)\n    return b * c\n"
        "def needs(a):\n    return a + LIMIT\ndef module(a):\n    return os.getpid() + a\n"
        "def nothing(a):\n    a.x = 1\n"
        "def gen(a):\n    yield a\n    return a\ndef star(*a):\n    return a\n"
        "@staticmethod\ndef deco(a):\n    return a\n"
        "def opens(a):\n    b = 1\n    return open(a)\nclass C:\n    def method(self):\n        return self\n"
        "def again(n):\n    m = n - 1\n    return again(m) if n else 0\n"
    )
    found = {f.name: f for f in functions_of(source, "m.py", "MIT")}
    assert set(found) == {"good", "again"}
    assert found["good"].code == "def good(a, b='x'):\n    c = len(a)\n    return b * c"
    assert found["good"].origin == "m.py:3" and found["good"].licence == "MIT" and found["good"].parameters == 2
    with pytest.raises(DataError, match="parse"):
        list(functions_of("def f(:"))


def test_the_library_gives_seeds():
    found = list(from_stdlib(40))
    assert len(found) == 40 and len({f.origin for f in found}) == 40
    for f in found:
        assert ast.parse(f.code) and '"""' not in f.code and f.licence == "PSF-2.0" and f.parameters >= 1


def test_copies_and_what_is_held_out_go():
    make_one = lambda name, body: Function(name, f"def {name}(x):\n    {body}\n    return y", 1)  # noqa: E731
    functions = [make_one("f", "y = x"), make_one("g", "y = x"), make_one("h", "y = -x"), make_one("i", "y = x * 3")]
    assert [f.name for f in cleaned(functions)] == ["f", "h", "i"]
    held = 'def other(x: int):\n    """Negative."""\n    y = -x\n    return y\n\nassert other(1) == -1'
    assert [f.name for f in cleaned(functions, [held])] == ["f", "i"]


# -- monologues and rows -------------------------------------------------------------------------------------------


def test_forward_monologue(sandbox):
    assert forward(trace(LOOP, "f([5, 1], 2)", sandbox)).split("\n") == [
        "[L1] f is called with xs = [5, 1] and k = 2.", "[L2] total = 0 gives total = 0.",
        "[L3] The loop goes on with x = 5.", "[L4] x > k holds.", "[L5] total += x gives total = 5.",
        "[L3] The loop goes on with x = 1.", "[L4] x > k does not hold.", "[L7] del x gives x deleted.",
        "[L3] The loop ends.", "[L8] xs.append(total) gives xs = [5, 1, 5].", "[L9] f returns 5.",
    ]  # fmt: skip
    brief = forward(trace(LOOP, "f([5], 2)", sandbox), "brief").split("\n")
    assert brief[2:6] == ["[L3] x = 5", "[L4] x > k: True", "[L5] total = 5", "[L3] end"]


def test_each_forward_line_is_true_of_the_states(sandbox):
    """What the brief monologue says of variables replays to the final locals."""
    made = [make(i, seed=9) for i in range(60)]
    for t in trace_many([(m.code, m.call) for m in made], sandbox, together=60):
        state = {}
        for line in forward(t, "brief").split("\n"):
            text = line.split("] ", 1)[1]
            if " = " in text and ":" not in text:
                state.update(pair.split(" = ", 1) for pair in text.split(" and "))
        assert state == t.final


def test_backward_monologue_goes_back_to_the_input(sandbox):
    told = backward(trace(LOOP, "f([5], 2)", sandbox)).split("\n")
    assert told[0] == "[L9] The call has to return 5, so total = 5 here."
    assert told[1] == "[L8] xs.append(total) leaves xs = [5, 5]. Before it, xs = [5] and total = 5."
    assert told[-1] == "So the call can begin with xs = [5] and k = 2."
    assert backward(trace(LOOP, "f([5], 2)", sandbox), "brief").split("\n")[0] == "[L9] 5 <- total = 5"
    many = trace("def f(n):\n    for i in range(n):\n        j = i\n    return j\n", "f(90)", sandbox)
    assert "..." in backward(many).split("\n") and len(backward(many).split("\n")) == 122


def test_scratchpad_keeps_the_first_two_and_the_last_state(sandbox):
    told = scratchpad(trace("def f(n):\n    for i in range(n):\n        j = i\n    return j\n", "f(5)", sandbox))
    line = told.split("\n")[2]
    assert [json.loads(s.split("[/STATE]")[0])["j"] for s in line.split("[STATE]")[1:]] == ["0", "1", "4"]
    assert "..." in line and told.split("\n")[-1].endswith("[OUTPUT] 4 [/OUTPUT]") and "[INPUT]" in told.split("\n")[0]


def test_labels_do_not_change_the_program():
    code = "def f(x):\n    s = '''a\nb\n'''\n    y = x + \\\n        1\n\n    return s * y\n"
    spaces = {}, {}
    for text, space in zip((code, label_lines(code)), spaces, strict=True):
        exec(text, space)
    assert spaces[0]["f"](2) == spaces[1]["f"](2) and label_lines(code).count("# [L") == 4
    question = f"[PYTHON]\n{label_lines(LOOP)}\nassert f([1], 2) == ??\n[/PYTHON]"
    assert pyx_rows.code_of_question(question).strip() == LOOP.strip()


def test_c_exactly_one_kind():
    assert parse_row({"nl": "q", "fwd_mnl": "", "bwd_mnl": None, "response": "r"}) == Row("nl", "q", "r")
    assert parse_row(Row("debug", "q", "r").to_json()) == Row("debug", "q", "r")
    for row, words in [
        ({"response": "r"}, "no kind"), ({"nl": "", "fwd_mnl": "", "response": "r"}, "no kind"),
        ({"nl": "a", "fwd_mnl": "b", "response": "r"}, r"2 kinds \(nl, fwd_mnl\)"), ({"nl": "a"}, "no response"),
        ({"nl": "a", "response": " "}, "no response"), ({"nl": 3, "response": "r"}, "text"), ([1], "object"),
        ({"forward": "a", "response": "r"}, "unknown keys: forward"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=words):
            parse_row(row)


def test_every_tag_is_closed(sandbox):
    t = trace(LOOP, "f([5], 2)", sandbox)
    rows = [make_row(t, r) for make_row in (pyx_rows.forward_row, pyx_rows.backward_row)
            for r in ("monologue", "scratchpad", "answer")]  # fmt: skip
    rows.append(pyx_rows.debug_row(LOOP.replace("+=", "-="), t, "-5"))
    for row in rows:
        pair = row.to_pair()
        pyx_rows.check_tags(pair["prompt"])
        pyx_rows.check_tags(pair["completion"])
        assert pair["completion"].rstrip().endswith("]") and "PYTHON]" in pair["prompt"]
    for text in ("PYTHON]\nx[/PYTHON]", "[ANSWER]1", "[ANSWER][MONOLOGUE][/ANSWER][/MONOLOGUE]"):
        with pytest.raises(DataError):
            pyx_rows.check_tags(text)
    with pytest.raises(ConfigError, match="reasoning"):
        pyx_rows.forward_row(t, "thoughts")


# -- (b) the filter ------------------------------------------------------------------------------------------------


def run_here(code, call):
    space = {}
    exec(code, space)
    return eval(call, space)


def test_b_all_kept_answers_agree_with_execution(sandbox):
    functions = [Function("f", LOOP, 2, calls=("f([1, 5, 7], 2)",)), Function("f", RECURSIVE, 1, calls=("f(4)",)),
                 Function("f", COMPREHENSION, 1)]  # fmt: skip
    builder = Builder(sandbox, ("forward", "backward", "debug"), inputs_each=6)
    rows = list(builder.rows(functions))
    kinds = [r.kind for r in rows]
    assert kinds.count("forward") >= 6 and kinds.count("backward") >= 6 and kinds.count("debug") >= 2
    assert len({(r.question, r.response) for r in rows}) == len(rows)
    for row in rows:
        if row.kind == "debug":
            left, right = pyx_rows.assertion_of(row.question.split("It fails: ")[-1])
            assert repr(run_here(pyx_rows.refined_of(row.response), left)) == right
            assert repr(run_here(pyx_rows.code_of_question(row.question), left)) != right
            continue
        code, answer = pyx_rows.code_of_question(row.question), pyx_rows.answer_of(row.response)
        left, right = pyx_rows.assertion_of(row.question)
        if row.kind == "forward":
            assert repr(run_here(code, left)) == answer
        else:
            assert repr(run_here(code, answer)) == right


def test_b_wrong_answers_of_a_generator_are_thrown_out(sandbox):
    t = trace(RECURSIVE, "f(4)", sandbox)
    ask, back = pyx_rows.forward_row(t).question, pyx_rows.backward_row(t).question
    answers = [
        (Row("forward", ask, "[ANSWER]3[/ANSWER]"), True), (Row("forward", ask, "So [ANSWER] 3 [/ANSWER]"), True),
        (Row("forward", ask, "[ANSWER]4[/ANSWER]"), False), (Row("forward", ask, "[ANSWER]3"), False),
        (Row("forward", ask, "[ANSWER]f(4)[/ANSWER]"), False), (Row("forward", ask, "[ANSWER]3.0[/ANSWER]"), False),
        (Row("forward", ask, "[ANSWER]__import__('os')[/ANSWER]"), False),
        (Row("backward", back, "[ANSWER]f(4)[/ANSWER]"), True), (Row("backward", back, "[ANSWER]f(5)[/ANSWER]"), False),
        (Row("backward", back, "[ANSWER]g(4)[/ANSWER]"), False), (Row("backward", back, "[ANSWER]3[/ANSWER]"), False),
        (Row("backward", back, "[ANSWER]f(4) or 3[/ANSWER]"), False),
        (Row("nl", "q", "```python\nx = 1\n```"), True), (Row("nl", "q", "```python\nx = \n```"), False),
    ]  # fmt: skip
    assert agree([r for r, _ in answers], sandbox) == [good for _, good in answers]
    # Any valid input counts, not only the recorded one.
    square = trace("def f(x):\n    y = x * x\n    return y\n", "f(3)", sandbox)
    other = Row("backward", pyx_rows.backward_row(square).question, "[ANSWER]f(-3)[/ANSWER]")
    assert agree([other], sandbox) == [True]


def test_generators_are_filtered_and_counted(sandbox):
    told = iter(["[ANSWER]3[/ANSWER]", "[ANSWER]nonsense", "[ANSWER]0[/ANSWER]"] * 9)
    builder = Builder(sandbox, ["forward"], inputs_each=3, tell=lambda prompt: next(told))
    rows = list(builder.rows([Function("f", RECURSIVE, 1, calls=("f(4)",))]))
    refuted = builder.report["forward rows whose answer execution refutes"]
    assert refuted >= 1 and len(rows) + refuted == 3 and builder.report["forward rows kept"] == len(rows)
    asked = []

    def describe(prompt):
        asked.append(prompt)
        return "The n-th Fibonacci number."

    rows = list(Builder(sandbox, ["nl"], describe=describe).rows([Function("f", RECURSIVE, 1, calls=("f(4)",))]))
    assert rows[0].kind == "nl" and "Fibonacci" in rows[0].question and RECURSIVE.strip() in rows[0].response
    assert RECURSIVE in asked[0]


def test_builder_settings(sandbox):
    for settings, words in [
        ({"wanted": ["nl"]}, "describe"), ({"wanted": []}, "kinds"), ({"wanted": ["other"]}, "kinds"),
        ({"wanted": ["forward", "forward"]}, "once"), ({"inputs_each": 0}, "inputs_each"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            Builder(sandbox, **settings)
