"""``trainwright plan comm`` plans the step that a trainer would make of the same recipe. tests/parallel holds its bytes
against recorded ones."""

import json

import pytest

from trainwright.cli import run
from trainwright.config import RunConfig
from trainwright.parallel.config import Degrees
from trainwright.train.degrees import local_rows

RECIPE = [
    "model.dim=64", "model.n_heads=4", "model.n_kv_heads=2", "model.n_layers=4", "tokenizer.name=bytes",
    "train.seq_len=1024", "train.global_batch_tokens=16384", "train.steps=1",
]  # fmt: skip
LARGE = [
    "model.dim=8192", "model.n_layers=40", "model.n_heads=64", "model.n_kv_heads=8", "model.ffn_dim=28672",
    "tokenizer.name=bytes", "train.seq_len=4096", "train.global_batch_tokens=262144", "train.steps=1",
]  # fmt: skip


def plan(capsys, *settings, world, recipe=RECIPE):
    assert run(["plan", "comm", *recipe, *settings, "--world", str(world), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_micro_batches_are_those_of_the_trainer(capsys):
    """16 rows of 1024 tokens: 8 to a micro-batch, but with stages that would wait 2."""
    config = RunConfig.load(None, [*RECIPE, "parallel.pp=2"])
    rows, micro = local_rows(config, 1, 2)
    assert (rows, micro) == (16, 2)
    found = plan(capsys, "parallel.pp=2", world=2)
    assert found["own"]["bubble"] == pytest.approx(1 / (rows // micro + 1))
    # The layouts to choose from too, each with its own.
    for layout in found["layouts"]:
        degrees = Degrees(**layout["layout"])
        rows, micro = local_rows(config, degrees.dp_replicate * degrees.dp_shard, degrees.pp)
        assert layout["bubble"] == pytest.approx((degrees.pp - 1) / (rows // micro + degrees.pp - 1))
    assert {layout["layout"]["pp"] for layout in found["layouts"]} == {1, 2}


def test_layouts_that_could_not_run_are_left_out(capsys):
    """Of 4 rows in pairs there are 2 micro-batches, too few for 4 stages."""
    settings = ("train.global_batch_tokens=4096", "train.micro_batch_size=2")
    stages = {layout["layout"]["pp"] for layout in plan(capsys, *settings, world=4)["layouts"]}
    assert stages == {1, 2}


@pytest.mark.parametrize(
    "settings, world, says",
    [
        (["parallel.tp=3"], 3, "parallel.tp=3: does not divide n_heads=4; use one of 1, 2"),
        (["parallel.pp=8"], 8, "makes 8 stages of 4 layers"),
        (["parallel.context=ulysses"], 2, "cp is 1; set cp, or leave it out"),
        (["parallel.dp_shard=32"], 32, "fewer than the 32 data-parallel ranks"),
    ],
)
def test_what_a_training_refuses_is_refused(capsys, settings, world, says):
    assert run(["plan", "comm", *RECIPE, *settings, "--world", str(world)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_auto_is_settled_for_the_cluster(capsys, tmp_path):
    """34 billion parameters, 548 GB of state: spread as far as 80 GB a rank ask for, or 1000."""
    own = plan(capsys, "parallel=auto", world=8, recipe=LARGE)["own"]
    assert own["note"] == "" and own["state_gb"] < 80 and own["layout"]["dp_replicate"] == 1
    (tmp_path / "large.yaml").write_text("memory_gb: 1000")
    cluster = ["--cluster", str(tmp_path / "large.yaml")]
    own = plan(capsys, "parallel=auto", "train.micro_batch_size=1", *cluster, world=8, recipe=LARGE)["own"]
    assert own["layout"]["dp_replicate"] == 8


def test_only_what_is_trained_is_reduced(capsys):
    """Adapters of rank 4 against the whole model, of which DDP sends the gradient; so the layouts are ranked anew."""
    whole = plan(capsys, world=2)["own"]
    adapters = plan(capsys, "transforms=[{name: lora, rank: 4}]", world=2)["own"]
    sent = {t["what"]: t["bytes"] for t in adapters["transfers"]}["gradients"]
    dim, kv, ffn = 64, 32, 192
    sides = 2 * (dim + dim) + 2 * (dim + kv) + 3 * (dim + ffn)  # in + out of q and o, k and v, and the feed-forward
    assert sent == 4 * 4 * 4 * sides  # layers, rank, bytes
    assert whole["bytes"] > 5 * adapters["bytes"] and whole["state_gb"] > 2 * adapters["state_gb"]


@pytest.mark.parametrize(
    "settings, says",
    [
        (["optimizer=adamw", "parallel.dp_shard=2"], None),
        (["optimizer=muon", "parallel.dp_shard=2"], None),
        (["optimizer=soap", "parallel.dp_shard=2"], "soap, whose exchange"),
        (["optimizer={name: muon, inner: adafactor}", "parallel.tp=2"], "adafactor, whose exchange"),
        (["optimizer=soap"], None),  # replicas step alike
        (["optimizer=soap", "parallel.pp=2"], None),
        (["optimizer={name: numuon, schedule: cosine}", "parallel.dp_shard=2"], "numuon until its rank is at its end"),
        (["optimizer=grass", "transforms=[grass_linear]", "clip=none"], "grass_linear adds up slices of gradients"),
        (
            [
                "parallel={pp: 2, pipeline: {schedule: zero_bubble, stages_per_rank: 2}}",
                "memory=[activation_checkpointing]",
            ],
            "what recomputation sends again: zero_bubble",
        ),
    ],
)
def test_what_is_not_counted_is_named(capsys, settings, says):
    left = plan(capsys, *settings, world=2)["not_counted"]
    assert len(left) == (says is not None) and (says or "") in "".join(left)
    assert run(["plan", "comm", *RECIPE, *settings, "--world", "2"]) == 0
    assert ("Not counted: " in capsys.readouterr().out) == (says is not None)


def test_auto_may_leave_a_setting_without_a_use(capsys):
    """As in a training: a context for rows that no rank has to share."""
    own = plan(capsys, "parallel={auto: true, context: ulysses, accumulate: whole}", world=2)["own"]
    assert own["layout"]["cp"] == own["layout"]["dp_shard"] == 1
