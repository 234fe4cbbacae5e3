"""Verification of candidate data: both arms start alike, the mix is exact, and the verdict follows the data."""

import json
import math
import random

import pytest
import torch

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError, DataError
from trainwright.lab.annealing import Mix, Slot
from trainwright.lab.verification import _judge, verify_candidate

NAMES = ["alpha", "beta", "gamma", "delta"]


def write(folder, seed, documents=30, shuffled=False, lines=(5, 60)):
    """Texts like those of the run; ``shuffled``: their words in any order."""
    folder.mkdir()
    rng = random.Random(seed)
    for i in range(documents):
        words = []
        for j in range(rng.randint(*lines)):
            words += [*f"{rng.choice(NAMES)} = {rng.choice(NAMES)} + {j}".split(" ")]
        if shuffled:
            words = ["".join(rng.sample(w, len(w))) for w in words]
            rng.shuffle(words)
        (folder / f"{i:03d}.txt").write_text(" ".join(words) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """A run in its stable phase, of 40 steps of 256 tokens."""
    folder = tmp_path_factory.mktemp("run")
    recipe = {
        "run": {"name": "base", "dir": str(folder), "seed": 7, "device": "cpu"},
        "model": {"name": "decoder", "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
        "tokenizer": {"name": "bytes"},
        "data": {
            "sources": [{"name": "text", "path": corpus}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.1,
        },
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "schedule": {"name": "constant", "warmup": 4},
        "precision": {"name": "fp32"},
        "train": {"steps": 40, "seq_len": 32, "global_batch_tokens": 256},
        "evaluate": {"tokens": 1024},
        "log": {"loggers": [], "progress": "none", "report": False},
    }
    Trainer(RunConfig.from_dict(recipe)).fit()
    return folder / "base"


@pytest.fixture(scope="module")
def verified(run, tmp_path_factory):
    candidate = write(tmp_path_factory.mktemp("c") / "shuffled", 1, shuffled=True)
    out = tmp_path_factory.mktemp("out")
    return verify_candidate(run, candidate, tokens=40 * 256, seeds=3, out=out), out, candidate


def test_b_the_default_as_its_own_candidate_gives_exactly_no_difference(run, corpus, tmp_path):
    found = verify_candidate(run, corpus, tokens=10 * 256, seeds=2, out=tmp_path)
    assert set(found.differences.values()) == {0.0} and found.difference == 0.0 and found.interval == (0.0, 0.0)
    assert not found.accepted and "no difference at all" in found.reason
    assert len(list((tmp_path / "anneals").glob("*/result.json"))) == 4, "both arms were trained"
    losses = found.losses["default"]
    assert losses[0]["validation"] != losses[1]["validation"], "the seeds are different orders of the data"


def test_b_arms_start_alike_and_follow_one_rate_to_zero(run, verified):
    found, out, _ = verified
    path = found.learning_rate["path"]
    assert len(path) == 40 and found.learning_rate["at_checkpoint"] == pytest.approx(1.0)
    assert path == pytest.approx([3e-3 * (1 - i / 40) for i in range(40)])
    assert not found.learning_rate["rewarmed"]
    # The first validation of every anneal is of the checkpoint itself, before a step was taken.
    first = set()
    for folder in (out / "anneals").iterdir():
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        first.add(next(r["val_loss"] for r in rows if "val_loss" in r and r["step"] == 0))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert first == {next(r["val_loss"] for r in rows if "val_loss" in r and r["step"] == 40)}


def test_b_the_optimizer_goes_on_with_its_state(run, tmp_path):
    """Weights and moments of an anneal's start are those of the checkpoint, and the same for every seed."""
    from trainwright.lab.annealing import Anneal, anneal_config
    from trainwright.train.checkpoint import read_weights
    from trainwright.train.runs import open_config

    config = open_config(run)
    checkpoint = config.checkpoint_dir / "step-00000040"
    starts = []
    for seed in (0, 1):
        anneal = Anneal(anneal_config(config, tmp_path / "a", 1, seed), checkpoint, 1.0)
        states = list(anneal.trainer.optimizer.state.values())
        assert states and all(float(s["step"]) == 40 and s["exp_avg"].abs().sum() > 0 for s in states)
        stored = read_weights(checkpoint)
        assert all(torch.equal(p.detach(), stored[n]) for n, p in anneal.trainer.model.named_parameters())
        starts.append(anneal.start)
        anneal.trainer.close()
    assert starts[0] == starts[1]


def test_b_the_mixture_is_exact(verified):
    found, _, _ = verified
    assert found.mixture["candidate"]["share"] == pytest.approx(0.3, abs=0.001)
    assert sum(r["rows"] for r in found.mixture.values()) == 40 * 8
    assert found.tokens == 40 * 256 and found.tokens_in_all == 6 * 40 * 256 and found.run_tokens == 40 * 256


def test_b_the_mixture_of_whole_rows_at_other_shares(run, corpus):
    from trainwright.data.dataset import ArrayDataset
    from trainwright.train.runs import open_config

    config = open_config(run)
    rng = random.Random(3)
    sets = [
        ArrayDataset([[rng.randrange(200) for _ in range(rng.randint(2, 90))] for _ in range(n)]) for n in (1500, 900)
    ]
    base, tried = (Slot({"0": d}, {"0": 1.0}) for d in sets)
    for share in (0.1, 0.3, 0.5):
        mix = Mix.of({"base": (base, 1 - share), "slot": (tried, share)}, config, 5)
        assert mix.realized(2000)["slot"]["share"] == pytest.approx(share, abs=0.001)
    # What fills the slot does not move the rows of the rest.
    other = Mix.of({"base": (base, 0.7), "slot": (base, 0.3)}, config, 5)
    mine = Mix.of({"base": (base, 0.7), "slot": (tried, 0.3)}, config, 5)
    rows = [m.streams["base.0"].segments(0, range(50)) for m in (other, mine)]
    assert all((a.docs == b.docs).all() for a, b in zip(*rows, strict=True))
    own = other.streams["slot.0"].segments(0, range(50))
    assert any(list(a.docs) != list(b.docs) for a, b in zip(own, rows[0], strict=True)), "an order of its own"


def test_a_worse_candidate_is_rejected_and_a_good_one_is_better_than_it(run, verified, tmp_path):
    bad, out, _ = verified
    assert bad.difference > 0 and not bad.accepted
    good = verify_candidate(run, write(tmp_path / "clean", 2), tokens=40 * 256, seeds=3, out=out)
    assert good.difference < bad.difference
    assert all(good.differences[s] < bad.differences[s] for s in range(3)), "in every seed"
    anneals = list((out / "anneals").glob("*/result.json"))
    assert len(anneals) == 9, "the default arm was not trained again"


def test_a_finished_verification_is_read_and_not_run_again(run, verified, monkeypatch):
    found, out, candidate = verified
    monkeypatch.setattr(Trainer, "fit", lambda *a: pytest.fail("trained again"))
    again = verify_candidate(run, candidate, tokens=40 * 256, seeds=3, out=out)
    assert again.to_dict() == found.to_dict()
    stored = json.loads((out / "verification.json").read_text())
    assert stored["learning_rate"]["start_factor"] == pytest.approx(1.0) and stored["mixture"] and stored["interval"]


def test_groups_of_evaluation_count_the_same(run, tmp_path):
    group = write(tmp_path / "group", 5, documents=4)
    candidate = write(tmp_path / "clean", 2)
    found = verify_candidate(run, candidate, tokens=2560, seeds=2, groups={"own": group}, out=tmp_path / "o")
    assert set(found.groups) == {"validation", "own"}
    mean = sum(g["difference"] for g in found.groups.values()) / 2
    assert found.difference == pytest.approx(mean)
    # Twice as many tokens a step, so the loss differs from that of one group alone: it is really of that text.
    assert found.groups["own"]["default"] != found.groups["validation"]["default"]


def losses(*differences):
    sides = {"default": {}, "candidate": {}}
    for seed, d in enumerate(differences):
        sides["default"][seed], sides["candidate"][seed] = {"v": 2.0 + seed}, {"v": 2.0 + seed + d}
    return sides


@pytest.mark.parametrize(
    "differences, verdict, reason",
    [
        ((-0.1, -0.11, -0.09), "accept", "lowers"),
        ((0.1, 0.11, 0.09), "reject", "raises"),
        ((-0.1, 0.11, -0.09), "reject", "within the noise"),
        ((-0.1,), "reject", "one seed"),
        ((0.0, 0.0), "reject", "no difference at all"),
    ],
)
def test_the_verdict_is_the_paired_interval(differences, verdict, reason):
    found = _judge(losses(*differences), ["v"])
    assert found["verdict"] == verdict and reason in found["reason"]
    assert found["difference"] == pytest.approx(sum(differences) / len(differences))
    if len(differences) == 3:
        mean = sum(differences) / 3
        half = 4.302652729911275 * math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)  # t of 2 at 97.5 %
        assert found["interval"] == pytest.approx((mean - half, mean + half), abs=1e-9)


def test_bad_a_candidate_with_documents_of_the_evaluation_set(run, corpus, tmp_path):
    from trainwright.train.runs import open_config

    source = open_config(run).data.sources[0]
    held_out = [d.text for d in source.documents("validation", 0.1)]
    folder = write(tmp_path / "leaky", 4)
    (folder / "leak.txt").write_text("something before\n" + held_out[0])
    with pytest.raises(DataError, match=r"holds 1 of the \d+ documents of the evaluation set validation"):
        verify_candidate(run, folder, tokens=2560, seeds=2, out=tmp_path / "o")
    found = verify_candidate(run, folder, tokens=256, seeds=2, out=tmp_path / "o", on_overlap="warn")
    assert any("evaluation set" in w for w in found.warnings)


def test_bad_a_checkpoint_that_is_decayed_already_warns(run, corpus, tmp_path, caplog):
    config = json.loads(json.dumps(RunConfig.load(str(run / "config.yaml")).to_dict()))
    config["run"] |= {"dir": str(tmp_path), "name": "decayed"}
    config["schedule"] = {"name": "linear", "warmup": 0, "final": 0.0}
    Trainer(RunConfig.from_dict(config)).fit()
    found = verify_candidate(tmp_path / "decayed", write(tmp_path / "c", 1), tokens=256, seeds=1)
    assert any("decayed already" in w for w in found.warnings) and "decayed already" in caplog.text
    assert found.learning_rate["at_checkpoint"] == pytest.approx(1 / 40)
    again = verify_candidate(tmp_path / "decayed", tmp_path / "c", tokens=256, seeds=1, start_factor=0.5)
    assert again.learning_rate["rewarmed"] and any("re-warmed" in w for w in again.warnings)


def test_bad_a_candidate_smaller_than_its_share_repeats(run, tmp_path):
    found = verify_candidate(run, write(tmp_path / "small", 9, documents=3, lines=(5, 6)), tokens=10240, seeds=1)
    assert found.repeats > 1 and any(f"{found.repeats:.2f} times" in w for w in found.warnings)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"share": 0.0}, "share=0.0"),
        ({"share": 1.0}, "share=1.0"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 256, "share": 0.01}, "none of 8 rows"),
        ({"start_factor": 0.0}, "start_factor"),
        ({"on_overlap": "ignore"}, "on_overlap"),
    ],
)
def test_bad_settings(run, tmp_path, settings, message):
    candidate = write(tmp_path / "c", 1, documents=3)
    with pytest.raises(ConfigError, match=message):
        verify_candidate(run, candidate, **{"tokens": 2560, "out": tmp_path / "o", **settings})


def test_the_command(run, verified, capsys):
    from trainwright.cli import run as command

    found, out, candidate = verified
    arguments = ["data", "verify", str(run), "--candidate", str(candidate), "--tokens", "10240", "--out", str(out)]
    assert command([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] == found.difference
    assert command(arguments) == 0
    said = capsys.readouterr().out
    assert found.verdict in said and f"{found.difference:+.4f}" in said and "verification.json" in said
    for bad in (["--tokens", "many"], ["--evaluate", "validation=x"], ["--candidate", "{name: none}"]):
        assert command([*arguments, *bad]) == 2


def test_overlap_is_found_by_stretches_of_tokens():
    from trainwright.data.build.quality.overlap import overlapping
    from trainwright.data.dataset import ArrayDataset

    rng = random.Random(0)
    docs = [[rng.randrange(1000) for _ in range(n)] + [0] for n in (200, 200, 200, 10, 10, 1)]
    held_out = ArrayDataset(docs)
    inside = [7] * 50 + docs[0][:-1] + [8] * 50 + [0]  # whole, in the middle of another
    half = docs[1][:60] + [9] * 90 + [0]  # less than half of it
    training = ArrayDataset([inside, half, docs[3], [5, *docs[4]], [rng.randrange(1000) for _ in range(5000)]])
    assert overlapping(training, held_out).tolist() == [0, 3], "a short one counts where it is there whole and alone"
    assert overlapping(training, held_out, least=0.1).tolist() == [0, 1, 3]
    assert overlapping(ArrayDataset([[1, 0]]), held_out).tolist() == []
