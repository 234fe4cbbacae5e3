"""Early exits under pipelines of 2 and 4 gloo ranks against one process; bubbles filled; what is refused."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import queue
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainwright.config import RunConfig
from trainwright.core.errors import ConfigError
from trainwright.models.early_exit import ExitSettings
from trainwright.parallel.config import ParallelConfig
from trainwright.parallel.pipeline import early_exit
from trainwright.parallel.pipeline.early_exit import FilledSchedule
from trainwright.parallel.pipeline.fill import (
    FillPlan,
    exits_by_stage,
    fill_counts,
    fill_plan,
    normalisation,
    unembedding_stages,
)
from trainwright.planning.comm_plan import Work, planned_transfers
from trainwright.train.degrees import check

pytestmark = pytest.mark.timeout(900)  # a start of all cells takes minutes on a busy machine
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
spec = importlib.util.spec_from_file_location("early_exit_worker", HERE / "early_exit_worker.py")
worker = importlib.util.module_from_spec(spec)
sys.modules["early_exit_worker"] = worker
try:
    spec.loader.exec_module(worker)
finally:
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """``results(cell)``: what each rank has, and what one process has; all cells are run by one start of Python."""
    out = tmp_path_factory.mktemp("exits") / "result"
    command = [sys.executable, str(HERE / "early_exit_worker.py"), str(out), ",".join(worker.CELLS)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]

    def of(name, kind="one"):
        return [torch.load(f"{out}.{name}.{r}") for r in range(worker.world_of(name))], torch.load(
            f"{out}.{name}.{kind}"
        )

    return of


def same_tensors(ranks, key, want, atol):
    names = set()
    for got in ranks:
        for name, tensor in got[key].items():
            torch.testing.assert_close(tensor, want[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
        names |= got[key].keys()
    assert names == want.keys()


# -- exact gradients ------------------------------------------------------------------------------------------------

EXACT = [n for n in worker.CELLS if n not in worker.FILLED]


@pytest.mark.parametrize("name", EXACT)
def test_gradients_and_training_equal_one_process(results, name):
    """In float64 (one cell in bfloat16): all gradients, then AdamW steps, figures, validation."""
    ranks, want = results(name)
    rough = worker.CELLS[name].dtype == torch.bfloat16
    same_tensors(ranks, "gradients", want["gradients"], 3e-3 if rough else 1e-10)
    same_tensors(ranks, "weights", want["weights"], 2e-2 if rough else 1e-9)
    rtol = 1e-2 if rough else 1e-9
    for got in ranks:
        for key in ("losses", "validation"):
            torch.testing.assert_close(got[key], want[key], rtol=rtol, atol=1e-12)
        torch.testing.assert_close(got["norms"], want["norms"], rtol=5e-2 if rough else 1e-6, atol=1e-12)
        for mine, one in zip(got["metrics"], want["metrics"], strict=True):
            assert mine.keys() == one.keys()
            for figure in (k for k in one if k == "nll" or k.endswith("_nll")):
                torch.testing.assert_close(mine[figure], one[figure], rtol=rtol, atol=1e-12)


def test_exits_change_what_is_learnt(results):
    """Else the comparison above would hold of exits that do nothing."""
    with_exits, without = results("pp2_boundary")[1]["gradients"], results("pp2_none")[1]["gradients"]
    assert (with_exits["blocks.0.mlp.up.weight"] - without["blocks.0.mlp.up.weight"]).abs().max() > 1e-4
    torch.testing.assert_close(with_exits["blocks.3.mlp.up.weight"], without["blocks.3.mlp.up.weight"])


def test_weight_0_is_plain_1f1b(results):
    plain, zero = results("pp2_none")[0], results("pp2_zero")[0]
    for mine, other in zip(plain, zero, strict=True):
        for name, tensor in mine["gradients"].items():
            assert torch.equal(tensor, other["gradients"][name]), name


def test_no_message_more(results):
    """Exits with heads of their own send what a pipeline without them sends, to the byte."""
    for plain, exits in zip(results("pp2_none")[0], results("pp2_own")[0], strict=True):
        assert exits["messages"] == plain["messages"] and plain["messages"][0] > 0


@pytest.mark.parametrize("name", ["pp2_uneven_last", "pp2_gpipe_own", "pp4_everywhere"])
def test_one_exit_has_logits_at_a_time(results, name):
    """Also with two exits in a stage and with gpipe, which has all micro-batches under way at once."""
    ranks, _ = results(name)
    assert max(got["alive"] for got in ranks) == 1


@pytest.mark.parametrize("name", [n for n in worker.CELLS if "planned" in n])
def test_planned_bytes_are_the_recorded_ones(results, name):
    """trainwright plan comm knows what exits add under tensor parallelism."""
    cell = worker.CELLS[name]
    model = worker.build(cell)
    config = ParallelConfig(**cell.parallel)
    work = Work(
        model.arch, {n: tuple(p.shape) for n, p in model.named_parameters()}, 12, worker.ROWS, cell.micro, 1.0,
        activation_bytes=8, gathered_bytes=8, parameter_bytes=8, reduced_bytes=8, exits=len(model.exits),
    )  # fmt: skip
    planned = {}
    for t in planned_transfers(work, config.resolve(2), config):
        planned[t.kind] = planned.get(t.kind, 0) + t.bytes
    for got in results(name)[0]:
        assert got["sent"] == planned


def test_an_exit_between_two_stages_belongs_to_the_later_one(results):
    assert exits_by_stage([2], [range(2), range(2, 4)]) == [0, 1]
    assert exits_by_stage([0, 1, 3, 4], [range(1), range(1, 4)]) == [1, 3]
    ranks, _ = results("pp2_boundary")
    held = [{n for n in got["weights"] if n.startswith("exits.")} for got in ranks]
    assert held == [set(), {"exits.2.norm.weight"}]


def test_who_holds_a_shared_unembedding(results):
    shared, own = ExitSettings((1,), (1.0,)), ExitSettings((1,), (1.0,), tied=False)
    assert unembedding_stages(shared, [0, 1, 0, 0], tied_embedding=True) == [0, 1, 3]
    assert unembedding_stages(shared, [0, 1, 0, 0], tied_embedding=False) == [1, 3]
    assert unembedding_stages(own, [0, 1, 0, 0], tied_embedding=True) == [0, 3]
    ranks, _ = results("pp4_everywhere")
    embeddings = [got["weights"]["embed.weight"] for got in ranks]
    assert all(torch.equal(e, embeddings[0]) for e in embeddings)
    assert ["head.weight" in got["weights"] for got in results("pp2_untied_shared")[0]] == [True, True]


def test_frozen_stages_train_their_exits_alone(results):
    ranks, _ = results("pp2_frozen")
    assert [set(got["gradients"]) for got in ranks] == [{"exits.1.norm.weight"}, {"exits.3.norm.weight"}]


# -- bubbles --------------------------------------------------------------------------------------------------------


def test_fill_counts():
    assert fill_counts(4, 2.0, 9, 9) == ([2, 1, 0, 0], [0, 0, 1, 2])
    assert fill_counts(4, 2.0, 1, 1) == ([1, 1, 0, 0], [0, 0, 1, 1])
    assert fill_counts(2, 2.0, 9, 9) == ([0, 0], [0, 0])
    for stages, beta in itertools.product(range(2, 17), (0.5, 1.0, 2.0, 3.0)):
        before, after = fill_counts(stages, beta, 99, 99)
        assert min(before) == 0 and min(after) == 0  # the last stage would have -3 of 4
        assert before == sorted(before, reverse=True) and after == sorted(after)


def test_fill_plan():
    """Partial micro-batches go as far as there is an exit; those without one, and those without room, stay whole."""
    assert fill_plan(8, 2.0, 9, 9, [1, 1, 1, 1]) == FillPlan(4, (1, 0), (2, 3))
    assert fill_plan(8, 2.0, 9, 9, [0, 1, 0, 0]) == FillPlan(5, (1,), (2, 3))
    assert fill_plan(8, 2.0, 9, 9, [1, 0, 0, 0]) == FillPlan(4, (0, 0), (2, 3))
    assert fill_plan(8, 2.0, 9, 0, [0, 0, 0, 1]) == FillPlan(8)
    plan = fill_plan(8, 2.0, 9, 9, [1, 1, 1, 1])
    assert [plan.warmup(r) for r in range(4)] == [2, 1, 0, 0]
    assert [plan.cooldown(r) for r in range(4)] == [0, 0, 1, 2]
    assert plan.stream == 6 and [plan.backward(r) for r in range(4)] == [4, 4, 5, 6]


def test_normalisation_of_a_step_without_weight():
    """Full micro-batches of weight 0 give factors of 0, not NaN."""
    found = normalisation(FillPlan(2, (0,), (1,)), 0, torch.tensor([0.0, 0.0, 3.0, 1.0], dtype=torch.float64))
    assert float(found.losses) == 0.0 and float(found.exits) == 4.0 and float(found.gradients) == 0.0


class _Line:
    """A stage that passes numbers on and computes nothing, and the messages between such stages: in order, by pairs."""

    def __init__(self, rank, stages, plan, channels):
        self.stage_index, self.stages, self.plan, self.channels = rank, stages, plan, channels
        self.is_first, self.is_last = rank == 0, rank == stages - 1
        self.log, self.fwd_cache, self.submod = [], {}, SimpleNamespace(taken={})

    def _op(self, kind, peer, what):
        return [] if not 0 <= peer < self.stages else [(kind, self.stage_index, peer, what)]

    def get_fwd_recv_ops(self, i):
        return self._op("recv", self.stage_index - 1, ("F", i))

    def get_fwd_send_ops(self, i):
        assert i in self.fwd_cache
        return self._op("send", self.stage_index + 1, ("F", i))

    def get_bwd_recv_ops(self, i):
        return self._op("recv", self.stage_index + 1, ("B", i))

    def get_bwd_send_ops(self, i):
        return self._op("send", self.stage_index - 1, ("B", i))

    def forward_one_chunk(self, i, *args, **named):
        self.fwd_cache[i] = True
        self.log.append(("F", i))

    def backward_one_chunk(self, i, loss=None, last_backward=False):
        del self.fwd_cache[i]  # KeyError: not gone forward, or backward twice
        self.log.append(("B", i))

    backward_from_exits = backward_one_chunk

    def perform_reduce_grad(self, scale):
        assert not self.fwd_cache  # what goes no further is let go


def run_line(plan, stages, total):
    """The real schedule on every stage, a thread each; the operations of each, in order."""
    channels = {(a, b): queue.Queue() for a in range(stages) for b in range(stages)}

    def batch(ops):
        for kind, here, peer, what in ops:
            if kind == "send":
                channels[here, peer].put(what)

        def wait(here, peer, what):
            assert channels[peer, here].get(timeout=20) == what  # queue.Empty: a deadlock

        return [
            SimpleNamespace(wait=functools.partial(wait, here, peer, what) if kind == "recv" else lambda: None)
            for kind, here, peer, what in ops
        ]

    class Schedule(FilledSchedule):
        def __init__(self, stage):
            self._stage, self.plan, self._num_stages, self._n_microbatches = stage, plan, stages, total
            self._internal_losses, self._loss_fn = [], None

        def _initialize_stage(self, *args):
            pass

    lines = [_Line(r, stages, plan, channels) for r in range(stages)]
    with ThreadPoolExecutor(stages) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_exit.dist, "batch_isend_irecv", batch)
        for done in [pool.submit(Schedule(line)._step_microbatches) for line in lines]:
            done.result()
    assert all(channel.empty() for channel in channels.values())
    return [line.log for line in lines]


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
def test_every_filling_comes_to_an_end(stages):
    """Random numbers of micro-batches, fillings and exits: messages pair up, and each stage does what the plan says."""
    draw = random.Random(stages)
    filled = 0
    for _ in range(25):
        exits = [draw.randint(0, 1) for _ in range(stages)]
        total = draw.randint(stages + 1, 4 * stages)
        plan = fill_plan(total, draw.choice([1.0, 2.0, 3.0]), draw.randint(0, 5), draw.randint(0, 5), exits)
        if plan.full < 1 or plan.stream < stages:
            continue
        filled += plan.full < total
        for r, log in enumerate(run_line(plan, stages, total)):
            partial = {plan.stream + i for i, d in enumerate(plan.deepest) if d >= r}
            stream = set(range(plan.stream))
            back = set(range(plan.full + sum(s <= r for s in plan.shallowest)))
            assert sorted(i for k, i in log if k == "F") == sorted(stream | partial)
            assert sorted(i for k, i in log if k == "B") == sorted(back | partial)
    assert filled > 3 or stages == 2


def test_without_filling_the_schedule_is_1f1b():
    """Stage r of 4: 4 - r forward passes, then backward and forward in turns, then the rest backward."""
    for r, log in enumerate(run_line(FillPlan(6), 4, 6)):
        ahead = 4 - r
        want = [("F", i) for i in range(ahead)]
        for i in range(6):
            want += [("B", i)] + ([("F", ahead + i)] if ahead + i < 6 else [])
        assert log == want


def test_bubbles_hold_the_partial_micro_batches():
    """By the benchmark's clock, with what the schedule does: the step takes no time more."""
    sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))
    try:
        import early_exit as benchmark
    finally:
        sys.path.pop(0)
    for stages in (4, 8):
        found = benchmark._bubbles(stages)
        assert found["alone"] == 3 * (2 * stages + stages - 1) == found["filled"] and found["partial"] >= 4
    plan = fill_plan(12, 2.0, 9, 9, [1] * 4)
    for r, log in enumerate(run_line(plan, 4, 12)):
        assert [op for op, _ in benchmark._operations(plan, r, 4)] == log


@pytest.mark.parametrize("name", worker.FILLED)
def test_partial_micro_batches_count_by_stage(results, name):
    """Against the gradient of each loss of each micro-batch alone, weighed as the method says."""
    ranks, want = results(name, "filled")
    same_tensors(ranks, "gradients", want["gradients"], 1e-10)
    exact = results(name)[1]["gradients"]
    assert max((want["gradients"][n] - exact[n]).abs().max() for n in exact) > 1e-3  # another sample


def test_micro_batches_that_are_alike_give_the_exact_gradient(results):
    """Covered above cell by cell (pp4_fill_alike); here that the cell does fill."""
    cell = worker.CELLS["pp4_fill_alike"]
    assert cell.alike and fill_plan(worker.ROWS, 2.0, 2, 2, [1] * 4).full == 4
    plain, filled = results("pp4_everywhere")[0], results("pp4_fill_alike")[0]
    assert [g["messages"][0] for g in filled] != [g["messages"][0] for g in plain]


def test_runs_change_hands(recipe, tmp_path):
    """A pipeline whose middle stage has exit and embedding too, gone on with by one process; one that is filled; and
    two ranks that share every layer."""
    data = recipe(
        **{
            "model.n_layers": 3,
            "model.n_kv_heads": 2,
            "model.tie_embeddings": True,
            "transforms": [{"name": "early_exit", "after": [1], "weights": [0.5], "warmup_steps": 2}],
            "train.steps": 4,
            "train.micro_batch_size": 1,
            "checkpoint.every": 2,
            "evaluate.every": 2,
            "log.every": 1,
        }
    )
    out = tmp_path / "result"
    Path(f"{out}.recipe").write_text(json.dumps(data))
    command = [sys.executable, str(HERE / "early_exit_worker.py"), str(out), "runs"]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    one, first, second, filled, cut = (torch.load(f"{out}.run{i}") for i in range(len(worker.RUNS)))
    assert [r["step"] for r in first] == [1, 2, 3] and [r["step"] for r in second] == [3, 4]
    for row in [*first, *second, *cut]:
        want = one[row["step"] - 1]
        for key in ("loss", "nll", "exit_1_nll", "grad_norm"):
            assert row[key] == pytest.approx(want[key], rel=2e-5), (row["step"], key)
    # Partial micro-batches make another sample of the same: near, and not equal.
    assert filled[0]["nll"] == pytest.approx(one[0]["nll"], rel=0.05)
    assert filled[0]["grad_norm"] != pytest.approx(one[0]["grad_norm"], rel=1e-4)
    assert filled[-1]["nll"] < filled[0]["nll"]


# -- what is refused ------------------------------------------------------------------------------------------------

EXPERTS_OF_ODD_WIDTH = {
    "name": "decoder", "family": "mixtral", "dim": 64, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "n_experts": 4,
    "moe_ffn_dim": 32, "ffn_dim": 33,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, world, says",
    [
        ({"transforms.0.after": [5]}, 2, "after=.*names layer 5, and the model has layers 1 to 4"),
        ({"transforms.0.weights": [1.0, 1.0]}, 2, "weights=.*are 2 numbers for 1 exits"),
        ({"pipeline": {"schedule": "interleaved", "stages_per_rank": 2}}, 2, "interleaved': does not go with"),
        ({"pipeline": {"schedule": "zero_bubble", "stages_per_rank": 2}}, 2, "zero_bubble': does not go with"),
        ({"pipeline": {"schedule": "gpipe", "fill_warmup": 1}}, 2, "schedule='gpipe': has no bubbles to fill"),
        ({"train.micro_batch_size": 4}, 2, "makes 2 micro-batches a step, and 1f1b with early exits needs more"),
        ({"pp": 4, "pipeline": {"fill_warmup": 2, "fill_cooldown": 2}, "train.global_batch_tokens": 160,
          "train.micro_batch_size": 1, "transforms.0.after": [1, 2, 3, 4], "transforms.0.before": True},
         4, "makes 5 micro-batches a step, of which 4 fill bubbles"),
        ({"transforms": [], "pipeline": {"fill_cooldown": 2}}, 2, "there are none; add transforms"),
        ({"transforms.0.freeze": True}, 2, "stage 0 of 2 has no exit, and freeze leaves it without"),
        ({"pp": 1, "tp": 2, "tensor": "domino", "model.n_kv_heads": 2}, 2, "'domino': has sums under way"),
        ({"pp": 1, "tp": 2, "transforms.0.mlp": True, "model": EXPERTS_OF_ODD_WIDTH}, 2,
         "early_exit.mlp=True: gives each exit a feed-forward of width 33, which parallel.tp=2 does not divide"),
        ({"pp": 1, "model": {"name": "hf", "path": "x"}}, 2, "early_exit is for our own decoder"),
    ],
)  # fmt: skip
def test_recipes_that_are_refused_before_any_group(recipe, changes, world, says):
    data = recipe(
        **{
            "model.n_layers": 4,
            "transforms": [{"name": "early_exit", "after": [2]}],
            "train.micro_batch_size": 2,
            "parallel": {"pp": 2},
        }
    )
    for key, value in changes.items():
        if key in ("pp", "tp", "tensor", "pipeline"):
            data["parallel"][key] = value
        elif key.startswith("transforms.0."):
            data["transforms"][0][key.rpartition(".")[2]] = value
        else:
            section, _, name = key.partition(".")
            if name:
                data[section][name] = value
            else:
                data[section] = value
    with pytest.raises(ConfigError, match=says):
        check(RunConfig.load(data), world)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "exits, parallel, world",
    [
        ({"mlp": True}, {"tp": 2}, 2),
        ({"tied": False}, {"tp": 2, "pp": 2}, 4),
        ({"freeze": True, "before": True, "after": [1, 3]}, {"tp": 2, "pp": 2, "sequence_parallel": False}, 4),
    ],
)
def test_recipes_with_tensor_parallelism_are_taken(recipe, exits, parallel, world):
    transforms = [{"name": "early_exit", "after": [2], **exits}]
    shape = {"model.n_layers": 4, "model.n_kv_heads": 2, "train.micro_batch_size": 2}
    data = recipe(**{**shape, "transforms": transforms, "parallel": parallel})
    assert check(RunConfig.load(data), world).tp == 2


def test_frozen_stage_with_an_exit_each_is_taken(recipe):
    """Of "optimizer got an empty parameter list": a stage without an exit is refused above; here all have one."""
    data = recipe(
        **{
            "model.n_layers": 4,
            "transforms": [{"name": "early_exit", "after": [1, 2], "freeze": True}],
            "train.micro_batch_size": 2,
            "parallel": {"pp": 2},
        }
    )
    assert check(RunConfig.load(data), 2).pp == 2


def test_objective_that_passes_by_the_exits_is_refused(recipe):
    data = recipe(
        **{"transforms": [{"name": "early_exit", "after": [1]}], "objective": {"name": "salt", "teacher": "x"}}
    )
    with pytest.raises(ConfigError, match="early exits, which would stay untrained"):
        RunConfig.load(data)


def test_one_process_trains_logs_and_generates(recipe, tmp_path):
    """A recipe line: each exit's loss in the log, the weights warmed up, a checkpoint that knows its exits."""
    from trainwright import Trainer
    from trainwright.models.exit_decoding import ExitDecoding
    from trainwright.models.generate import generate
    from trainwright.train.runs import load_run

    data = recipe(
        **{
            "transforms": [{"name": "early_exit", "after": [1], "weights": [0.5], "warmup_steps": 3}],
            "train.steps": 6,
            "checkpoint.every": 3,
            "log.every": 1,
        }
    )
    config = RunConfig.load(data)
    summary = Trainer(config).fit()
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "exit_1_nll" in r]
    assert len(rows) == 6
    for row, weight in zip(rows, (0.0, 1 / 6, 1 / 3, 0.5, 0.5, 0.5), strict=True):
        assert row["loss"] == pytest.approx(row["nll"] + weight * row["exit_1_nll"], rel=1e-5)
    assert summary["val_loss"] == pytest.approx(rows[-1]["nll"], abs=0.5)  # of the last layer alone
    model, tokenizer, _ = load_run(config.run_dir)
    texts = [
        generate(model, tokenizer, ["alpha"], max_new_tokens=12, temperature=0, early_exit=early)
        for early in (None, ExitDecoding(2.0), ExitDecoding(2.0, "pipelined"))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_command_line_leaves_at_exits(recipe, capsys):
    from trainwright import Trainer
    from trainwright.cli import generate as command

    config = RunConfig.load(recipe(**{"transforms": [{"name": "early_exit", "after": [1]}], "train.steps": 1}))
    Trainer(config).fit()
    settings = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0, "stop": []}
    outs = []
    for threshold, method in ((None, "recompute"), (1.5, "recompute"), (1.5, "pipelined"), (0.001, "pipelined")):
        more = {} if threshold is None else {"exit_threshold": threshold, "exit_method": method}
        command.run(config.run_dir, "latest", "cpu", settings, prompt="alpha", chat=False, system=None, **more)
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] == outs[2] and outs[3].startswith("alpha")
    with pytest.raises(ConfigError, match="exit_method='x'"):
        command.run(
            config.run_dir, "latest", "cpu", settings, prompt="a", chat=False, system=None,
            exit_threshold=0.5, exit_method="x",
        )  # fmt: skip


def test_a_namespace_without_transforms_is_taken():
    """check_early_exits reads recipes of third parties' tests too."""
    from trainwright.parallel.config import Degrees, PipelineSection
    from trainwright.parallel.pipeline.legal import check_early_exits

    config = SimpleNamespace(parallel=SimpleNamespace(pipeline=PipelineSection()))
    check_early_exits(Degrees(pp=2), config, None, 8, 2)
