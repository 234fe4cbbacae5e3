"""B036, running: solutions against tests in the sandbox."""

import json
import logging

import pytest

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.sandbox import Limits, Sandbox, _seccomp
from trainwright.data.build.documents import Document
from trainwright.data.build.stages import make_stages
from trainwright.data.synthetic.diversity import choose_diverse, similarity
from trainwright.data.synthetic.mutants import mutants
from trainwright.data.synthetic.suites import code_of, design_prompt, design_tests, split_tests
from trainwright.data.synthetic.verifier import Cache, Problem, Verifier
from trainwright.data.synthetic.verify_code import VerifyCode

pytestmark = pytest.mark.skipif(not _seccomp.supported(), reason="needs seccomp")
RIGHT = "def f(xs): return sorted(xs)"
SLOW = "def f(xs):\n    while True: pass"
WRONG = "def f(xs): return xs"
TESTS = ["assert f([2, 1]) == [1, 2]", "assert f([]) == []", "assert f([1]) == [1]", "assert f([3, 2]) == [2, 3]"]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(2, Limits(wall_seconds=30, cpu_seconds=1)) as box:
        yield box


def test_outcomes(sandbox):
    (found,) = Verifier(sandbox).outcomes([Problem("p", [RIGHT, WRONG, "def g(:", "import nothing_there"], TESTS)])
    assert found.runs.tolist() == [True, True, False, False]
    assert found.passes.tolist() == [[True] * 4, [False, True, True, False], [False] * 4, [False] * 4]
    assert not found.flaky.any() and not found.sharing.any() and not found.unstable.any()


def test_d_timeouts_are_failures_and_the_order_of_tests_does_not_matter(sandbox):
    verifier = Verifier(sandbox, twice=False)
    (found,) = verifier.outcomes([Problem("p", [SLOW, WRONG], TESTS[:2])])
    assert (
        found.passes.tolist() == [[False, False], [False, True]]
        and found.statuses["cpu"] + found.statuses["timeout"] == 2
    )
    (turned,) = Verifier(sandbox, twice=False).outcomes([Problem("p", [WRONG, RIGHT], TESTS[::-1])])
    assert turned.passes[:, ::-1].tolist() == [[False, True, True, False], [True] * 4]


def test_d_answers_are_kept_by_code_and_test(sandbox, tmp_path):
    problem = Problem("p", [RIGHT, WRONG], TESTS)
    path = tmp_path / "deep" / "cache.sqlite"
    cache = Cache(path)
    first = Verifier(sandbox, cache).outcomes([problem])[0]
    assert cache.hits == 0
    cache.close()

    class NoMore:
        limits, isolation, hash_seed, paths = sandbox.limits, sandbox.isolation, 0, []

        def map(self, programs, twice=False):
            assert list(programs) == [], "everything is known"
            return iter(())

    again_cache = Cache(path)
    again = Verifier(NoMore(), again_cache, check_state=False).outcomes([problem])[0]
    assert (again.passes == first.passes).all() and again_cache.hits == 2 + 8
    verifier = Verifier(sandbox)
    keys = {verifier.key(c, t) for c in (RIGHT, WRONG) for t in TESTS}
    assert len(keys) == 8 and verifier.key(RIGHT, TESTS[0]) in keys
    with Sandbox(limits=Limits(memory_bytes=1 << 28)) as other:
        assert Verifier(other).key(RIGHT, TESTS[0]) not in keys
    bad = tmp_path / "bad"
    bad.write_text("no database, but long enough to be looked at" * 50)
    with pytest.raises(DataError, match="cache"):
        Cache(bad)


def test_what_a_busy_machine_stopped_is_not_kept():
    with Sandbox(limits=Limits(wall_seconds=0.3, cpu_seconds=30)) as box:
        cache = Cache()
        verifier = Verifier(box, cache, twice=False)
        sleeps = ("import time; time.sleep(9)", "")
        assert verifier.run_pairs([sleeps])[sleeps] == ("timeout", False)
        assert cache.get(verifier.key(*sleeps)) is None


def test_flaky_tests_are_put_aside_and_random_solutions_too(sandbox):
    flaky = "assert list({'ab', 'bc', 'cd', 'de', 'ef', 'fg', 'gh'})[0] == FIRST"
    with Sandbox() as box:
        first = box.run("x = 1", calls=["list({'ab', 'bc', 'cd', 'de', 'ef', 'fg', 'gh'})[0]"]).values[0]
    flaky = flaky.replace("FIRST", first)
    random = "import time\ndef f(xs): return sorted(xs) if hash('q') % 1009 == SEED else xs[:0]"
    with Sandbox() as box:
        random = random.replace("SEED", box.run("x = 1", calls=["hash('q') % 1009"]).values[0])
    tests = [*TESTS, flaky]
    (found,) = Verifier(sandbox).outcomes([Problem("p", [RIGHT, WRONG, random], tests)])
    assert found.flaky.tolist() == [False] * 4 + [True]
    assert found.unstable.tolist() == [False, False, True]
    assert not found.passes[2, [0, 2, 3]].any(), "what passes by chance does not pass"
    assert found.usable.sum() == 4


def test_tests_that_share_state_are_found(sandbox):
    tests = ["seen = [1]\nassert f(seen) == [1]", "assert 'seen' in globals() and f(seen) == [1]", TESTS[0]]
    (found,) = Verifier(sandbox).outcomes([Problem("p", [RIGHT], tests)])
    assert found.passes.tolist() == [[True, False, True]], "alone it has nothing to build on"
    assert found.sharing.tolist() == [False, True, False]
    counter = "n = 0\ndef f():\n    global n\n    n += 1\n    return n"
    (found,) = Verifier(sandbox).outcomes([Problem("p", [counter], ["assert f() == 1", "assert f() == 1 or False"])])
    assert found.sharing.tolist() == [False, True]


def test_mutants_and_mutation_score(sandbox):
    code = "def f(a, b):\n    '''Larger.'''\n    if a > b:\n        return a\n    return b"
    made = mutants(code)
    assert "if a >= b" in "".join(made) and any("return None" in m for m in made)
    assert all("Larger" in m for m in made) and len(set(made)) == len(made) and code not in made
    assert mutants(code) == made and len(mutants(code, 2)) == 2 and set(mutants(code, 2)) <= set(made)
    verifier = Verifier(sandbox, twice=False)
    strong = verifier.mutation_score(code, ["assert f(1, 2) == 2", "assert f(2, 1) == 2"])
    weak = verifier.mutation_score(code, ["assert f(1, 1) == 1 or True"])
    none = verifier.mutation_score(code, ["assert f"])
    assert none == 0.0 <= weak < strong < 1.0, "a >= b means the same here, so nothing notices it"
    with pytest.raises(DataError, match="fails a test"):
        verifier.mutation_score(code, ["assert f(1, 2) == 1"])
    with pytest.raises(DataError, match="no tests"):
        verifier.mutation_score(code, [])
    with pytest.raises(DataError, match="parse"):
        mutants("def f(:")
    assert verifier.mutation_score("x = y = None", ["assert x is None"]) in (None, 1.0)


def test_similarity_and_diverse_choice():
    renamed = "def f(values):\n    # sorts\n    return sorted(values)"
    loop = "def f(xs):\n    out = []\n    for x in xs:\n        out.append(x)\n    out.sort()\n    return out"
    recursive = (
        "def f(xs):\n    if not xs:\n        return []\n    m = min(xs)\n"
        "    return [m] * xs.count(m) + f([x for x in xs if x != m])"
    )
    assert similarity(RIGHT, renamed) == 1.0 > similarity(RIGHT, loop) > 0
    assert similarity(RIGHT, renamed, "token") < 1.0 == similarity(RIGHT, RIGHT, "token")
    assert similarity("def f(:", "def f(:") == 1.0
    pool = [RIGHT, renamed, RIGHT + "\n", loop, recursive]
    chosen = {pool[i] for i in choose_diverse(pool, 3)}
    assert loop in chosen and recursive in chosen
    assert {pool[::-1][i] for i in choose_diverse(pool[::-1], 3)} == chosen
    assert choose_diverse(pool, 9) == [0, 1, 2, 3, 4] and len(choose_diverse(pool, 1)) == 1
    with pytest.raises(ConfigError):
        choose_diverse(pool, 0)


def test_suites_are_taken_apart():
    human_eval = (
        "METADATA = {}\ndef check(candidate):\n    x = 3\n    assert candidate(x) == 4\n"
        "    assert candidate(1) == 2\n\ncheck(f)"
    )
    parts = split_tests(human_eval, "f")
    assert len(parts) == 2 and all("candidate = f" in p and "x = 3" in p for p in parts)
    assert "candidate(1)" not in parts[0] and "candidate(x)" not in parts[1]
    assert split_tests("a = 1\nassert a\nfor i in range(3):\n    assert i < 3") == [
        "a = 1\nassert a", "a = 1\nfor i in range(3):\n    assert i < 3",
    ]  # fmt: skip
    assert split_tests("def test_a():\n    assert 1\ndef test_b():\n    assert 2")[1].endswith("test_b()")
    assert split_tests(["assert 1", " "]) == ["assert 1"]
    for text, words in (("def f(:", "parse"), ("x = 1", "assert nothing"), (human_eval, "entry_point")):
        with pytest.raises(DataError, match=words):
            split_tests(text)
    assert code_of("Here:\n```python\nx = 1\n```\nand\n```\ny = 2\n```") == "x = 1\n\ny = 2\n"
    assert code_of("x = 1") == "x = 1"


def test_tests_by_a_generator():
    asked = []

    def generate(prompt):
        asked.append(prompt)
        return f"Sure:\n```python\nassert f({len(asked)}) == {len(asked)}\nassert f(0) == 0\n```"

    assert design_tests("Add nothing.", generate, "minimal", solution="def f(x): return x") == [
        "assert f(1) == 1", "assert f(0) == 0",
    ]  # fmt: skip
    assert "def f" not in asked[0] and "Add nothing." in asked[0]
    found = design_tests("p", generate, "progressive", solution="def f(x): return x", tests=["assert f(9) == 9"])
    assert len(asked) == 4 and found[0] == "assert f(9) == 9" and len(found) == 5
    assert "harder" in asked[-1] and "f(9)" in asked[-1] and "def f" in asked[-1]
    harder = design_tests("p", generate, "progressive", difficulty=lambda p, t: -len(asked))
    assert len(harder) == 2, "the second round was no harder, and ended it"
    assert "edge cases" in design_prompt("structured", "p")
    with pytest.raises(DataError, match="no test"):
        design_tests("p", lambda prompt: "I cannot.")
    with pytest.raises(ConfigError):
        design_tests("p", generate, "hard")


# -- the stage ---------------------------------------------------------------------------------------------------


def rows(problem, solutions, tests=TESTS, **more):
    return [
        Document(text, f"{problem}/{i}", metadata={"problem": problem, "tests": tests, **more})
        for i, text in enumerate(solutions)
    ]


FLAWED = "def f(xs): return sorted(set(xs))"  # fails where a value comes twice
SUITE = [*TESTS, "assert f([2, 2]) == [2, 2]"]


def run(stage, documents, workers=2):
    return [d.id for d in stage.run(iter(documents), workers)]


def test_stage_keeps_by_tau_and_says_why():
    documents = [
        *rows("a", [f"```python\n{RIGHT}\n```", FLAWED, WRONG, "def g(:"], SUITE),
        *rows("b", [RIGHT], []),
        *rows("c", [RIGHT], "x = 1"),
    ]
    kept_at = {}
    for tau in (0.0, 0.6, 0.8, 1.0):
        stage = VerifyCode(tau, twice=False)
        kept_at[tau] = run(stage, documents)
        dropped = stage.statistics.dropped
        assert dropped["no tests"] == 1 and dropped["tests cannot be used"] == 1 and dropped["does not run"] == 1
        assert sum(dropped.values()) + len(kept_at[tau]) == 6 == stage.statistics.documents_in
    assert kept_at == {0.0: ["a/0", "a/1", "a/2"], 0.6: ["a/0", "a/1", "a/2"], 0.8: ["a/0", "a/1"], 1.0: ["a/0"]}
    out = list(VerifyCode(0.8, twice=False).run(iter(documents), 1))
    assert out[1].metadata["verification"] == {"pass_rate": 0.8, "tests": 5} and out[0].text.startswith("```")


def test_stage_soft_with_a_judge_and_with_scores():
    asked = []

    def judge(prompt, code):
        asked.append((prompt, code))
        return 0.9

    documents = rows("a", [RIGHT, FLAWED, WRONG], SUITE, prompt="Sort.")
    stage = VerifyCode(1.0, tau_low=0.8, judge=judge, twice=False)
    assert run(stage, documents) == ["a/0", "a/1"] and asked == [("Sort.", FLAWED)]
    scored = rows("a", [RIGHT, FLAWED], SUITE, score=0.3)
    assert run(VerifyCode(1.0, tau_low=0.8, judge_key="score", twice=False), scored) == ["a/0"]
    assert run(VerifyCode(1.0, tau_low=0.8, judge_key="score", least_judge=0.2, twice=False), scored) == ["a/0", "a/1"]
    with pytest.raises(DataError, match="no number"):
        run(VerifyCode(1.0, tau_low=0.8, judge=lambda p, c: "good", twice=False), documents)
    assert VerifyCode(tau_low=0.5, judge="operator:add").judge is not None


def test_stage_useless_tests_and_diversity():
    tests = [*SUITE, "assert True"]
    documents = rows(
        "a", [RIGHT, FLAWED, WRONG, RIGHT + " ", "def f(xs):\n    xs = list(xs)\n    xs.sort()\n    return xs"], tests
    )
    stage = VerifyCode(1.0, drop_useless=True, twice=False, keep_each=2)
    out = run(stage, documents)
    assert stage.statistics.counts["useless tests"] == 3, "f([]), f([1]) and True cut nothing"
    assert "a/4" in out and len(out) == 2 and stage.statistics.dropped["more alike than others"] == 1
    idle = VerifyCode(drop_useless=True, twice=False)
    assert run(idle, rows("a", [RIGHT, RIGHT + " "], ["assert True"])) == []
    assert idle.statistics.dropped == {"no usable test": 2}


def test_stage_reports_against_gold_labels(tmp_path, caplog):
    documents = [
        *rows("a", [RIGHT], [*SUITE, "assert f([1]) == [2]"], gold=True),
        *rows("b", [RIGHT], SUITE, gold=True),
        *rows("c", [WRONG], SUITE, gold=False),
        *rows("d", [RIGHT], SUITE),
    ]
    stage = VerifyCode(0.8, twice=False, mutation=5, report=tmp_path / "out")
    with caplog.at_level(logging.WARNING, "trainwright"):
        assert run(stage, documents) == ["a/0", "b/0", "d/0"]
    assert "gold label" not in caplog.text
    figures = json.loads((tmp_path / "out" / "verification.json").read_text())
    by_tau = {r["tau"]: r for r in figures["sweep"]}
    assert by_tau[1.0]["recall"] == 0.5 and by_tau[0.8]["recall"] == 1.0 and by_tau[0.8]["precision"] == 1.0
    assert by_tau[0.0]["precision"] == pytest.approx(2 / 3) and by_tau[0.0]["labelled"] == 3
    assert figures["test_error"] == pytest.approx(1 / 11) and 0 < figures["false_reject"] < 1
    assert 0 < figures["mutation_score"] <= 1 and "seccomp" in figures["sandbox"]["network"]
    page = (tmp_path / "out" / "verification.html").read_text()
    assert "precision" in page and "0.667" in page and "class=chosen" in page
    with caplog.at_level(logging.WARNING, "trainwright"):
        run(VerifyCode(0.5, twice=False), rows("d", [RIGHT]))
    assert "gold label" in caplog.text and "are few" in caplog.text


def test_stage_answers_do_not_depend_on_workers_or_the_order_of_tests():
    documents = [d for p in "abcdefgh" for d in rows(p, [RIGHT, FLAWED, WRONG], SUITE)]
    turned = [d for p in "abcdefgh" for d in rows(p, [RIGHT, FLAWED, WRONG], SUITE[::-1])]
    first = [d.to_json() for d in VerifyCode(0.8, twice=False).run(iter(documents), 1)]
    assert [d.to_json() for d in VerifyCode(0.8, twice=False).run(iter(documents), 3)] == first
    assert run(VerifyCode(0.8, twice=False), turned) == [json.loads(r)["id"] for r in first]
    few = [VerifyCode(1.0, max_tests=1, seed=s, twice=False) for s in range(4)]
    assert len({tuple(run(s, documents)) for s in few}) > 1


def test_stage_through_the_command(tmp_path):
    from trainwright.cli import data as command

    source = tmp_path / "in.jsonl"
    source.write_text("".join(d.to_json() + "\n" for d in rows("a", [RIGHT, FLAWED, WRONG], SUITE)))
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    flat = [{"id": r["id"], "text": r["text"], **r["metadata"]} for r in lines]
    source.write_text("".join(json.dumps(r) + "\n" for r in flat))
    stage = f"verify_code:tau=0.8,twice=false,report={tmp_path / 'report'}"
    found = command.filter([str(source)], tmp_path / "kept", stage=[stage], json=True)
    assert found["documents"] == 2 and found["stages"][-1]["tau"] == 0.8
    assert (tmp_path / "report" / "verification.html").is_file() and (tmp_path / "kept" / "samples.html").is_file()
    built = command.build([str(source)], tmp_path / "built", stage=["verify_code:twice=false"], json=True)
    assert built["documents"] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tau": 1.5}, "tau"), ({"tau": -1}, "tau"), ({"tau_low": 0.5}, "judge"), ({"judge_key": "s"}, "tau_low"),
        ({"tau": 0.5, "tau_low": 0.7, "judge_key": "s"}, "at most tau"), ({"max_tests": 0}, "max_tests"),
        ({"keep_each": 0}, "keep_each"), ({"diversity": "words"}, "diversity"), ({"isolation": "none"}, "isolation"),
        ({"judge": "nothing:here", "tau_low": 0.5}, "judge"), ({"judge": "json", "tau_low": 0.5}, "judge"),
        ({"mutation": -1}, "mutation"), ({"test_error": 2}, "test_error"), ({"cpu_seconds": 0}, "cpu_seconds"),
        ({"tau0": 1}, "tau0"),
    ],
)  # fmt: skip
def test_stage_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_stages([{"verify_code": settings}])


def test_stage_bad_rows():
    apart = [*rows("a", [RIGHT]), *rows("b", [RIGHT]), *rows("a", [WRONG])]
    with pytest.raises(DataError, match="stand apart"):
        run(VerifyCode(twice=False), apart)
    mixed = [*rows("a", [RIGHT]), *rows("a", [WRONG], SUITE)]
    with pytest.raises(DataError, match="different tests"):
        run(VerifyCode(twice=False), mixed)
    with pytest.raises(DataError, match="list of texts"):
        run(VerifyCode(twice=False), rows("a", [RIGHT], [1, 2]))
