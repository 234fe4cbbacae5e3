"""Stages of a run's data: the best documents first, documents free of metadata last, and scores to choose by."""

import json
import re

import numpy as np
import pytest
import torch

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import build
from trainwright.data.dataset import ArrayDataset
from trainwright.data.module import DataConfig, build_data, build_tokenizer
from trainwright.data.scoring import document_scores, learnable_losses, score_documents
from trainwright.data.stages import (
    FirstStageConfig,
    Subset,
    apportion,
    best_documents,
    load_scores,
    rows_of_stages,
    save_scores,
)

SHAPE = {"name": "decoder", "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64}


def numbered(folder, name, letter, count):
    file = folder / f"{name}.jsonl"
    rows = ({"text": f"{letter}{i:03d}" * 7, "url": f"http://{name}.org/{i}"} for i in range(count))
    file.write_text("\n".join(json.dumps(r) for r in rows))
    return {"name": "jsonl", "path": str(file)}


def data_of(tmp_path, sources=None, **changes):
    sources = sources or [numbered(tmp_path, "a", "a", 60), numbered(tmp_path, "b", "b", 40)]
    setting = {"sources": sources, "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.0, **changes}
    config = DataConfig.model_validate(setting)
    tokenizer = build_tokenizer(config, build("tokenizer", "bytes"))
    return build_data(config, tokenizer, seq_len=32, seed=3)


def scored(tmp_path, data, seed=0):
    """Random scores of the data's documents, kept in a file."""
    rng = np.random.default_rng(seed)
    scores = {name: rng.random(d.num_docs).astype(np.float32) for name, d in data.train.items()}
    save_scores(tmp_path / "scores.npz", scores, data.train)
    return scores, {"scores": str(tmp_path / "scores.npz"), "fraction": 0.2}


def documents(batch):
    """The numbered documents that a batch holds, as (letter, number)."""
    out = set()
    for row, docs in zip(batch.tokens, batch.doc_ids, strict=True):
        for doc in docs.unique():
            ids = [i for i in row[docs == doc].tolist() if i < 256]
            out |= {(letter, int(number)) for letter, number in re.findall(r"([ab])(\d{3})", bytes(ids).decode())}
    return out


# -- the scores -----------------------------------------------------------------------------------------------------


def test_d_a_token_counts_by_its_loss_if_it_is_among_the_k_likeliest():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 13, generator=g)
    targets = torch.randint(0, 13, (50,), generator=g)
    got = learnable_losses(logits, targets, 4)
    for row, target, value in zip(logits, targets, got, strict=True):
        among = int(target) in row.topk(4).indices.tolist()
        want = -row.double().log_softmax(-1)[target] if among else torch.zeros(())
        assert value.item() == pytest.approx(want.item(), abs=1e-6)
    assert (learnable_losses(logits, targets, 13) > 0).all()


def test_d_documents_are_scored_by_the_median_and_0_without_a_learnable_token():
    torch.manual_seed(0)
    model = build("model", SHAPE).build(259, 32).eval()
    g = torch.Generator().manual_seed(1)
    lengths = [1, 2, 9, 30, 31]
    docs = [torch.randint(0, 259, (n,), generator=g).numpy() for n in lengths]
    data = ArrayDataset(docs, [np.r_[np.zeros(n // 3), np.ones(n - n // 3)] for n in lengths])
    for k in (1, 10, 259):
        scores = score_documents(model, data, seq_len=32, pad_id=258, k=k)
        for doc, score in zip(range(len(docs)), scores.tolist(), strict=True):
            ids = torch.from_numpy(docs[doc]).long()
            with torch.no_grad():
                logits = model(ids[None])[0]
            losses = learnable_losses(logits[:-1], ids[1:], k).numpy()
            keep = data.loss_weights(doc)[1:] > 0
            want = float(np.median(losses[keep])) if keep.any() else 0.0
            assert score == pytest.approx(want, abs=1e-5)
        assert scores[0] == 0.0
    untrained = score_documents(model, data, seq_len=32, pad_id=258, k=1)
    assert (untrained == 0).all(), "an untrained model has hardly a target as its first choice"
    assert document_scores(np.array([3.0, 1.0, 2.0])) == 2.0 and document_scores(np.zeros(0)) == 0.0


def test_d_the_fraction_is_exact_and_the_choice_the_same_each_time():
    rng = np.random.default_rng(0)
    scores = {"b": rng.random(37), "a": rng.random(63)}
    for fraction in (0.01, 0.25, 0.335, 1.0):
        one = best_documents(scores, fraction, True)
        assert sum(map(len, one.values())) == max(1, round(100 * fraction))
        lowest = min(scores[n][d].min() for n, d in one.items() if len(d))
        left = np.concatenate([np.delete(scores[n], d) for n, d in one.items()])
        assert not len(left) or left.max() < lowest
        again = best_documents(dict(reversed(scores.items())), fraction, True)
        assert all((one[n] == again[n]).all() for n in one)
    each = best_documents(scores, 0.25, False)
    assert {n: len(d) for n, d in each.items()} == {"a": 16, "b": 9}
    ties = best_documents({"a": np.zeros(10)}, 0.3, True)
    assert ties["a"].tolist() == [0, 1, 2]
    assert best_documents({"a": np.array([np.nan, 0.0, -1.0])}, 0.34, True)["a"].tolist() == [1]


def test_scores_of_other_documents_are_refused(tmp_path):
    data = data_of(tmp_path)
    scores, _ = scored(tmp_path, data)
    found = load_scores(tmp_path / "scores.npz", data.train)
    assert all((found[n] == scores[n]).all() for n in scores)
    other = {"a": ArrayDataset([[1, 2, 3]])}
    with pytest.raises(DataError, match="has no scores of source a as it is now"):
        load_scores(tmp_path / "scores.npz", other)
    (tmp_path / "broken.npz").write_bytes(b"no scores")
    with pytest.raises(DataError, match="cannot be read as scores"):
        load_scores(tmp_path / "broken.npz", data.train)
    with pytest.raises(DataError, match="cannot be read as scores"):
        load_scores(tmp_path / "none.npz", data.train)


def test_a_subset_is_those_documents():
    data = ArrayDataset([[1], [2, 3], [4, 5, 6]], [[0], [1, 0], [1, 1, 0]])
    part = Subset(data, np.array([2, 0]))
    assert part.lengths.tolist() == [3, 1] and part.tokens(0, 1).tolist() == [5, 6]
    assert part.loss_weights(0).tolist() == [1, 1, 0]
    assert part.fingerprint != Subset(data, np.array([0, 2])).fingerprint != data.fingerprint


# -- the order of rows ----------------------------------------------------------------------------------------------


def test_apportion_is_exact():
    assert apportion(10, {"a": 1, "b": 2}) == {"a": 3, "b": 7}
    assert apportion(0, {"a": 1.0}) == {"a": 0}
    for n in range(40):
        assert sum(apportion(n, {"a": 0.3, "b": 0.3, "c": 0.4}).values()) == n


def test_the_first_stage_holds_the_best_documents_and_the_second_all(tmp_path):
    data = data_of(tmp_path)
    scores, setting = scored(tmp_path, data)
    staged = data_of(tmp_path, first_stage={**setting, "steps": 3})
    chosen = best_documents(scores, 0.2, True)
    letters = {name: ("a" if "a.jsonl" in name else "b") for name in scores}
    best = {(letters[n], i) for n, docs in chosen.items() for i in docs.tolist()}
    loader = staged.train_loader(4, total_steps=40)
    early = set()
    for _ in range(3):
        early |= documents(loader.next_batch())
    late = set()
    for _ in range(25):
        late |= documents(loader.next_batch())
    assert early and early <= best
    assert late == {("a", i) for i in range(60)} | {("b", i) for i in range(40)}
    loader.close()


@pytest.mark.parametrize("after", [2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_resume_exactly_and_do_not_depend_on_the_ranks(tmp_path, after, ranks):
    setting = scored(tmp_path, data_of(tmp_path))[1]

    def loaders(world_size):
        config = {"first_stage": {**setting, "steps": 3}}
        made = []
        for rank in range(world_size):
            data = data_of(tmp_path, **config)
            data.rank, data.world_size = rank, world_size
            made.append(data.train_loader(4, total_steps=9))
        return made

    def tokens(some):
        return torch.cat([one.next_batch().tokens for one in some])

    straight = loaders(1)
    whole = [tokens(straight) for _ in range(9)]
    first = loaders(ranks)
    got = [tokens(first) for _ in range(after)]
    state = json.loads(json.dumps(first[0].state_dict()))
    second = loaders(1)
    second[0].load_state_dict(state)
    got += [tokens(second) for _ in range(9 - after)]
    assert all(torch.equal(a, b) for a, b in zip(whole, got, strict=True))
    for one in (*straight, *first, *second):
        one.close()


def test_weights_hold_within_the_first_stage(tmp_path):
    sources = [{**numbered(tmp_path, n, n, 50), "weight": w} for n, w in (("a", 3.0), ("b", 1.0))]
    setting = scored(tmp_path, data_of(tmp_path, sources))[1]
    staged = data_of(tmp_path, sources, first_stage={**setting, "steps": 4})
    loader = staged.train_loader(8, total_steps=10)
    streams = [ref.stream.split("/")[-1] for ref in loader.mixture.take(48)]
    early, late = streams[:32], streams[32:]
    assert early.count("a.jsonl (first stage)") == 24 and early.count("b.jsonl (first stage)") == 8
    assert late.count("a.jsonl") == 12 and late.count("b.jsonl") == 4


def test_cooldown_ends_the_run_on_documents_free_of_context(tmp_path):
    meta = {"rate": 1.0, "cooldown": 0.25, "empty": "none", "max_tokens": 8}
    data = data_of(tmp_path, metadata=meta)
    loader = data.train_loader(4, total_steps=8)
    marked = [bool((loader.next_batch().tokens >= 259).any()) for _ in range(8)]
    loader.close()
    assert marked == [True] * 6 + [False] * 2
    ((_, stream),) = data._last.values()
    bare = data_of(tmp_path).streams["pool"].dataset
    assert stream.dataset.fingerprint == bare.fingerprint, "the last stage is the plain documents"


def test_all_three_stages_and_their_lengths():
    first = FirstStageConfig(scores="x", fraction=0.5, steps=2)
    assert rows_of_stages(first, 0.25, 8, 4) == (8, 16, 8)
    assert rows_of_stages(None, 0.1, 100, 2) == (0, 180, 20)
    assert rows_of_stages(FirstStageConfig(scores="x", fraction=0.5, share=0.5), None, 8, 4) == (16, 16, 0)
    assert rows_of_stages(first, 0.9, 4, 1) == (2, 0, 2)


def test_a_run_with_both_trains_and_resumes_to_the_bit(recipe, tmp_path):
    sources = [numbered(tmp_path, "a", "a", 60)]
    common = {
        "data.sources": sources, "data.validation_fraction": 0.1, "train.steps": 6, "train.seq_len": 48,
        "train.global_batch_tokens": 192, "data.metadata": {"max_tokens": 16, "cooldown": 0.34},
    }  # fmt: skip
    trainer = Trainer(RunConfig.load(recipe(**{**common, "run.name": "probe"})))
    scores = {n: np.arange(d.num_docs) for n, d in trainer.data.train.items()}
    save_scores(tmp_path / "s.npz", scores, trainer.data.train)
    common["data.first_stage"] = {"scores": str(tmp_path / "s.npz"), "fraction": 0.3, "steps": 2}
    whole = Trainer(RunConfig.load(recipe(**{**common, "run.name": "whole"})))
    whole.fit()
    data = recipe(**{**common, "run.name": "parts", "checkpoint.every": 3})

    class Enough(Exception):
        pass

    def leave(row):
        if row["step"] == 4:
            parts.checkpointer.wait()
            raise Enough

    parts = Trainer(RunConfig.load(data))
    with pytest.raises(Enough):
        parts.fit(on_step=leave)
    again = Trainer(RunConfig.load(data), resume=True)
    again.fit()
    states = (whole.parallel.state(), again.parallel.state())
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))


# -- the command, and bad input -------------------------------------------------------------------------------------


def test_score_command_makes_the_file_that_a_recipe_names(recipe, tmp_path, capsys):
    import yaml

    from trainwright.cli.data_score import score

    sources = [numbered(tmp_path, "a", "a", 40)]
    base = recipe(**{"data.sources": sources, "train.steps": 3})
    teacher = Trainer(RunConfig.load({**base, "run": {**base["run"], "name": "teacher"}}))
    teacher.fit()
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(base))
    out = tmp_path / "scores.npz"
    score([str(file)], str(teacher.config.run_dir), "latest", out, top_k=10, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["sources"][0]["documents"] == teacher.data.streams["pool"].dataset.num_docs
    base["data"]["first_stage"] = {"scores": str(out), "fraction": 0.25, "steps": 2}
    Trainer(RunConfig.load(base)).fit()
    with pytest.raises(ConfigError, match="exists; name another file"):
        score([str(file)], str(teacher.config.run_dir), "latest", out, top_k=10, json=True)
    with pytest.raises(ConfigError, match=r"--teacher.*has another vocabulary"):
        score(
            [str(file), "tokenizer={name: bpe, vocab_size: 262}"], str(teacher.config.run_dir), "latest",
            tmp_path / "two.npz", top_k=10, json=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"fraction": 0.0}, "first_stage.fraction=0.0"),
        ({"fraction": 1.5}, "first_stage.fraction=1.5"),
        ({"steps": -1}, "first_stage.steps=-1"),
        ({"steps": 1, "share": 0.5}, "steps and share both"),
    ],
)
def test_settings_out_of_range_are_refused(recipe, setting, message):
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(recipe(**{"data.first_stage": {"scores": "x", "fraction": 0.5, **setting}}))
    assert message in str(caught.value)


def test_stages_that_do_not_fit_the_run_are_refused(recipe, tmp_path):
    first = FirstStageConfig(scores="x", fraction=0.5, steps=9)
    with pytest.raises(ConfigError, match=r"data.first_stage.steps=9: is more than the run's 8 steps"):
        rows_of_stages(first, None, 8, 4)
    for config, cooldown in ((FirstStageConfig(scores="x", fraction=0.5), None), (None, 0.1)):
        with pytest.raises(ConfigError, match="known length"):
            rows_of_stages(config, cooldown, None, 4)
    with pytest.raises(ConfigError, match="first_stage and random both decide which rows come next"):
        RunConfig.load(
            recipe(**{"data.first_stage": {"scores": "x", "fraction": 0.5}, "data.selector": {"name": "random"}})
        )


def test_scoring_refuses_a_model_in_train_mode():
    model = build("model", SHAPE).build(259, 32)
    data = ArrayDataset([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"model\.eval"):
        score_documents(model, data, seq_len=32, pad_id=258)
    with pytest.raises(ValueError, match="k must be"):
        score_documents(model.eval(), data, seq_len=32, pad_id=258, k=0)
