"""What is measured on the weights at a trial's end, beyond the validation loss.

stable_rank     mean of ||W||_F^2 / ||W||_2^2 over the hidden matrices (stacked experts count one by one)
weight_rms      root mean square of all entries of the hidden matrices
truncated_loss  validation loss with every hidden matrix cut to its best approximation of rank ``rank``
rtn_loss        validation loss with every hidden matrix rounded to nearest: ``bits`` bits, asymmetric, one scale and
                zero point for each ``group`` neighbours of a row (the last group of a row may be smaller)
live_loss       validation loss of the weights as trained, where a run averages its weights
peak_lr         rate of the hidden matrices before the schedule: with tuning, the one that was found

All but the last two look at the weights that validation uses: the averaged ones where there is an average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trainwright.core.errors import ConfigError, nearest
from trainwright.core.params import NamedParam

SETTINGS: dict[str, dict[str, int]] = {
    "stable_rank": {}, "weight_rms": {}, "truncated_loss": {"rank": 16}, "rtn_loss": {"bits": 3, "group": 128},
    "live_loss": {}, "peak_lr": {},
}  # fmt: skip


def parse_probe(value: Any) -> tuple[str, dict[str, int]]:
    """``"stable_rank"`` or ``{"truncated_loss": {"rank": 16}}`` -> name and settings. Raises ConfigError."""
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError("should be a name or {name: {setting: value}}", key="probes", value=value)
    ((name, given),) = value.items()
    if name not in SETTINGS:
        raise ConfigError(f"no such probe; {nearest(str(name), SETTINGS)}", key="probes", value=name)
    given = dict(given or {})
    for key, number in given.items():
        if key not in SETTINGS[name]:
            raise ConfigError(f"unknown setting; {nearest(key, SETTINGS[name])}", key=f"probes.{name}.{key}")
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError("should be a whole number above 0", key=f"probes.{name}.{key}", value=number)
    return name, {**SETTINGS[name], **given}


def label(name: str, settings: dict[str, int]) -> str:
    """``truncated_loss@rank=16``: the full name of a probe with settings."""
    return name + ("@" + ",".join(f"{k}={v}" for k, v in settings.items()) if settings else "")


def matrices(params: Sequence[NamedParam]) -> list[Tensor]:
    """The hidden matrices ``[out, in]`` as views, stacked experts one by one."""
    out: list[Tensor] = []
    for n in params:
        if n.role == "matrix" and n.param.ndim == 2:
            out.append(n.param.detach())
        elif n.role == "expert" and n.param.ndim == 3:
            out += n.param.detach().unbind(0)
    return out


def stable_rank(weight: Tensor) -> float:
    """``||W||_F^2 / ||W||_2^2``; 0 for a matrix of zeros."""
    values = torch.linalg.svdvals(weight.float())
    top = float(values[0]) ** 2
    return float((values**2).sum()) / top if top > 0 else 0.0


def truncated(weight: Tensor, rank: int) -> Tensor:
    """The nearest matrix of that rank."""
    u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ v[:rank]).to(weight.dtype)


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """Round-to-nearest, asymmetric, per row and ``group`` columns; zero is representable."""
    out = torch.empty_like(weight)
    for start in range(0, weight.shape[1], group):
        part = weight[:, start : start + group].float()
        low = part.amin(1, keepdim=True).clamp(max=0)
        high = part.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
        zero = torch.round(-low / scale)
        codes = (torch.round(part / scale) + zero).clamp(0, 2**bits - 1)
        out[:, start : start + group] = ((codes - zero) * scale).to(weight.dtype)
    return out


@contextmanager
def replaced(weights: Sequence[Tensor], new: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside it each of ``weights`` holds ``new`` of it."""
    kept = [w.clone() for w in weights]
    try:
        with torch.no_grad():
            for w in weights:
                w.copy_(new(w))
        yield
    finally:
        with torch.no_grad():
            for w, old in zip(weights, kept, strict=True):
                w.copy_(old)


def measure(trainer: Any, probes: Sequence[Any]) -> dict[str, float | None]:
    """Figures of ``probes`` on a trained Trainer, by name and by name with settings. Not finite: None."""
    if not probes:
        return {}
    weights = matrices(trainer.params)
    out: dict[str, float | None] = {}
    for value in probes:
        name, settings = parse_probe(value)
        as_trained = trainer.average is None or name in ("live_loss", "peak_lr")
        averaged = nullcontext() if as_trained else trainer.average.swapped()
        with averaged:
            figure = _one(trainer, weights, name, settings)
        found = figure if figure is not None and math.isfinite(figure) else None
        out.setdefault(name, found)
        out[label(name, settings)] = found
    return out


def _one(trainer: Any, weights: list[Tensor], name: str, settings: dict[str, int]) -> float | None:
    if name == "live_loss":
        return validation_loss(trainer)
    if name == "peak_lr":
        return float(trainer.optimizer.param_groups[0]["initial_lr"])  # matrix methods step the matrices first
    if not weights:
        return None
    if name == "stable_rank":
        return sum(map(stable_rank, weights)) / len(weights)
    if name == "weight_rms":
        square = sum(float(w.float().square().sum()) for w in weights)
        return math.sqrt(square / sum(w.numel() for w in weights))
    change: Callable[[Tensor], Tensor] = (
        (lambda w: truncated(w, settings["rank"]))
        if name == "truncated_loss"
        else (lambda w: rounded(w, settings["bits"], settings["group"]))
    )
    with replaced(weights, change):
        return validation_loss(trainer)


def validation_loss(trainer: Any) -> float:
    """On the same rows as the validations of the run."""
    from trainwright.train.evaluate import evaluate

    config = trainer.config
    rows = max(1, 8192 // config.train.seq_len)
    batches = trainer.data.validation_batches(batch_rows=rows, max_tokens=config.evaluate.tokens)
    return evaluate(trainer.parallel, trainer.objective, batches, trainer.device, trainer.precision)["val_loss"]
