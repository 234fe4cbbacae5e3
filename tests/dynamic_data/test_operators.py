"""Operator pipelines: checked before they run, each operator once, planners mended by their errors."""

import json
from collections import Counter

import pytest

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.operator_runs import Workspace, freeze, thaw
from trainwright.data.build.operators import Operator, Pipeline, Step, check, order, problems
from trainwright.data.build.planner import llm_planner, plan, rule_planner, stage_operators

COLUMNS = {"text": "str", "stars": "int"}
TABLE = [{"text": f"word {i} " * (i % 5 + 1), "stars": i % 4} for i in range(50)]


class Broken(Exception):
    pass


@pytest.fixture
def world():
    """A catalogue whose operators count the rows that they see."""
    seen = Counter()

    def counted(name, function):
        def call(row, **settings):
            seen[name] += 1
            return function(row, **settings)

        return call

    def size(row, per=1):
        seen["size"] += 1
        if seen["limit"] and seen["size"] > seen["limit"]:
            raise Broken("the machine stopped")
        return {"n": len(row["text"]) // per}

    def unique(rows, start=0):
        have = set()
        for row in rows:
            seen["unique"] += 1
            yield {"first": row["text"] not in have}
            have.add(row["text"])

    made = [
        Operator("size", "1", {"text": "str"}, {"n": "int"}, size),
        Operator("long", "1", {"n": "float"}, {"keep": "bool"}, counted("long", lambda row: {"keep": row["n"] > 10})),
        Operator("upper", "1", {"text": "str"}, {"out": "str"}, counted("upper", lambda r: {"out": r["text"].upper()})),
        Operator("unique", "1", {"text": "str"}, {"first": "bool"}, unique, whole=True),
        Operator("judge", "1", {"out": "str", "n": "int"}, {"good": "bool"},
                 counted("judge", lambda r: {"good": r["n"] % 2 == 0}), cost="llm"),
        Operator("cheap", "1", {"n": "int"}, {"good": "bool"}, counted("cheap", lambda r: {"good": True})),
        Operator("liar", "1", {"text": "str"}, {"x": "int"}, lambda row: {"x": "no number"}),
    ]  # fmt: skip
    return {o.name: o for o in made}, seen


PIPE = Pipeline([Step("judge"), Step("long"), Step("size"), Step("upper", where="keep")], ["keep"])


def test_steps_run_behind_those_whose_columns_they_read(world, tmp_path):
    catalogue, seen = world
    assert [PIPE.steps[i].operator for i in order(PIPE, catalogue)] == ["size", "long", "upper", "judge"]
    result = Workspace(tmp_path, catalogue, chunk=7).run(PIPE, TABLE)
    assert result.executed == ["size", "long", "upper", "judge"] and result.reused == []
    rows = list(result.read(everything=True))
    assert len(rows) == 50
    for row, given in zip(rows, TABLE, strict=True):
        n = len(given["text"])
        kept = n > 10
        assert row == {
            **given, "n": n, "keep": kept, "out": given["text"].upper() if kept else None,
            "good": n % 2 == 0 if kept else None,
        }  # fmt: skip
    assert [r["text"] for r in result.read(["text"])] == [t["text"] for t in TABLE if len(t["text"]) > 10]
    assert seen["upper"] == sum(r["keep"] for r in rows)


def test_an_unchanged_pipeline_runs_no_operator_and_a_changed_step_what_depends_on_it(world, tmp_path):
    catalogue, seen = world
    Workspace(tmp_path, catalogue, chunk=7).run(PIPE, TABLE)
    before = dict(seen)
    again = Workspace(tmp_path, catalogue, chunk=7).run(PIPE, iter(TABLE))
    assert again.executed == [] and len(again.reused) == 4 and dict(seen) == before
    other = {**catalogue, "long": Operator("long", "2", {"n": "float"}, {"keep": "bool"}, lambda r: {"keep": True})}
    assert Workspace(tmp_path, other, chunk=7).run(PIPE, TABLE).executed == ["long", "upper", "judge"]
    sized = Pipeline([Step("size", {"per": 2}), *[s for s in PIPE.steps if s.operator != "size"]], ["keep"])
    assert Workspace(tmp_path, catalogue, chunk=7).run(sized, TABLE).executed == ["size", "long", "upper", "judge"]
    grown = [*TABLE, {"text": "one more", "stars": 1}]
    assert len(Workspace(tmp_path, catalogue, chunk=7).run(PIPE, grown).executed) == 4


@pytest.mark.parametrize("limit", [1, 20, 21, 43])
def test_an_interrupted_operator_goes_on_behind_its_last_chunk(world, tmp_path, limit):
    catalogue, seen = world
    pipe = Pipeline([Step("size"), Step("long")])
    seen["limit"] = limit
    with pytest.raises(DataError, match=f"size, row {limit}: Broken: the machine stopped"):
        Workspace(tmp_path, catalogue, chunk=7).run(pipe, TABLE)
    whole = limit // 7 * 7
    seen["limit"], seen["size"] = 0, 0
    result = Workspace(tmp_path, catalogue, chunk=7).run(pipe, TABLE)
    assert seen["size"] == 50 - whole
    assert [r["n"] for r in result.read(["n"])] == [len(t["text"]) for t in TABLE]


def test_operators_that_see_the_whole_table(world, tmp_path):
    catalogue, seen = world
    pipe = Pipeline([Step("size"), Step("long"), Step("unique", where="keep")], ["keep", "first"])
    table = TABLE + TABLE
    result = Workspace(tmp_path, catalogue, chunk=7).run(pipe, table)
    long = [t["text"] for t in TABLE if len(t["text"]) > 10]
    assert [r["text"] for r in result.read()] == list(dict.fromkeys(long))
    assert seen["unique"] == 2 * len(long)


@pytest.mark.parametrize(
    ("pipe", "message"),
    [
        (Pipeline([Step("long")]), "column 'n' is missing"),
        (Pipeline([Step("nothing")]), "no operator 'nothing'"),
        (Pipeline([Step("size"), Step("size")]), "written by step 0 already"),
        (Pipeline([Step("upper", outputs={"out": "text"})]), "is the table's"),
        (Pipeline([Step("upper", inputs={"text": "stars"})]), "stars is int, and str is needed"),
        (Pipeline([Step("size", {"by": 3})]), "unknown setting 'by'"),
        (Pipeline([Step("size", inputs={"txt": "text"})]), "has no column 'txt'"),
        (Pipeline([Step("size", where="stars")]), "stars is int, and bool is needed"),
        (Pipeline([Step("size")], ["n"]), "keep: n is int"),
        (
            Pipeline([
                Step("upper", inputs={"text": "b"}, outputs={"out": "a"}),
                Step("upper", inputs={"text": "a"}, outputs={"out": "b"}),
            ]),
            "wait for each other",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_wrong_pipelines_are_refused_before_anything_runs(world, tmp_path, pipe, message):
    catalogue, seen = world
    assert any(message in p for p in problems(pipe, COLUMNS, catalogue))
    with pytest.raises(ConfigError, match="pipeline"):
        Workspace(tmp_path, catalogue).run(pipe, TABLE)
    assert not seen


def test_an_operator_that_breaks_its_word_is_named(world, tmp_path):
    catalogue, _ = world
    with pytest.raises(DataError, match="liar, row 0: x is str, not int"):
        Workspace(tmp_path, catalogue).run(Pipeline([Step("liar")]), TABLE)
    with pytest.raises(DataError, match="no row"):
        Workspace(tmp_path, catalogue).run(Pipeline([Step("size")]), [])
    with pytest.raises(DataError, match="row 1 of the table"):
        Workspace(tmp_path, catalogue).run(Pipeline([Step("size")]), [{"text": "a"}, {"texts": "b"}])

    def short(rows):
        next(rows)
        yield {"first": True}

    catalogue["unique"] = Operator("unique", "2", {"text": "str"}, {"first": "bool"}, short, whole=True)
    with pytest.raises(DataError, match="before the table did"):
        Workspace(tmp_path, catalogue).run(Pipeline([Step("unique")]), TABLE)


def test_frozen_recipes_carry_hashes(world, tmp_path):
    catalogue, _ = world
    path = freeze(PIPE, COLUMNS, catalogue, tmp_path / "pipe.yaml")
    back = thaw(path, catalogue)
    assert back.to_json() == PIPE.to_json()
    text = path.read_text()
    path.write_text(text.replace("where: keep", "where: null"))
    with pytest.raises(ConfigError, match="edited"):
        thaw(path, catalogue)
    path.write_text(text)
    newer = {**catalogue, "long": Operator("long", "2", {"n": "float"}, {"keep": "bool"}, catalogue["long"].function)}
    with pytest.raises(ConfigError, match="version 1 of long"):
        thaw(path, newer)


# Planners


def test_rules_chain_the_cheapest_operators_backwards(world):
    catalogue, _ = world
    found = plan("good texts", TABLE, rule_planner, catalogue, wanted={"good": "bool"})
    assert [s.operator for s in found.pipeline.steps] == ["size", "cheap"] and found.tries == 1
    assert found.pipeline.keep == ["good"]


def test_rules_go_on_with_another_operator_when_one_fails_on_the_rows(world):
    catalogue, _ = world
    catalogue["cheap"] = Operator("cheap", "1", {"n": "int"}, {"good": "bool"}, lambda row: {"good": 1 / 0})
    found = plan("good texts", TABLE, rule_planner, catalogue, wanted={"good": "bool"})
    assert [s.operator for s in found.pipeline.steps] == ["upper", "size", "judge"] and found.tries == 2
    assert "ZeroDivisionError" in found.history[0][0]


def test_a_model_is_told_its_errors_until_the_pipeline_runs(world):
    catalogue, seen = world
    answers = [
        "I cannot do that.",
        'Sure: {"steps": ["long"], "keep": ["keep"]}',
        json.dumps({"steps": ["size", "liar", "long"], "keep": ["keep"]}),
        'Here: {"steps": [{"operator": "size"}, {"operator": "long"}], "keep": ["keep"]} Done.',
    ]
    asked = []

    def complete(prompt):
        asked.append(prompt)
        return answers[len(asked) - 1]

    found = plan("long texts", iter(TABLE), llm_planner(complete), catalogue, wanted={"keep": "bool"}, n=32)
    assert found.tries == 4 and [s.operator for s in found.pipeline.steps] == ["size", "long"]
    assert "column 'n' is missing" in asked[2] and "liar, row 0" in asked[3] and '"liar"' in asked[3]
    assert seen["size"] == 64  # the dry runs saw 32 rows each, and nothing else did
    check(found.pipeline, found.columns, catalogue)


def test_a_planner_that_never_succeeds_ends_after_its_tries(world):
    catalogue, _ = world
    tries = []
    with pytest.raises(ConfigError, match=r"in 5 tries.*missing"):
        plan("x", TABLE, lambda request: tries.append(request) or {"steps": ["long"]}, catalogue)
    assert len(tries) == 5 and tries[1].errors and not tries[0].errors
    with pytest.raises(ConfigError, match="no operator writes"):
        plan("x", TABLE, rule_planner, catalogue, wanted={"nowhere": "str"}, max_tries=1)
    with pytest.raises(ConfigError, match="made from itself"):
        loop = {"a": Operator("a", "1", {"y": "str"}, {"x": "str"}, lambda r: r),
                "b": Operator("b", "1", {"x": "str"}, {"y": "str"}, lambda r: r)}  # fmt: skip
        plan("x", TABLE, rule_planner, loop, wanted={"x": "str"}, max_tries=1)


def test_stages_of_a_build_are_operators(tmp_path):
    catalogue = stage_operators()
    pipe = Pipeline(
        [
            Step("lengths", {"least": 12}, outputs={"keep": "long_enough", "clean_text": "same"}),
            Step("exact_dedup", outputs={"keep": "first"}, where="long_enough"),
        ],
        ["long_enough", "first"],
    )
    table = [{"text": t} for t in ["short", "a text that is long", "a text that is long", "another long text"]]
    result = Workspace(tmp_path, catalogue).run(pipe, table)
    assert [r["text"] for r in result.read()] == ["a text that is long", "another long text"]
    assert Workspace(tmp_path, catalogue).run(pipe, table).executed == []
