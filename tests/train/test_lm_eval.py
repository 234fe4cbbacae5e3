"""A user's own harness task file on our model."""

import json
import math

import pytest
import torch

from trainwright import RunConfig, Trainer, cli
from trainwright.core.errors import ConfigError
from trainwright.train.lm_eval_adapter import evaluate_tasks, make_harness_model
from trainwright.train.runs import open_model

pytest.importorskip("lm_eval")

TASK = """\
task: names
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def run_dir(recipe):
    data = recipe(**{"train.steps": 60})
    Trainer(RunConfig.load(data)).fit()
    return RunConfig.load(data).run_dir


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = folder / "rows.jsonl"
    items = [{"question": "alpha = ", "choices": ["beta", "#!?~"], "answer": 0} for _ in range(4)]
    rows.write_text("\n".join(json.dumps(i) for i in items))
    (folder / "names.yaml").write_text(TASK.format(rows=rows))
    return folder


def test_local_task_runs_through_the_command(run_dir, tasks, capsys):
    assert cli.run(["eval", str(run_dir), "--tasks", "names", "--include-path", str(tasks), "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{") :])
    assert found["names"]["acc,none"] == 1.0


def test_unknown_task(run_dir, tasks):
    model, tokenizer = open_model(run_dir)
    with pytest.raises(ConfigError, match="unknown task 'nmes'"):
        evaluate_tasks(model, tokenizer, ["nmes"], include_path=tasks)


def test_scores_equal_the_models_own(run_dir):
    """Batched and padded scores against the sum of log-probabilities of one row at a time."""
    model, tokenizer = open_model(run_dir)
    harness = make_harness_model(model, tokenizer, batch_size=3)
    pairs = [("alpha = ", "beta + 3"), ("x", "gamma"), ("delta = alpha + 1\nbeta = ", "delta")]
    requests = [(("", ""), tokenizer.encode(a), tokenizer.encode(b)) for a, b in pairs]
    for (context, continuation), (score, _) in zip(pairs, harness._loglikelihood_tokens(requests), strict=True):
        ids = tokenizer.encode(context) + tokenizer.encode(continuation)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).log_softmax(-1)[0]
        n = len(tokenizer.encode(continuation))
        expected = sum(logprobs[i - 1, ids[i]].item() for i in range(len(ids) - n, len(ids)))
        assert score == pytest.approx(expected, rel=1e-5)


def test_rolling_score_counts_every_token_once(run_dir):
    from lm_eval.api.instance import Instance

    model, tokenizer = open_model(run_dir)
    text = "alpha = beta + 1\n"
    harness = make_harness_model(model, tokenizer)
    (total,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    ids = [harness.prefix_token_id, *tokenizer.encode(text)]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).log_softmax(-1)[0]
    assert total == pytest.approx(sum(logprobs[i, ids[i + 1]].item() for i in range(len(ids) - 1)), rel=1e-5)
    assert math.isfinite(total)
