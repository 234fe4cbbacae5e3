"""``trainwright data mix``: shares, budget, repeats, held-out and contaminated documents, order."""

import itertools
import json
import logging
import math
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwright import RunConfig, Trainer
from trainwright.cli import run
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build import blend as blend_module
from trainwright.data.build.blend import Blend, temperature_shares, weight_shares
from trainwright.data.build.composition import read_manifest, verify_shards
from trainwright.data.build.decontamination import NgramDecontaminate
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import open_reader
from trainwright.data.build.mixing import is_held_out
from trainwright.data.build.statistics import Drop
from trainwright.data.build.writers import write_documents


def made(name, count, size=100):
    return [Document(f"{name} {i} ".ljust(size, "x"), f"{name}{i}", name, None, "MIT") for i in range(count)]


@pytest.fixture
def sources(tmp_path):
    for name, count in (("a", 400), ("b", 100), ("c", 25)):
        write_documents(made(name, count), tmp_path / name)
    return [f"{n}={tmp_path / n}" for n in "abc"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(1, 10**12), min_size=1),
    st.floats(0.05, 1e6),
)
def test_temperature(sizes, temperature):
    shares = temperature_shares(sizes, temperature)
    assert math.isclose(sum(shares.values()), 1) and all(p >= 0 for p in shares.values())
    names = sorted(sizes, key=lambda n: sizes[n])
    for small, large in itertools.pairwise(names):
        assert shares[small] <= shares[large] * (1 + 1e-12)
        if shares[small] > 1e-12:
            ratio = (sizes[large] / sizes[small]) ** (1 / temperature)
            assert math.isclose(shares[large] / shares[small], ratio, rel_tol=1e-6)


def test_temperature_limits():
    sizes = {"a": 900, "b": 100}
    assert temperature_shares(sizes, 1) == pytest.approx({"a": 0.9, "b": 0.1})
    assert temperature_shares(sizes, 2) == pytest.approx({"a": 0.75, "b": 0.25})
    assert temperature_shares(sizes, 1e9) == pytest.approx({"a": 0.5, "b": 0.5})
    for bad in (0, -1, math.nan):
        with pytest.raises(ConfigError, match="temperature"):
            temperature_shares(sizes, bad)
    with pytest.raises(DataError, match="no source has a document left"):
        temperature_shares({"a": 0}, 1)


def test_weights():
    assert weight_shares({"a": 3, "b": 1}, "ab") == {"a": 0.75, "b": 0.25}
    for weights, names in (
        ({"a": 0, "b": 0}, "sum to 0"),
        ({"a": -1, "b": 2}, r"weights\.a=-1"),
        ({"a": 1}, r"weights\.b: has no weight"),
        ({"a": 1, "b": 1, "d": 1}, r"weights\.d: no such source"),
        ({"a": math.inf, "b": 1}, r"weights\.a"),
    ):
        with pytest.raises(ConfigError, match=names):
            weight_shares(weights, "ab")


def mixed(out, sub=""):
    return list(open_reader(out / sub if sub else out))


def test_by_weight(sources, tmp_path, capsys):
    out = tmp_path / "out"
    weights = ["--weight", "a=2", "--weight", "b=1", "--weight", "c=1"]
    assert run(["data", "mix", *sources, "--out", str(out), *weights, "--total", "8k"]) == 0
    assert "25.00%" in capsys.readouterr().out
    found = mixed(out)
    assert Counter(d.source for d in found) == {"a": 40, "b": 20, "c": 20}
    assert len({d.id for d in found}) == 80 and verify_shards(out) == []
    mixture = read_manifest(out)["settings"]["mixture"]
    assert mixture["sources"]["a"]["given"] == 4000 and mixture["unit"] == "bytes"
    assert found[0].provenance[-1]["step"] == "mix"
    page = (out / "samples.html").read_text()
    assert "Mixture" in page and "MIT" in page
    assert run(["data", "mix", *sources, "--out", str(out), *weights]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_shares_that_large_documents_miss_are_said(tmp_path, capsys, caplog):
    write_documents([Document("x" * 60_000, f"a{i}", "a") for i in range(4)], tmp_path / "a")
    write_documents([Document("y" * 60_000, f"b{i}", "b") for i in range(4)], tmp_path / "b")
    inputs = [f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"]
    weights = ["--weight", "a=3", "--weight", "b=1", "--total", "100k"]
    caplog.set_level(logging.WARNING, "trainwright")
    logging.getLogger("trainwright").propagate = True
    assert run(["data", "mix", *inputs, "--out", str(tmp_path / "out"), *weights]) == 0
    shown = capsys.readouterr()
    row = next(line.split() for line in shown.out.splitlines() if line.split()[:1] == ["a"])
    assert row[1:4] == ["75.00%", "66.67%", "120,000"]
    assert "a 66.7% instead of 75.0%, b 33.3% instead of 25.0%" in caplog.text + shown.err
    assert "66.67%" in (tmp_path / "out" / "samples.html").read_text()


def test_by_temperature_and_all_that_fits(sources, tmp_path):
    out = tmp_path / "out"
    assert run(["data", "mix", *sources, "--out", str(out), "--temperature", "inf", "--unit", "documents"]) == 0
    assert Counter(d.source for d in mixed(out)) == {"a": 25, "b": 25, "c": 25}
    natural = tmp_path / "natural"
    assert run(["data", "mix", *sources, "--out", str(natural)]) == 0
    assert Counter(d.source for d in mixed(natural)) == {"a": 400, "b": 100, "c": 25}


def test_repeats(sources, tmp_path, capsys):
    common = ["data", "mix", *sources, "--temperature", "inf", "--unit", "documents", "--total", "240"]
    assert run([*common, "--out", str(tmp_path / "x")]) == 2
    assert "gone through 3.2 times, more than repeat=1; lower total" in capsys.readouterr().err
    assert run([*common, "--out", str(tmp_path / "y"), "--repeat", "2"]) == 2
    assert "gone through 3.2 times, more than repeat=2" in capsys.readouterr().err
    assert run([*common, "--out", str(tmp_path / "z"), "--repeat", "4"]) == 0
    found = mixed(tmp_path / "z")
    assert Counter(d.source for d in found) == {"a": 80, "b": 80, "c": 80}
    assert len({d.id for d in found}) == 240 and "c0#4" in {d.id for d in found}
    assert sum(d.id.startswith("c") and "#" not in d.id for d in found) == 25


def test_held_out_and_decontaminated(sources, tmp_path):
    out = tmp_path / "out"
    secret = " ".join(f"word{i}" for i in range(30))
    write_documents([*made("d", 20), Document(f"before {secret} after", "leak", "d")], tmp_path / "d")
    (tmp_path / "exam.txt").write_text(" ".join(secret.split()[5:25]))
    arguments = ["data", "mix", *sources, f"d={tmp_path / 'd'}", "--holdout", "0.2"]
    assert run([*arguments, "--decontaminate", str(tmp_path / "exam.txt"), "--out", str(out)]) == 0
    train, validation = mixed(out, "train"), mixed(out, "validation")
    assert not {d.id for d in train} & {d.id for d in validation}
    assert len(train) + len(validation) == 400 + 100 + 25 + 20
    assert "leak" not in {d.id for d in train + validation} or is_held_out(Document(f"before {secret} after", ""), 0.2)
    assert all(is_held_out(d, 0.2) for d in validation) and not any(is_held_out(d, 0.2) for d in train)
    assert 60 < len(validation) < 160
    for part in ("train", "validation"):
        assert verify_shards(out / part) == []
    found = json.loads((out / "statistics.json").read_text())
    assert found["mixture"]["contaminated"] == 1 and found["mixture"]["held_out"] == len(validation)
    page = (out / "samples.html").read_text()
    assert "shares words with a held-out text" in page and "held out" in page


def test_the_order_is_of_the_seed(sources, tmp_path):
    orders = []
    for name, more in (("a1", []), ("a2", []), ("s1", ["--seed", "1"]), ("plain", ["--no-shuffle"])):
        out = tmp_path / f"out-{name}"
        assert run(["data", "mix", *sources, "--out", str(out), *more]) == 0
        orders.append([d.id for d in mixed(out)])
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2]) == sorted(orders[3])
    # Without a shuffle shares hold all the way: the first 105 documents have about a fifth of each source.
    assert abs(Counter(i[0] for i in orders[3][:105])["a"] - 80) <= 1


def test_tokens_are_counted_by_a_tokenizer(sources, tmp_path, recipe):
    assert run(["data", "mix", *sources, "--out", str(tmp_path / "x"), "--unit", "tokens"]) == 2
    config = RunConfig.load(recipe(**{"train.steps": 1}))
    Trainer(config).fit()
    folder = config.run_dir / "tokenizer"
    out = tmp_path / "out"
    options = ["--unit", "tokens", "--tokenizer", str(folder), "--total", "10100"]
    assert run(["data", "mix", *sources, "--out", str(out), *options]) == 0
    mixture = json.loads((out / "statistics.json").read_text())["mixture"]
    assert 10100 <= mixture["total"] < 10100 + 3 * 101  # bytes, and an EOS a document
    assert mixture["sources"]["a"]["available"] == 400 * 101


def test_a_killed_mix_leaves_nothing_that_looks_whole(sources, tmp_path):
    out = tmp_path / "out"

    class Dying:
        def __init__(self):
            self.times = 0

        def __iter__(self):
            self.times += 1
            for i, document in enumerate(made("a", 50)):
                if self.times == 2 and i == 20:
                    raise KeyboardInterrupt
                yield document

    with pytest.raises(KeyboardInterrupt):
        Blend({"a": Dying()}).write(out, {})
    assert [p.name for p in out.iterdir()] == [".mixing"]
    assert Blend({"a": made("a", 50)}).write(out, {})["documents"] == 50
    assert not (out / ".mixing").exists()


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("part-*"))}


@pytest.mark.parametrize("stage", ["plan", "scatter", "write", "late", "move"])
def test_a_killed_mix_goes_on(tmp_path, monkeypatch, stage):
    """By the same call, and to the same bytes; what was done is not done again."""
    for name, count in (("a", 400), ("b", 100)):
        write_documents(made(name, count), tmp_path / name)
    reads = Counter()

    def blend(**more):
        readers = {n: open_reader(tmp_path / n) for n in "ab"}
        for name, reader in readers.items():
            whole = type(reader).__iter__

            class Counted(type(reader)):
                def __iter__(self, name=name, whole=whole):
                    reads[name] += 1
                    return whole(self)

            reader.__class__ = Counted
        return Blend(readers, weights={"a": 1, "b": 1}, holdout=0.1, repeat=3.0, **more)

    writing = {"shard_bytes": 4000}
    blend().write(tmp_path / "want", writing)
    want = contents(tmp_path / "want")
    once = reads.copy()
    assert len(want) > 5

    def dies(after):
        calls = itertools.count()

        def wrap(function):
            def called(*arguments, **named):
                if next(calls) == after:
                    raise KeyboardInterrupt
                return function(*arguments, **named)

            return called

        return wrap

    place, name, after = {
        "plan": (blend_module.Blend, "plan", 0),
        "scatter": (blend_module, "scatter", 0),
        "write": (blend_module.Writer, "write", 100),
        "late": (blend_module, "save_statistics", 0),
        "move": (None, "", 0),
    }[stage]
    with monkeypatch.context() as patch:
        if stage == "move":
            patch.setattr(blend_module.shutil, "rmtree", dies(2)(blend_module.shutil.rmtree))  # of what was kept
        else:
            patch.setattr(place, name, dies(after)(getattr(place, name)))
        with pytest.raises(KeyboardInterrupt):
            blend().write(tmp_path / "out", writing)
    reads.clear()
    found = blend().write(tmp_path / "out", writing)
    assert contents(tmp_path / "out") == want and not (tmp_path / "out" / ".mixing").exists()
    assert found["documents"] == read_manifest(tmp_path / "out" / "train")["total"]["documents"]
    assert verify_shards(tmp_path / "out" / "train") == []
    again = {
        "plan": once,
        "scatter": once - Counter("ab"),
        "write": Counter("ab"),
        "late": Counter("ab"),
        "move": Counter(),
    }
    assert reads == again[stage]


def test_a_mix_of_other_settings_begins_anew(tmp_path, monkeypatch):
    write_documents(made("a", 400), tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(blend_module, "save_statistics", None)
        with pytest.raises(TypeError):
            Blend({"a": open_reader(tmp_path / "a")}).write(tmp_path / "out", {})
    Blend({"a": open_reader(tmp_path / "a")}, seed=1).write(tmp_path / "out", {})
    Blend({"a": open_reader(tmp_path / "a")}, seed=1).write(tmp_path / "want", {})
    assert contents(tmp_path / "out") == contents(tmp_path / "want")


def test_short_held_out_texts():
    stage = NgramDecontaminate(["Yes.", "one two three four five six"], ngram=13)
    assert not isinstance(stage.apply(Document("they said yes and went", "a")), Drop)
    assert isinstance(stage.apply(Document("Yes!", "b")), Drop)
    assert isinstance(stage.apply(Document("zero ONE two, three four five six seven", "c")), Drop)
    assert not isinstance(stage.apply(Document("one two three four five", "d")), Drop)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--weight", "a"], "should look like NAME=0.3"),
        (["--weight", "a=1", "--weight", "b=0"], "has no weight"),
        (["--weight", "a=0", "--weight", "b=0", "--weight", "c=0"], "sum to 0"),
        (["--temperature", "0"], "temperature=0"),
        (["--temperature", "2", "--weight", "a=1", "--weight", "b=1", "--weight", "c=1"], "leave one out"),
        (["--total", "many"], "such as 20M"),
        (["--total", "0"], "total=0"),
        (["--unit", "pages"], "unit='pages'"),
        (["--holdout", "1"], "holdout=1"),
        (["--repeat", "0.5"], "repeat=0.5"),
    ],
)
def test_refused(sources, tmp_path, capsys, options, names):
    assert run(["data", "mix", *sources, "--out", str(tmp_path / "out"), *options]) == 2
    assert names in capsys.readouterr().err


def test_a_name_that_is_given_twice(sources, tmp_path, capsys):
    assert run(["data", "mix", *sources, sources[0], "--out", str(tmp_path / "out")]) == 2
    assert "given twice" in capsys.readouterr().err
