"""Traced arithmetic as a source: deterministic documents, clean validation, loss behind the question."""

import pytest

from trainwright.core import registry
from trainwright.core.errors import ConfigError
from trainwright.data.module import DataConfig, build_data
from trainwright.data.synthetic.tint_check import check
from trainwright.data.tokenizers.bytes import ByteTokenizer


def source(**settings):
    return registry.build("source", {"name": "tint", "samples": 200, **settings})


def texts(split="train", fraction=0.1, **settings):
    return {d.id: d.text for d in source(**settings).documents(split, fraction)}


def test_documents_depend_on_settings_and_index_alone():
    a = texts(noise="dynamic", p=0.3)
    assert a == texts(noise="dynamic", p=0.3) != texts(noise="dynamic", p=0.3, seed=1)
    assert len(a) + len(texts("validation")) == 200
    more = texts(noise="dynamic", p=0.3, samples=300)
    assert all(more[k] == v for k, v in a.items())


def test_no_noise_is_byte_identical_and_the_split_stays():
    """(a)"""
    clean = texts()
    for settings in ({"noise": "static", "p": 0.0}, {"noise": "dynamic", "p": 0.0}, {"noise": "dynamic", "rho": 0.0}):
        assert texts(**settings) == clean
    noisy = texts(noise="static", p=0.3)
    assert noisy.keys() == clean.keys() and noisy != clean


def test_of_a_few_samples_a_whole_one_is_held_out():
    held, kept = texts("validation", 0.01, samples=5, noise="dynamic", p=1.0), texts("train", 0.01, samples=5)
    assert len(held) == 1 and len(kept) == 4 and not held.keys() & kept.keys()
    assert next(iter(held.values())) in texts("train", 0.0, samples=5).values()


def test_validation_is_clean():
    assert texts("validation", noise="dynamic", p=1.0) == texts("validation")
    for doc in source(noise="dynamic", p=1.0).documents("validation", 0.2):
        question, rest = doc.text.split("\n", 1)
        assert check("running_sum", [int(v) for v in question.split()[1:]], rest).verdict == "clean"


@pytest.mark.parametrize("loss", ["completion", "all"])
def test_loss_is_behind_the_question(loss, tmp_path):
    tokenizer = ByteTokenizer()
    data = source(loss=loss).tokenized(
        tokenizer, "train", seq_len=128, validation_fraction=0.1, cache_dir=tmp_path / "cache"
    )
    want = list(texts().values())
    for i, text in enumerate(want[:20]):
        assert tokenizer.decode(data.tokens(i)) == text and data.tokens(i)[-1] == tokenizer.eos_id
        question = text.index("\n") + 1 if loss == "completion" else 0
        assert data.loss_weights(i).tolist() == [0.0] * (1 + question) + [1.0] * (len(text) - question + 1)  # BOS, EOS


def test_through_the_loader_and_too_long(tmp_path):
    config = DataConfig.model_validate(
        {"sources": [{"name": "tint", "samples": 100, "count": [2, 6]}], "cache_dir": str(tmp_path / "cache")}
    )
    assert config.batcher.name == "best_fit"
    module = build_data(config, ByteTokenizer(), seq_len=64, seed=0)
    kept = next(iter(module.train.values()))
    assert 0 < kept.report["dropped"] < kept.report["rows"] and max(kept.lengths) <= 64
    batch = module.train_loader(4).next_batch()
    assert batch.shape == (4, 64) and batch.weights.sum() > 0


def test_a_recipe_line_with_the_sft_objective(recipe):
    from trainwright import RunConfig

    config = RunConfig.load(recipe(**{"data.sources": [{"name": "tint", "task": "addition"}], "objective": "sft"}))
    assert config.data.sources[0].task == "addition" and config.objective.name == "sft"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p": 1.5}, r"p=1.5: should be less than or equal to 1"),
        ({"rho": -0.1}, r"rho=-0.1: should be greater than or equal to 0"),
        ({"task": "runing_sum"}, "task='runing_sum': no such task; did you mean 'running_sum'"),
        ({"task": "addition", "count": [2, 3]}, "takes 2..2 inputs"),
        ({"low": 5, "high": 1}, "low=5 is above high=1"),
        ({"sampling": "length"}, "digits low=0"),
        ({"task": "multiplication", "low": -5}, "takes no negative inputs"),
        ({"show_operands": False, "show_result": False}, "nothing of an event would be visible"),
        ({"noise": "loud"}, "noise='loud'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        source(**settings)
