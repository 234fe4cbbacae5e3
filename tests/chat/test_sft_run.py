"""A fine-tuning run through the whole loop: it learns the answers, and to stop behind them."""

import json

import pytest

from trainwright import RunConfig, Trainer
from trainwright.data.chat import ChatTemplate

WORDS = ["red", "blue", "green", "gold", "grey"]
ROWS = [
    {
        "conversations": [
            {"from": "human", "value": f"say {w} {n}"},
            {"from": "gpt", "value": f"{w} {n}"},
        ]
    }
    for w in WORDS
    for n in "1234"
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("t", Path(__file__).with_name("chat_templates.py"))
    templates = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(templates)
    folder = tmp_path_factory.mktemp("sft")
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    recipe = {
        "run": {"name": "sft", "dir": str(folder), "seed": 3, "device": "cpu"},
        "model": {"name": "decoder", "dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 128},
        "tokenizer": {"name": "bytes", "chat_template": templates.LETTERS},
        "data": {
            "sources": [{"name": "chat", "path": str(path), "format": "auto"}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.1,
        },
        "objective": "sft",
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "precision": {"name": "fp32"},
        "train": {"steps": 150, "seq_len": 64, "global_batch_tokens": 512},
        "checkpoint": {"asynchronous": False},
        "log": {"loggers": [], "progress": "none", "report": False},
    }
    rows = []
    trainer = Trainer(RunConfig.load(recipe))
    trainer.fit(on_step=rows.append)
    return trainer, rows


def test_the_loss_falls(run):
    _, rows = run
    assert rows[0]["loss"] > 4 and rows[-1]["loss"] < 0.1


def test_the_answer_and_its_end_are_learned(run):
    """Greedy answers are right and end by themselves: the EOS behind answers is a target."""
    from trainwright.models.generate import generate_ids

    trainer, _ = run
    tokenizer = trainer.tokenizer
    template = ChatTemplate(tokenizer)
    prompts, want = [], []
    for row in ROWS:
        messages = [{"role": "user", "content": row["conversations"][0]["value"]}]
        prompts.append(template.encode(template.render(messages, add_generation_prompt=True))[0])
        want.append(row["conversations"][1]["value"])
    got = generate_ids(trainer.parallel.model, prompts, max_new_tokens=32, temperature=0.0, eos_id=tokenizer.eos_id)
    answers = [tokenizer.decode(ids) for ids in got]
    assert all(len(ids) < 32 for ids in got), "some answer did not end"
    assert sum(a == w for a, w in zip(answers, want, strict=True)) >= 18


def test_the_questions_are_not_learned(run):
    """The loss on a question's tokens stays far above that on the answers'."""
    import torch

    trainer, _ = run
    data = next(iter(trainer.data.train.values()))
    ids = torch.from_numpy(data.tokens(0).astype("int64"))
    weights = torch.from_numpy(data.loss_weights(0))[1:]
    with torch.no_grad():
        logits = trainer.parallel.model(ids[None])[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    assert losses[weights > 0].mean() < 0.2 and losses[weights == 0].mean() > 2


def test_the_run_keeps_its_template(run):
    from trainwright.train.runs import load_run

    trainer, _ = run
    _, tokenizer, config = load_run(trainer.config.run_dir, device="cpu")
    assert tokenizer.chat_template == trainer.tokenizer.chat_template and config.objective.name == "sft"
