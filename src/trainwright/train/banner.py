"""What a run is, said in a few lines before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainwright.train.progress import clock, quantity

if TYPE_CHECKING:
    from trainwright.train.trainer import Trainer


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """Parameters of ``model``, and those of them that are trained."""
    params = list(model.parameters())
    return sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)


def banner(run: Trainer) -> list[str]:
    """Model, device, data, length and folder of ``run``, a line each."""
    rows = {"model": _model(run), "device": _device(run), "data": _data(run), "length": _length(run)}
    at = f"; goes on behind step {run.progress.step:,}" if run.progress.step else ""
    rows["run"] = f"{run.config.run_dir}{at}"
    return [f"{key:<7} {text}" for key, text in rows.items()]


def _model(run: Trainer) -> str:
    every, trained = run.parameter_counts
    text = f"{run.config.model.name}, {quantity(every)} parameters"
    if trained == every:
        return f"{text}, all trained"
    return f"{text}, {quantity(trained)} of them trained ({100 * trained / every:.2g} %)"


def _device(run: Trainer) -> str:
    if run.device.type == "cuda":
        name = f"{run.device} ({torch.cuda.get_device_name(run.device)})"
    else:
        name = f"{run.device} ({torch.get_num_threads()} threads)"
    compute = str(run.precision.compute_dtype).removeprefix("torch.")
    weights = str(run.params[0].param.dtype).removeprefix("torch.")
    parts = [name, f"computing in {compute}, weights in {weights}"]
    if run.mesh.world_size > 1:
        degrees = {k: v for k, v in vars(run.mesh.degrees).items() if isinstance(v, int) and v > 1}
        layout = " ".join(f"{k}={v}" for k, v in degrees.items())
        parts.insert(1, f"{run.mesh.world_size} ranks ({layout})")
    return ", ".join(parts)


def _data(run: Trainer) -> str:
    data = run.data
    documents = sum(d.num_docs for d in data.train.values())
    cached = " (from the cache)" if run.data_from_cache else ""
    text = f"{documents:,} documents, {quantity(data.train_tokens)} tokens{cached}; "
    if not data.validation_tokens:
        return f"{text}nothing held out: no validation, and no checkpoint is the best"
    held = sum(d.num_docs for d in data.validation.values())
    share = 100 * data.validation_tokens / (data.train_tokens + data.validation_tokens)
    return f"{text}held out {held:,}, {quantity(data.validation_tokens)} tokens ({share:.2g} %)"


def _length(run: Trainer) -> str:
    train = run.config.train
    step = f"{train.global_batch_tokens:,} tokens a step"
    limit = f"{clock(train.seconds)} of training" if train.seconds is not None else ""
    if run.by_clock:
        return f"{limit}, {step}"
    epochs = run.total_steps * run.rows / run.data.rows_per_epoch
    total = quantity(run.total_steps * train.global_batch_tokens)
    text = f"{run.total_steps:,} steps, {step}: {total} tokens, {epochs:.3g} epochs"
    return f"{text}; {limit} at the most" if limit else text
