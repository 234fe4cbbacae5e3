"""SALT: a teacher for the first steps, and none afterwards; in the trainer and by itself."""

import gc
import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
import yaml

from trainwright import RunConfig, Trainer
from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.data.dataset import ArrayDataset
from trainwright.data.loader import Loader
from trainwright.data.packing import Pool
from trainwright.data.rows import RowStream
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.models.decoder import head_logits
from trainwright.objectives.base import RunContext
from trainwright.objectives.distillation import PROB_UNIT
from trainwright.objectives.next_token import NextToken
from trainwright.objectives.salt import Salt
from trainwright.objectives.teacher import check_same_vocabulary
from trainwright.objectives.teacher_cache import TopKColumns, keep_labels, passes

DECODER = {"name": "decoder", "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64}


def decoder(vocab=259, seq_len=32, seed=0, **changes):
    torch.manual_seed(seed)
    return build("model", {**DECODER, **changes}).build(vocab, seq_len)


def some_batch(rows=2, length=16, vocab=259, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, vocab, (2, rows, length), generator=g)
    doc_ids = (torch.arange(length) >= 7).int().expand(rows, length)
    positions = torch.cat([torch.arange(7), torch.arange(length - 7)]).expand(rows, length)
    return Batch(tokens, targets, torch.ones(rows, length), positions, doc_ids)


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory, corpus):
    """A trained tiny model in a run's folder."""
    folder = tmp_path_factory.mktemp("teacher")
    recipe = {
        "run": {"name": "teacher", "dir": str(folder), "device": "cpu"},
        "model": {**DECODER, "max_seq_len": 32},
        "tokenizer": {"name": "bytes"},
        "data": {"sources": [{"name": "text", "path": corpus}], "cache_dir": str(folder / "cache")},
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "precision": {"name": "fp32"},
        "train": {"steps": 30, "seq_len": 32, "global_batch_tokens": 512},
        "evaluate": {"tokens": 512},
        "checkpoint": {"every": 10},
        "log": {"loggers": [], "progress": "none", "report": False},
    }
    Trainer(RunConfig.load(recipe)).fit()
    return str(folder / "teacher")


def fit(data, resume=False, on_step=None):
    rows = []
    trainer = Trainer(RunConfig.load(data), resume=resume)

    def note(row):
        rows.append(row)
        if on_step is not None:
            on_step(trainer, row)

    trainer.fit(on_step=note)
    return trainer, rows


def salt(teacher, **settings):
    return {"name": "salt", "teacher": teacher, **settings}


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parallel.state().values(), b.parallel.state().values(), strict=True))


# -- (a) without a first stage it is plain training -----------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"weight": 0.0}, {"steps": 0}, {"share": 0.0}])
def test_a_no_weight_or_no_steps_is_plain_training_to_the_bit(recipe, teacher_run, settings):
    plain, rows = fit(recipe(**{"run.name": "plain", "model.dropout": 0.3}))
    mine, got = fit(recipe(**{"run.name": "mine", "model.dropout": 0.3, "objective": salt(teacher_run, **settings)}))
    assert same_weights(plain, mine)
    assert [r["loss"] for r in rows] == [r["loss"] for r in got]


def test_a_opening_the_teacher_draws_nothing_from_the_training(recipe, teacher_run):
    """Dropout masks of the second stage are those of plain training: rate 0, so that only draws could differ."""
    seen = []

    def note(trainer, row):
        seen.append(torch.rand(1).item())

    fit(recipe(**{"run.name": "plain", "model.dropout": 0.3}), on_step=note)
    fit(recipe(**{"run.name": "mine", "model.dropout": 0.3, "objective": salt(teacher_run, steps=2)}), on_step=note)
    assert seen[:4] == seen[4:]


# -- (b) the loss ---------------------------------------------------------------------------------------------------


def test_b_the_objective_is_the_mixed_loss_over_the_batch():
    student, teacher = decoder(seed=1), decoder(seed=2).eval()
    batch = some_batch()
    loss = Salt(teacher, steps=5, weight=0.6, rho=0.5)(student, batch)
    where = {"positions": batch.positions, "doc_ids": batch.doc_ids}
    with torch.no_grad():
        p = student(batch.tokens, **where).double().log_softmax(-1)
        q = (teacher(batch.tokens, **where).double() / 0.5).softmax(-1)
    hard = -p.gather(-1, batch.targets[..., None]).sum()
    soft = -(q * p).sum()
    assert loss.sum.item() == pytest.approx((0.4 * hard + 0.6 * soft).item(), rel=1e-5)
    assert loss.metrics["nll"].item() == pytest.approx(hard.item(), rel=1e-5)
    assert loss.metrics["soft_nll"].item() == pytest.approx(soft.item(), rel=1e-5)
    loss.sum.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in student.parameters())


def test_b_a_model_in_eval_mode_is_scored_without_the_teacher():
    student, teacher = decoder(seed=1), decoder(seed=2).eval()
    batch = some_batch()
    mine = Salt(teacher, steps=5)(student.eval(), batch)
    plain = NextToken()(student, batch)
    assert torch.equal(mine.sum, plain.sum) and mine.metrics.keys() == plain.metrics.keys()


def test_the_weight_falls_linearly_over_the_last_steps_of_the_stage():
    objective = Salt(decoder().eval(), steps=10, weight=0.8, decay_steps=3)
    shares = []
    for step in range(12):
        objective.at_step(step)
        shares.append(round(objective.share, 6))
    assert shares == [0.8] * 7 + [0.6, 0.4, 0.2] + [0.0] * 2


# -- (c) the end of the stage ---------------------------------------------------------------------------------------


def test_c_the_teacher_goes_behind_the_stage_and_nothing_else_moves(recipe, teacher_run):
    held, states = [], []
    teachers = []

    def note(trainer, row):
        if trainer.objective.teacher is not None:
            teachers.append(weakref.ref(trainer.objective.teacher))
        gc.collect()
        held.append(trainer.objective.teacher is not None)
        state = trainer.optimizer.state
        states.append((row["lr"], max(float(s["step"]) for s in state.values())))

    trainer, rows = fit(recipe(**{"train.steps": 5, "objective": salt(teacher_run, steps=3)}), on_step=note)
    assert held == [True] * 3 + [False] * 2
    assert teachers and all(ref() is None for ref in teachers), "something still holds the teacher's bytes"
    assert [step for _, step in states] == [1, 2, 3, 4, 5]  # AdamW's own count goes on
    _, plain = fit(recipe(**{"run.name": "plain", "train.steps": 5}))
    assert [r["lr"] for r in plain] == [lr for lr, _ in states]
    assert ["soft_nll" in r for r in rows] == [True] * 3 + [False] * 2
    lines = [json.loads(x) for x in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [x for x in lines if "loss" in x]
    assert [x["soft_weight"] for x in logged] == [0.667] * 3 + [0.0] * 2


def test_teacher_flops_are_a_third_of_its_forward_and_backward(recipe, teacher_run):
    trainer, _ = fit(recipe(**{"train.steps": 5, "objective": salt(teacher_run, steps=3)}))
    lines = [json.loads(x) for x in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [x for x in lines if "loss" in x]
    one = decoder().flops_per_token(32) / 3 * 256
    assert [x["teacher_flops"] for x in logged] == pytest.approx([one, 2 * one, 3 * one, 3 * one, 3 * one])
    student = trainer.flops_per_token * 256 * 5
    assert logged[-1]["teacher_flops_share"] == pytest.approx(3 * one / (3 * one + student))


@pytest.mark.parametrize("stop", [2, 3, 4])
@pytest.mark.parametrize("top_k", [None, 8])
def test_resume_is_bit_exact_in_either_stage(recipe, teacher_run, stop, top_k):
    common = {"train.steps": 6, "model.dropout": 0.2, "objective": salt(teacher_run, steps=3, top_k=top_k)}
    whole, _ = fit(recipe(**{**common, "run.name": "whole"}))
    data = recipe(**{**common, "run.name": "parts", "checkpoint.every": stop})

    class Enough(Exception):
        pass

    def leave(trainer, row):
        if row["step"] == stop + 1:
            trainer.checkpointer.wait()
            raise Enough

    with pytest.raises(Enough):
        fit(data, on_step=leave)
    parts, rows = fit(data, resume=True)
    assert [r["step"] for r in rows] == list(range(stop + 1, 7))
    assert same_weights(whole, parts)


def test_a_rollback_into_the_stage_opens_the_teacher_again(recipe, teacher_run):
    objective_of = Trainer(RunConfig.load(recipe(objective=salt(teacher_run, steps=2)))).objective
    objective_of.at_step(2)
    assert objective_of.teacher is None
    objective_of.at_step(1)
    assert objective_of.teacher is not None and objective_of.share == 0.667


def test_a_run_resumed_behind_the_stage_needs_no_teacher(recipe, teacher_run, tmp_path):
    import shutil

    copy = tmp_path / "gone"
    shutil.copytree(teacher_run, copy)
    data = recipe(**{"train.steps": 4, "checkpoint.every": 3, "objective": salt(str(copy), steps=2)})

    class Enough(Exception):
        pass

    def leave(trainer, row):
        if row["step"] == 4:
            trainer.checkpointer.wait()
            raise Enough

    with pytest.raises(Enough):
        fit(data, on_step=leave)
    shutil.rmtree(copy)
    _, rows = fit(data, resume=True)
    assert [r["step"] for r in rows] == [4]


def test_the_jump_of_the_loss_at_the_end_of_the_stage_is_not_judged(recipe, teacher_run):
    judged = []
    trainer = Trainer(RunConfig.load(recipe(**{"train.steps": 4, "objective": salt(teacher_run, steps=2, rho=4.0)})))
    for _, monitor in trainer.monitors:
        inspect = monitor.inspect
        monitor.inspect = lambda info, inspect=inspect: (judged.append(info.loss), inspect(info))[1]
    rows = []
    trainer.fit(on_step=rows.append)
    assert rows[0]["loss"] != pytest.approx(rows[0]["nll"], rel=1e-3)
    assert judged[:: len(trainer.monitors)] == [r["nll"] for r in rows]


# -- kept labels ----------------------------------------------------------------------------------------------------


def documents(seed=0, count=9, vocab=259):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 50, (count,), generator=g).tolist()
    return ArrayDataset([torch.randint(0, vocab, (n,), generator=g).numpy() for n in lengths])


def test_kept_labels_are_the_teachers_top_k_at_every_token(tmp_path):
    teacher, data = decoder(seed=2).eval(), documents()
    columns = keep_labels(teacher, data, 5, 0.5, 64, 258, tmp_path)
    for doc in range(data.num_docs):
        tokens = torch.from_numpy(data.tokens(doc)).long()[None]
        with torch.no_grad():
            q = (teacher.double()(tokens)[0] / 0.5).softmax(-1)
        teacher.float()
        probs, _ = q.topk(5, -1)
        got = columns.read(doc, 0, len(tokens[0]))
        assert got["teacher_ids"].shape == (len(tokens[0]), 5)
        held = torch.from_numpy(got["teacher_probs"]).double()
        torch.testing.assert_close(held, probs, rtol=0, atol=1.1 / PROB_UNIT + 1e-6)
        assert (held <= q.gather(-1, torch.from_numpy(got["teacher_ids"]).long()) + 1e-6).all()
    again = keep_labels(teacher, data, 5, 0.5, 64, 258, tmp_path)
    assert again.folder == columns.folder
    assert keep_labels(teacher, data, 5, 0.25, 64, 258, tmp_path).folder != columns.folder
    assert keep_labels(decoder(seed=3).eval(), data, 5, 0.5, 64, 258, tmp_path).folder != columns.folder


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_carry_the_labels_of_their_tokens(tmp_path, workers):
    teacher, data = decoder(seed=2).eval(), documents()
    columns = keep_labels(teacher, data, 3, 1.0, 64, 258, tmp_path)
    data.attach(columns)
    pool = Pool({"a": documents(1, 2), "b": data})  # one part has labels, the other has none
    stream = RowStream(pool, build("batcher", "packed"), 16, seed=1)
    one = Loader({"pool": stream}, global_batch_rows=4, pad_id=258, workers=workers)
    batch = one.next_batch()
    one.close()
    assert batch.extras["teacher_ids"].shape == (4, 16, 3)
    for r, (docs, starts, stops) in enumerate(stream.segments(0, [0, 1, 2, 3])):
        at = 0
        for doc, start, stop in zip(docs.tolist(), starts.tolist(), stops.tolist(), strict=True):
            got = batch.extras["teacher_probs"][r, at : at + stop - start].numpy()
            if doc < 2:
                assert not got.any()
            else:
                assert (got == columns.read(doc - 2, start, stop)["teacher_probs"]).all()
            at += stop - start
    assert batch.rows(0, 2).extras["teacher_ids"].shape == (2, 16, 3)


def test_with_all_ids_kept_labels_train_as_the_live_teacher(recipe, teacher_run):
    """A batcher that cuts as the labels were made, so that both see the same; K = all ids: only rounding differs."""
    common = {"data.batcher": {"name": "best_fit"}}
    _, live = fit(recipe(**{**common, "run.name": "live", "objective": salt(teacher_run, steps=3)}))
    _, kept = fit(recipe(**{**common, "run.name": "kept", "objective": salt(teacher_run, steps=3, top_k=259)}))
    for a, b in zip(live, kept, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=5e-3)


def test_kept_labels_need_no_teacher_beside_the_student(recipe, teacher_run):
    trainer, kept = fit(recipe(**{"run.name": "kept", "objective": salt(teacher_run, steps=3, top_k=16)}))
    assert trainer.objective.teacher is None
    _, live = fit(recipe(**{"run.name": "live", "objective": salt(teacher_run, steps=3)}))
    assert "soft_nll" in kept[0] and "soft_nll" not in kept[3]
    # Not equal: a live teacher does not see what a row's end cut off.
    assert kept[0]["soft_nll"] == pytest.approx(live[0]["soft_nll"], rel=0.1)
    cached = [p for p in trainer.config.data.cache().iterdir() if p.name.startswith("labels-")]
    assert len(cached) == 1 and json.loads((cached[0] / "meta.json").read_text())["top_k"] == 16


def test_damaged_kept_labels_are_made_anew(tmp_path):
    teacher, data = decoder(seed=2).eval(), documents()
    folder = keep_labels(teacher, data, 3, 1.0, 64, 258, tmp_path).folder
    (folder / "probs.bin").write_bytes(b"short")
    with pytest.warns(UserWarning, match="damaged"):
        mended = keep_labels(teacher, data, 3, 1.0, 64, 258, tmp_path)
    assert mended.probs.shape == (data.num_tokens, 3)
    assert isinstance(mended, TopKColumns)


def test_passes_show_every_token_once():
    teacher, data = decoder().eval(), documents()
    seen = set()
    for rows, batch, hidden in passes(teacher, data, 32, 258):
        assert hidden.states.shape[:2] == batch.shape and head_logits(hidden).shape[-1] == 259
        for docs, starts, stops in rows:
            for doc, start, stop in zip(docs.tolist(), starts.tolist(), stops.tolist(), strict=True):
                assert not seen & {(doc, t) for t in range(start, stop)}
                seen |= {(doc, t) for t in range(start, stop)}
    assert len(seen) == data.num_tokens


# -- bad input ------------------------------------------------------------------------------------------------------


def refused(data):
    with pytest.raises(ConfigError) as caught:
        Trainer(RunConfig.load(data))
    return str(caught.value)


def test_a_teacher_of_another_vocabulary_is_refused(recipe, teacher_run):
    message = refused(recipe(tokenizer={"name": "bpe", "vocab_size": 270}, objective=salt(teacher_run)))
    assert message.startswith("objective.teacher: has another vocabulary than the run (259 and 270 tokens; id")
    assert "train the student with the teacher's tokenizer" in message


def test_an_equal_vocabulary_with_another_template_is_taken():
    check_same_vocabulary(ByteTokenizer(), ByteTokenizer(chat_template="{{ messages }}"))


def test_a_teacher_for_shorter_rows_is_refused(recipe, teacher_run):
    message = refused(recipe(**{"train.seq_len": 64, "objective": salt(teacher_run)}))
    assert "objective.teacher" in message and "sees 32 tokens, rows have 64" in message


def test_more_steps_than_the_run_has_are_refused(recipe, teacher_run):
    message = refused(recipe(**{"train.steps": 4, "objective": salt(teacher_run, steps=5)}))
    assert message == "objective.steps=5: is more than the run's 4 steps; lower it"


def test_a_missing_teacher_is_refused_and_leaves_no_run(recipe, tmp_path):
    data = recipe(objective={"name": "salt"})
    assert refused(data).startswith("objective.teacher: is required")
    assert "neither a run" in refused(recipe(objective=salt(str(tmp_path / "nowhere"))))
    assert not (tmp_path / "runs" / "t" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"weight": 1.2}, "objective.weight=1.2"),
        ({"weight": -0.1}, "objective.weight=-0.1"),
        ({"rho": 0.0}, "objective.rho=0.0"),
        ({"rho": -1}, "objective.rho=-1"),
        ({"share": 1.5}, "objective.share=1.5"),
        ({"steps": -1}, "objective.steps=-1"),
        ({"top_k": 0}, "objective.top_k=0"),
        ({"steps": 3, "share": 0.5}, "steps and share both"),
    ],
)
def test_settings_out_of_range_are_refused(recipe, settings, key):
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(recipe(objective=salt("somewhere", **settings)))
    assert key in str(caught.value)


def test_more_kept_ids_than_the_teacher_has_are_refused(recipe, teacher_run):
    assert "objective.top_k=260: is more than the teacher's 259 ids" in refused(
        recipe(objective=salt(teacher_run, top_k=260))
    )


def test_the_plain_class_refuses_bad_values_and_a_teacher_in_train_mode():
    for bad in ({"weight": 1.1}, {"weight": -0.1}, {"rho": 0.0}, {"steps": 2, "decay_steps": 3}):
        with pytest.raises(ValueError):
            Salt(decoder().eval(), **{"steps": 5, **bad})
    with pytest.raises(ValueError, match=r"call teacher\.eval"):
        Salt(decoder(dropout=0.1), steps=5)
    objective = Salt(decoder(dropout=0.1).eval(), steps=5)
    objective.teacher.train()
    with pytest.raises(ValueError, match=r"call teacher\.eval"):
        objective(decoder(), some_batch())
    with pytest.raises(ConfigError, match="neither a teacher"):
        Salt(steps=5)(decoder(), some_batch())


@pytest.mark.parametrize("degree", ["tp", "cp", "pp"])
def test_degrees_that_divide_rows_or_head_are_refused(recipe, teacher_run, degree, tmp_path):
    objective = build("objective", salt(teacher_run)).build()
    context = RunContext(
        tokenizer=ByteTokenizer(), seq_len=32, total_steps=10, resumed=False, device=torch.device("cpu"),
        tokens_per_step=256, flops_per_token=1.0, open_model=None, training_sets={}, cache_dir=tmp_path, split=degree,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=rf"parallel\.{degree} divides them"):
        objective.prepare(context)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"dp_shard": 2}])
def test_two_ranks_train_as_one(recipe, teacher_run, tmp_path, parallel):
    """The teacher is whole on both; a sharded student's head is used where it is gathered."""
    one = recipe(**{"run.name": "one", "objective": salt(teacher_run, steps=2)})
    _, rows = fit(one)
    two = recipe(**{"run.name": "two", "objective": salt(teacher_run, steps=2), "parallel": parallel})
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump(two))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainwright"]
    done = subprocess.run(
        [*command, "train", str(file)], capture_output=True, text=True, timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(x) for x in (tmp_path / "runs" / "two" / "metrics.jsonl").read_text().splitlines()]
    got = [x for x in lines if "loss" in x]
    for a, b in zip(rows, got, strict=True):
        for key in ("loss", "nll", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=2e-5), key
    assert got[-1]["teacher_flops"] == got[1]["teacher_flops"] > 0
