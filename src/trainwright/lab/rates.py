"""Which learning rates tuning moved: a matrix method's inner optimizer may keep its own while the outer's is tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright.config.run_config import RunConfig
from trainwright.optim.base import OptimizerConfig

Rates = Mapping[str, float]  # dotted key -> learning rate, that of the outermost optimizer first


def rates_of(config: RunConfig) -> dict[str, float]:
    """The rate of the optimizer and of each one inside it that has one."""
    out: dict[str, float] = {}
    key, method = "optimizer", config.optimizer
    while True:
        if method.lr is not None:  # a wrapper's may be that of its inner one
            out[f"{key}.lr"] = method.lr
        inner = getattr(method, "inner", None)
        if not isinstance(inner, OptimizerConfig):
            return out
        key, method = f"{key}.inner", inner


def kept_rates(points: Sequence[Rates]) -> dict[str, float]:
    """Rates that are the same at all ``points`` of a grid while that of an optimizer around theirs is not."""
    kept: dict[str, float] = {}
    outside_moves = False
    for key, rate in points[0].items() if points else ():
        moves = any(p.get(key) != rate for p in points)
        if outside_moves and not moves:
            kept[key] = rate
        outside_moves = outside_moves or moves
    return kept


def note(arm: str, kept: Rates) -> str:
    """What a reader has to know of an arm whose tuning left rates alone."""
    which = " and ".join(f"{key} stayed at {rate:g}" for key, rate in kept.items())
    return (
        f"{arm}: {which} while the rate outside was tuned, so embeddings, head, norms and biases were not tuned with "
        "the matrices; arms with one rate for all of them have that advantage"
    )
