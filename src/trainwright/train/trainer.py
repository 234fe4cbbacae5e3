"""The training loop. There is one for every stage: stages differ by data and objective."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainwright.config.inputs import check_inputs
from trainwright.config.run_config import RunConfig
from trainwright.core.allocator import keep_freed_memory
from trainwright.core.distributed import all_reduce_sum, chosen_device, is_main, launched_world_size
from trainwright.core.divided import divided
from trainwright.core.errors import ConfigError, Interrupted, StoppedByMonitor
from trainwright.core.params import named_params
from trainwright.core.seeds import derive, seed_everything
from trainwright.memory.fused_backward import FusedBackward, FusedBackwardConfig, fused_backward
from trainwright.models.early_exit import check_objective
from trainwright.optim.base import reported, swapped_for_evaluation
from trainwright.optim.state import optimizer_state_bytes
from trainwright.parallel.launch import lost_another
from trainwright.resilience.base import StepInfo
from trainwright.resilience.policy import Decision, Policy
from trainwright.train import run_dir as run_folder
from trainwright.train import saving
from trainwright.train.banner import parameter_counts
from trainwright.train.degrees import check, check_agreed, local_rows, settled
from trainwright.train.evaluate import evaluate
from trainwright.train.finish import ended, finished_summary, is_finished, reached, steps_are_done
from trainwright.train.interaction import build_interaction
from trainwright.train.outlet import Outlet
from trainwright.train.pipeline_executor import executor_kind
from trainwright.train.plan_ahead import looking_ahead
from trainwright.train.preparation import prepare_data
from trainwright.train.run_context import prepare_objective
from trainwright.train.saving import Progress
from trainwright.train.signals import StopSignals

if TYPE_CHECKING:
    from trainwright.data.loader import Loader
    from trainwright.parallel.comm.trace import CommTrace

log = logging.getLogger("trainwright")


class Trainer:
    """Trains what a RunConfig says.

    ``Trainer(config).fit()`` starts a run, ``Trainer(config, resume=True).fit()`` goes on with the one in
    ``config.run_dir``. Raises InputError for anything the user must mend, before training starts.
    """

    def __init__(self, config: RunConfig, resume: bool = False):
        from trainwright.parallel.apply import parallelize
        from trainwright.parallel.mesh import build_mesh, init_distributed

        started = time.perf_counter()
        check_inputs(config)
        config = settled(config)
        self.config, self.resume = config, resume
        degrees = check(config, launched_world_size())
        self.device = chosen_device(config.run.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        init_distributed(self.device, config.parallel.timeout)
        check_agreed(config, degrees)
        self.resume = resume = run_folder.goes_on(config, resume)
        self.mesh = build_mesh(degrees, self.device, config.parallel.timeout)
        self.rows = config.train.global_batch_rows
        run_folder.check(config, resume)
        if config.run.deterministic and self.device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)

        with _naming("precision"):
            self.precision = config.precision.build(self.device)
        self._build_data()
        seed_everything(derive(config.run.seed, "weights"))
        with torch.device("cpu"), _naming("model"):
            model = config.model.build(self.tokenizer.vocab_size, config.train.seq_len)
        for transform in config.transforms:
            model = transform.apply(model)  # type: ignore[attr-defined]
        self.flops_per_token = model.flops_per_token(config.train.seq_len)
        self.parameter_counts = parameter_counts(model)
        self.model = model
        for method in config.memory:
            method.apply(model)
        if config.train.compile:
            for block in model.blocks:
                block.compile()
        self.parallel = parallelize(model, self.mesh, config.parallel, self.precision, self.device)
        self.params = named_params(self.parallel.model)
        if not self.params:
            raise ConfigError("the model has no trainable parameter; unfreeze some", key="model")

        self.objective = config.objective.build()
        check_objective(model, self.objective)
        fused = fused_backward(config.memory)
        with _naming("optimizer"):
            chosen = config.optimizer.for_run(None if self.by_clock else self._total_steps())
            self.optimizer = (chosen.build_rule if fused else chosen.build)(self.params)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.total_steps = self._total_steps()
        self.schedule = config.schedule.build(self.total_steps)
        self.clip = config.clip.build()
        self.average = config.average.build(self.params) if config.average else None
        micro = self._micro_batch_size()
        budget = micro * config.train.seq_len if config.data.batcher.regroups else None
        self.fused_backward = self._fused_backward(fused) if fused else None
        kind = executor_kind(self.parallel)
        self.executor = kind(micro, self.precision, budget, self.device, self.fused_backward)
        self.interaction = build_interaction(self)
        self.loader: Loader = looking_ahead(self)
        self.monitors = [(m.name, m.build()) for m in config.monitors]
        self.policy = self._build_policy()
        self.progress = Progress()
        self._tensors = [n.param for n in self.params]
        self._signals = StopSignals()
        self._trace: CommTrace | None = None
        with _naming("objective"):
            prepare_objective(self)
        self._open_run()
        # Draws of the training itself (dropout, ...) differ between ranks with other tokens or layers.
        apart = self.mesh.draws_apart(config.parallel.sequence_parallel)
        seed_everything(derive(config.run.seed, "training", *apart))
        if resume:
            self._restore_latest()
        self.setup_seconds = time.perf_counter() - started

    # -- building -----------------------------------------------------------------------------------------------

    def _build_data(self) -> None:
        self.data_card, self.tokenizer, self.data, self.data_from_cache = prepare_data(self)
        epochs = self.config.train.epochs
        # With epochs the last step takes what is left, filled up with padding, and not rows of the next epoch.
        self._max_rows = None if epochs is None else max(1, math.ceil(epochs * self.data.rows_per_epoch))
        steps = None if self.by_clock else self._total_steps()
        self.loader = self.data.train_loader(self.rows, self._max_rows, steps)

    def _micro_batch_size(self) -> int:
        return local_rows(self.config, self.mesh.dp_size, self.mesh.degrees.pp)[1]

    def _fused_backward(self, method: FusedBackwardConfig) -> FusedBackward:
        if self.precision.scaler is not None:
            raise ConfigError("fused_backward cannot undo the scale of float16 gradients; use bf16", key="memory")
        return method.build(self.optimizer)

    def _total_steps(self) -> int:
        train = self.config.train
        if train.steps is not None:
            return train.steps
        if train.tokens is not None:
            return math.ceil(train.tokens / train.global_batch_tokens)
        if self._max_rows is not None:
            return math.ceil(self._max_rows / self.rows)
        return 10_000  # a run by the clock: the schedule's scale, see _position

    def _build_policy(self) -> Policy:
        r = self.config.recovery
        return Policy(max_rollbacks=r.max_rollbacks, lr_factor=r.lr_factor, skip_steps=r.skip_steps)

    def _open_run(self) -> None:
        from trainwright.train.checkpoint import Checkpointer

        config = self.config
        if not (self.resume and steps_are_done(self)):  # else its recipe stays that by which it was trained
            run_folder.create(config, self.resume)
            self.finished = False
        else:
            self.finished = is_finished(self)
        self.checkpointer = Checkpointer(
            config.checkpoint_dir,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            best_metric="val_loss" if config.checkpoint.keep_best else None,
        )
        self.outlet = Outlet(self)

    def save(self, metric: float | None = None) -> None:
        """Checkpoint now. Asynchronous saves return once the state is copied."""
        saving.save(self, metric)

    def restore(self, path: Path, *, loader: bool = True) -> None:
        """Load everything of ``path``; ``loader=False`` leaves the data position where it is (after a rollback)."""
        saving.restore(self, path, loader=loader)

    def _restore_latest(self) -> None:
        path = self.checkpointer.latest()
        if path is None:
            log.warning("no checkpoint in %s; starting the run from its first step", self.config.checkpoint_dir)
        else:
            self.restore(path)
        self.outlet.truncate(self.progress.step)

    # -- the loop -----------------------------------------------------------------------------------------------

    def fit(self, on_step: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Train to the end. Returns the last figures (step, tokens, loss, val_loss, ...).

        Raises Interrupted after SIGINT/SIGTERM (the finished step is saved) and StoppedByMonitor.
        """
        if self.finished:
            self.close()
            return finished_summary(self)
        self.outlet.start(self)
        try:
            with self._signals:
                summary = self._train(on_step)
        finally:
            self.close()
        summary["run_dir"] = str(self.config.run_dir)
        if self.config.log.sample is not None:
            self._sample(self.config.log.sample)
        if is_main() and self.config.log.report:
            from trainwright.train.report import write_report

            summary["report"] = str(write_report(self.config.run_dir))
        return summary

    def _train(self, on_step: Callable[[dict[str, Any]], None] | None) -> dict[str, Any]:
        config = self.config
        summary: dict[str, Any] = {}
        validated_at = saved_at = -1
        last_save = time.monotonic()
        if config.evaluate.at_start and self.progress.step == 0:
            summary |= self._validate()
        while not self._finished():
            try:
                with self._comm_trace() as trace:
                    row, verdict = self._step(trace)
            except StopIteration:  # a rollback has passed over data, so that the epochs end before the steps
                break
            summary |= row
            if on_step is not None:
                on_step(row)
            if verdict.action == "stop":
                raise StoppedByMonitor(f"stopped at step {row['step']} by {verdict.monitor}: {verdict.reason}")
            if verdict.action == "rollback":
                self._rollback(verdict)
                continue
            step = self.progress.step
            if _due(config.evaluate.every, step):
                summary |= self._validate()
                validated_at = step
            overdue = config.checkpoint.minutes and time.monotonic() - last_save > 60 * config.checkpoint.minutes
            if _due(config.checkpoint.every, step) or self._agree(bool(overdue), config.checkpoint.minutes):
                self.save(summary.get("val_loss") if validated_at == step else None)
                saved_at, last_save = step, time.monotonic()
            if row["interrupted"]:
                if saved_at != step:
                    self.save()
                self.checkpointer.wait()
                raise Interrupted(
                    f"interrupted; saved step {step}. Go on with `trainwright train --resume {config.run_dir}`"
                )
        step = self.progress.step
        if validated_at != step:
            summary |= self._validate()
        if saved_at != step:
            self.save(summary.get("val_loss"))
        self.checkpointer.wait()
        return summary | ended(self)

    def _finished(self) -> bool:
        return bool(reached(self, self.progress))

    @property
    def by_clock(self) -> bool:
        train = self.config.train
        return train.steps is None and train.tokens is None and train.epochs is None

    def _position(self) -> int:
        """The schedule's step: the count of steps, or further on when the clock is the tighter limit."""
        seconds = self.config.train.seconds
        if seconds is None:
            return self.progress.step
        by_clock = int(self.total_steps * min(self.progress.seconds / seconds, 1.0))
        return min(max(self.progress.step, by_clock), self.total_steps - 1)

    def rate(self) -> float:
        """The recipe's learning rate in the step at hand."""
        return float(self.optimizer.param_groups[0]["initial_lr"] * self.schedule(self._position()))

    @contextmanager
    def _comm_trace(self) -> Iterator[CommTrace | None]:
        """Records this step's collectives where the recipe asks for it; written when the last one is in."""
        steps, step = self.config.log.comm_trace, self.progress.step
        if steps is None or self.mesh.world_size == 1 or not 1 <= step <= steps:
            yield None
            return
        from trainwright.parallel.comm.trace import CommTrace

        self._trace = self._trace or CommTrace()
        with self._trace:
            yield self._trace
        if step == steps:
            self._export_trace()

    def _export_trace(self) -> None:
        if self._trace is not None:
            self.config.run_dir.joinpath("comm").mkdir(exist_ok=True)
            self._trace.export(self.config.run_dir / "comm" / f"rank-{self._trace.rank}.json")
            self._trace = None

    def _step(self, trace: CommTrace | None = None) -> tuple[dict[str, Any], Decision]:
        before = trace.summary() if trace is not None else None
        t0 = time.perf_counter()
        for part in (self.objective, getattr(self.parallel.model, "exits", None)):
            at_step = getattr(part, "at_step", None)
            if at_step is not None:
                at_step(self._position())
        if self.interaction is not None:
            self.interaction.before_step(self.progress.step)
        batch = self.loader.next_batch()
        if self.executor.budget is None and self.parallel.context is None:  # these two plan on the host
            batch = batch.to(self.device)
        if self.interaction is not None:
            batch = self.interaction.prepare(self.progress.step, batch)
        t1 = time.perf_counter()
        if self.fused_backward is not None:
            self._set_lr()  # the steps are taken within
        result = self.executor.run(self.parallel, self.objective, batch)
        self.precision.unscale(self.optimizer)
        with divided(self.parallel.division):
            grad_norm = self.clip(self._tensors) if self.fused_backward is None else self.fused_backward.grad_norm()
        t2 = time.perf_counter()

        # One read of the device a step: the verdict has to come before the update.
        names = list(result.metrics)
        seconds_so_far = time.perf_counter() - t0 if is_main() else 0.0
        flag = 1.0 if self._signals.seen is not None else 0.0
        positions_here = result.positions / self.parallel.copies
        host = torch.tensor([positions_here, seconds_so_far, flag], dtype=torch.float64).to(self.device)
        sums = torch.stack([result.loss_sum, *result.metrics.values()]) / self.parallel.copies
        sums = all_reduce_sum(torch.cat([sums, host]))
        *values, positions, step_seconds, stop_flags, weight, norm = torch.cat(
            [sums, result.weight.reshape(1), grad_norm.double().reshape(1)]
        ).tolist()
        per_token = [v / weight if weight else 0.0 for v in values]
        loss = per_token[0]

        watched = getattr(self.objective, "watched", None)
        judged = per_token[1 + names.index(watched)] if watched in names else loss
        info = StepInfo(step=self.progress.step + 1, loss=judged, grad_norm=norm)
        if self.precision.scaler is not None and math.isfinite(loss) and not math.isfinite(norm):
            verdict = Decision()  # an overflow: the scaler itself skips the update and lowers its scale
        else:
            verdict = self.policy.decide(info.step, [(name, m.inspect(info)) for name, m in self.monitors])
            if verdict.action == "skip" and self.fused_backward is not None:
                verdict = replace(
                    verdict, action="stop", reason=f"{verdict.reason}; fused_backward has stepped already"
                )
        t3 = time.perf_counter()
        lr = self._set_lr()
        if verdict.action != "ok":
            self.precision.skip(self.optimizer)
        elif self.precision.step(self.optimizer):
            update = getattr(self.parallel.model, "update_balancing", None)
            if update is not None:
                update()
            if self.average is not None:
                self.average.update(self.progress.step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        t4 = time.perf_counter()

        p = self.progress
        p.step += 1
        p.tokens += self.config.train.global_batch_tokens
        p.seconds += step_seconds + (t4 - t3 if self.mesh.world_size == 1 else 0.0)
        elapsed = time.perf_counter() - t0
        # Of regrouped rows the trained tokens: most positions of the batch are never computed.
        tokens_per_s = (self.config.train.global_batch_tokens if self.executor.budget is None else weight) / elapsed
        row: dict[str, Any] = {
            "step": p.step,
            "tokens": p.tokens,
            "epoch": self.loader.epoch,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_s": tokens_per_s,
            "trained_share": weight / positions if positions else 0.0,  # of the positions that were computed
            "seconds": p.seconds,
            "time_data": t1 - t0,
            "time_forward_backward": t2 - t1,
            "time_optimizer": t4 - t3,
        }
        row |= dict(zip(names, per_token[1:], strict=True))
        if self.interaction is not None:
            row = self.interaction.after_step(p.step, row)
        if self.parallel.context is not None:
            row |= self.parallel.context.figures()
        if self.precision.scaler is not None:
            row["overflows"] = self.precision.overflows
        if trace is not None and before is not None:
            now = trace.summary()
            row |= {"comm_bytes": now.bytes - before.bytes, "comm_wait": now.waited - before.waited}
        row["interrupted"] = stop_flags > 0
        self._emit(row, verdict)
        return row, verdict

    def _set_lr(self) -> float:
        factor = self.schedule(self._position()) * self.policy.lr_multiplier
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return float(self.optimizer.param_groups[0]["lr"])

    def _rollback(self, verdict: Decision) -> None:
        """Back to the newest whole checkpoint, with data going on behind the failed step and ``skip_steps`` more."""
        self.checkpointer.wait()
        failed = self.progress.step
        path = self.checkpointer.latest(before=verdict.since) or self.checkpointer.latest()
        if path is None:
            raise StoppedByMonitor(
                f"{verdict.monitor} asked for a rollback at step {failed} ({verdict.reason}), but there is no "
                "checkpoint yet; set checkpoint.every"
            )
        self.restore(path, loader=False)
        for _ in range(verdict.skip_steps):
            with suppress(StopIteration):
                self.loader.next_batch()
        self.save()  # a crash from here on must not resume behind the rollback
        self.outlet.event(
            {
                "event": "rollback",
                "step": self.progress.step,
                "from_step": failed,
                "monitor": verdict.monitor,
                "reason": verdict.reason,
                "skipped_steps": failed - self.progress.step + verdict.skip_steps,
                "lr_multiplier": self.policy.lr_multiplier,
            }
        )

    def _validate(self) -> dict[str, float]:
        figures = evaluate(self.parallel, self.objective, self._validation(), self.device, self.precision)
        swapped = swapped_for_evaluation(self.average, self.optimizer)
        if swapped is not None:
            with swapped:
                averaged = evaluate(self.parallel, self.objective, self._validation(), self.device, self.precision)
            figures = {f"{k}_live": v for k, v in figures.items()} | averaged
        if not figures["val_tokens"]:  # nothing is held out: no figure is better than one that looks diverged
            return {}
        loss = figures["val_loss"]
        if loss < self.progress.best_loss:
            self.progress.best_loss = loss
        row = {"step": self.progress.step, "tokens": self.progress.tokens, **figures}
        self.outlet.validation(row)
        return figures

    def _validation(self) -> Any:
        rows = max(1, 8192 // self.config.train.seq_len)
        return self.data.validation_batches(batch_rows=rows, max_tokens=self.config.evaluate.tokens)

    # -- what goes out ------------------------------------------------------------------------------------------

    def _emit(self, row: dict[str, Any], verdict: Decision) -> None:
        if not self.outlet:
            return
        from trainwright.core.hardware import matmul_peak, memory_bytes

        if _due(self.config.log.every, row["step"]) or verdict.action != "ok":
            peak = matmul_peak(self.device, self.precision.compute_dtype) * self.mesh.world_size
            row["flops_utilization"] = row["tokens_per_s"] * self.flops_per_token / peak if peak else None
            row["memory_bytes"] = memory_bytes(self.device)
            if row["step"] == 1 or "optimizer_state_bytes" not in self.progress.extra:
                self.progress.extra["optimizer_state_bytes"] = optimizer_state_bytes(self.optimizer)
            row["optimizer_state_bytes"] = self.progress.extra["optimizer_state_bytes"]
            row |= reported(self.optimizer) | reported(self.clip) | reported(self.objective)
            self.outlet.log({k: v for k, v in row.items() if k != "interrupted"})
        self.outlet.step(row)
        for event in verdict.events:
            self.outlet.event(event)

    def _sample(self, prompt: str) -> None:
        from trainwright.train.runs import sample_text

        if self.parallel.pipeline is not None:
            log.warning(
                "no sample.txt: a pipeline has no rank with the whole model; get one with `trainwright generate %s`",
                self.config.run_dir,
            )
            return
        # On every rank: a sharded model needs all of them for a forward pass, and the same seed gives the same text.
        with swapped_for_evaluation(self.average, self.optimizer) or nullcontext():
            text = sample_text(self.parallel.model, self.tokenizer, prompt, seed=self.config.run.seed)
        if is_main():
            run_folder.write_atomic(self.config.run_dir / "sample.txt", text)

    def close(self) -> None:
        self._export_trace()  # of fewer steps than the recipe asks for
        self.loader.close()
        if self.parallel.context is not None:
            self.parallel.context.close()
        try:
            if not lost_another(sys.exc_info()[1]):  # else a save that has begun waits for that rank too
                self.checkpointer.close()
        finally:
            self.outlet.close()

    def _agree(self, flag: bool, asked: Any) -> bool:
        """Whether any rank raised ``flag``; a collective only where ``asked`` is set in the recipe."""
        if not asked:
            return False
        return bool(all_reduce_sum(torch.tensor(float(flag), device=self.device)).item())


@contextmanager
def _naming(section: str) -> Iterator[None]:
    """Errors of what a method builds carry the recipe's key."""
    try:
        yield
    except ConfigError as error:
        raise error.under(section) from None


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
