"""Effective learning rate: measuring it in a run, and carrying the best rate of small runs over to a long one.

Of a matrix W with update u (without rate and decay) it is  eta_eff = lr |u|_F / |W|_F,  the step relative to the
weights, which is what a network with norms in front of its matrices reacts to. A run's value is the mean over its
matrices, weighted by their sizes: at the peak rate, and over all steps.

The best rates of a sweep: for each data size D, at one model size N, a parabola of the loss in ln(rate) through the
lowest points; its vertex is the optimum. Through the optima a line and a quadratic in ln D, for the rate itself and
for eta_eff; the straighter of the two, by |quadratic term| / its standard error, is extrapolated by its line, with a
prediction interval from Student's t. An optimum on the edge of its grid is refused, since the parabola would be an
extrapolation itself.

What the theory says, for updates of steady length u that are orthogonal to W on average and decay d: |W|^2 goes to
lr u^2 / (2 d) with time constant 1 / (2 lr d) steps, and then the angle per step is sqrt(2 lr d), whatever u. Small
rates spend more of a run on the way there, which bends the law of the raw rate upward at scale.
On the Nonlinearity of Learning Rate Scaling for LLM Training, arXiv:2606.29158. Its text was open to us as abstract
and equations alone; how optima are fitted and the interval are our reconstruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainwright.core.distributed import full_tensor
from trainwright.core.errors import InputError
from trainwright.core.params import NamedParam

MATRICES = ("matrix", "expert")  # roles
Rate = Literal["lr", "effective_lr"]


class NoOptimum(InputError):
    """A sweep shows no optimum that a fit could stand on: too few rates, or the lowest loss at an end of the grid."""


# Measuring


def matrix_squares(t: Tensor, splits: Sequence[int] = ()) -> Tensor:
    """Squared Frobenius norms of the matrices in ``t [..., out, in]``, ``[k]``; of whole ones, where it is sharded."""
    return _sums(t.detach().to(torch.promote_types(t.dtype, torch.float32)).square(), splits)


def _sums(t: Tensor, splits: Sequence[int]) -> Tensor:
    lines = full_tensor(t.sum(-2 if splits and splits[0] < 0 else -1))  # [..., out], or [..., in] for parts by columns
    parts = lines.split([abs(n) for n in splits], dim=-1) if splits else (lines,)
    return torch.stack([part.sum(-1) for part in parts], dim=-1).flatten()


def effective_rates(before: Tensor, after: Tensor, decay: float = 0.0, splits: Sequence[int] = ()) -> Tensor:
    """``lr |u| / |W|`` of each matrix in a weight ``[..., out, in]``, from the weight before and after a step, ``[k]``.

    decay  lr times the decoupled weight decay of that step, whose part of the way is taken off
    Matrices of zeros give 0. For AdamH and MuonH it is the chord 2 sin(atan(lr) / 2), which is lr but for lr^3.
    """
    size = matrix_squares(before, splits)
    way = matrix_squares(after.detach() - before * (1 - decay) if decay else after.detach() - before, splits)
    return torch.where(size > 0, way / size.clamp(min=torch.finfo(size.dtype).tiny), 0.0).sqrt()


def turn_angles(before: Tensor, after: Tensor, splits: Sequence[int] = ()) -> Tensor:
    """Angle in radians by which a step turned each matrix of ``[..., out, in]``, ``[k]``; decay does not change it."""
    a, b = before.detach().double(), after.detach().double()  # 1 - cos of a small angle needs the digits
    cosine = _sums(a * b, splits) / (_sums(a * a, splits) * _sums(b * b, splits)).sqrt().clamp(min=1e-300)
    return 2 * torch.asin(((1 - cosine) / 2).clamp(0, 1).sqrt())


@dataclass(frozen=True)
class Measured:
    """Effective learning rate of a run: means over matrices, weighted by their sizes."""

    peak: float  # over the measured steps at the highest rate
    mean: float  # over all measured steps
    steps: int  # measured
    by_name: dict[str, list[float]]  # mean over steps of each matrix of a parameter


class EffectiveRateMeter:
    """Measures an optimizer's steps: ``with meter.step(): optimizer.step()``, or once ``meter.attach()``.

    optimizer  its groups tell the rate, and the decoupled decay whose part is taken off
    params     of which hidden matrices are measured
    every      measure each so many steps; one copies the matrices and, when sharded, sums over ranks
    No step waits for the device; :meth:`result` does.
    Raises InputError when there are no hidden matrices.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[NamedParam], every: int = 1):
        self.optimizer, self.every = optimizer, max(every, 1)
        self.params = [n for n in params if n.role in MATRICES and n.param.numel()]
        if not self.params:
            raise InputError("there are no hidden matrices whose effective learning rate could be measured")
        self._seen = 0
        self._before: list[Tensor] | None = None
        self._rates: list[Tensor] = []  # [matrices] of each measured step
        self._lrs: list[float] = []

    def attach(self) -> list[RemovableHandle]:
        """Measure every ``optimizer.step()`` from now on; ``remove()`` of the handles ends that."""
        pre: Callable[..., None] = lambda *_: self.before()  # noqa: E731
        post: Callable[..., None] = lambda *_: self.after()  # noqa: E731
        return [self.optimizer.register_step_pre_hook(pre), self.optimizer.register_step_post_hook(post)]

    def step(self) -> EffectiveRateMeter:
        return self

    def __enter__(self) -> None:
        self.before()

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.after()
        self._before = None

    @torch.no_grad()
    def before(self) -> None:
        if self._seen % self.every == 0:
            self._before = [n.param.detach().clone() for n in self.params]
        self._seen += 1

    @torch.no_grad()
    def after(self) -> None:
        if self._before is None:
            return
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        rates, lrs = [], []
        for n, old in zip(self.params, self._before, strict=True):
            group = groups.get(id(n.param), {"lr": 0.0})
            # A parameter without gradient was not stepped, so it did not decay either.
            decay = group["lr"] * group.get("weight_decay", 0.0) if n.param.grad is not None else 0.0
            rates.append(effective_rates(old, n.param, float(decay), n.splits))
            lrs.append(float(group["lr"]))
        self._rates.append(torch.cat([r.to(rates[0].device) for r in rates]))
        self._lrs.append(max(lrs))
        self._before = None

    def result(self) -> Measured:
        """Means so far. Raises InputError before the first measured step."""
        if not self._rates:
            raise InputError("no step was measured; wrap optimizer.step() in meter.step()")
        rates = torch.stack(self._rates).double().cpu().numpy()  # [steps, matrices]
        counts, sizes = [], []
        for n in self.params:
            rows, columns = n.param.shape[-2:]
            parts = [part * columns if part > 0 else -part * rows for part in n.splits or (rows,)] * n.param.shape[
                :-2
            ].numel()
            counts.append(len(parts))
            sizes += parts
        per_step = rates @ (np.array(sizes) / sum(sizes))
        at_peak = np.isclose(self._lrs, max(self._lrs))
        means = np.split(rates.mean(0), np.cumsum(counts)[:-1])
        by_name = {n.name: [float(x) for x in mean] for n, mean in zip(self.params, means, strict=True)}
        return Measured(float(per_step[at_peak].mean()), float(per_step.mean()), len(per_step), by_name)


# What the theory says


def equilibrium_norm(lr: float, decay: float, update_norm: float) -> float:
    """|W| that updates of length ``update_norm`` and decoupled weight decay lead to."""
    return math.sqrt(lr * update_norm**2 / (2 * decay))


def equilibrium_angle(lr: float, decay: float) -> float:
    """Radians per step at that norm."""
    return math.sqrt(2 * lr * decay)


def relaxation_steps(lr: float, decay: float) -> float:
    """Time constant of |W|^2 on its way to that norm, in steps."""
    return 1 / (2 * lr * decay)


# Fitting


@dataclass(frozen=True)
class Trial:
    """One training run of a sweep. ``setup`` names what has to be equal in all of them: schedule, batch size, ..."""

    params: int
    tokens: int
    lr: float
    loss: float
    effective_lr: float | None = None
    setup: str = ""


@dataclass(frozen=True)
class Optimum:
    """The vertex of a sweep's parabola."""

    tokens: int
    rate: float
    loss: float
    curvature: float  # second derivative of the loss in ln(rate)


@dataclass(frozen=True)
class Fit:
    """Least squares of ln(rate) on powers of ln(D) - centre."""

    centre: float
    coefficients: np.ndarray  # [degree + 1], of rising powers
    covariance: np.ndarray  # NaN where no point is left over
    residual: float  # standard deviation
    freedom: int  # points beyond the coefficients

    @property
    def ratio(self) -> float:
        """|last coefficient| / its standard error; NaN where no point is left over."""
        error = math.sqrt(self.covariance[-1, -1]) if self.freedom else math.nan
        size = abs(float(self.coefficients[-1]))
        return size / error if error else (math.inf if size else 0.0)


@dataclass(frozen=True)
class Law:
    """How the best rate goes with D at one model size."""

    rate: Rate
    optima: list[Optimum]
    linear: Fit
    quadratic: Fit | None  # with three optima there is none

    @property
    def exponent(self) -> float:
        """Of D."""
        return float(self.linear.coefficients[1])

    @property
    def bend(self) -> float:
        """|quadratic term| / its standard error: 0 is straight; NaN with fewer than four optima."""
        return self.quadratic.ratio if self.quadratic else math.nan

    def at(self, tokens: float, confidence: float = 0.95) -> Prediction:
        """The line at ``tokens`` with a prediction interval; infinite where no point is left over for an error."""
        from scipy.stats import t as student  # scipy takes a while to import

        fit = self.linear
        x = np.array([1.0, math.log(tokens) - fit.centre])
        middle = float(x @ fit.coefficients)
        if fit.freedom == 0:
            return Prediction(self.rate, tokens, math.exp(middle), 0.0, math.inf)
        error = math.sqrt(float(x @ fit.covariance @ x) + fit.residual**2)
        half = float(student.ppf(0.5 + confidence / 2, fit.freedom)) * error
        return Prediction(self.rate, tokens, math.exp(middle), math.exp(middle - half), math.exp(middle + half))


@dataclass(frozen=True)
class Prediction:
    rate: Rate
    tokens: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Transfer:
    """The chosen law, its prediction, and what is known of the other one."""

    chosen: Law
    other: Law | None
    prediction: Prediction
    lr: float | None  # for the optimizer; None: eta_eff was chosen, and no run of the largest D reached the prediction


def fit_parabola(rates: Sequence[float], losses: Sequence[float], points: int = 3) -> tuple[float, float, float]:
    """Vertex of a parabola of the loss in ln(rate): ``(rate, loss, second derivative)``.

    points  how many to fit, the lowest and those beside it; losses of equal rates (seeds) are averaged first
    Raises NoOptimum for fewer than three rates, when the lowest loss is at an end, and when the vertex is no minimum
    between the fitted points. Runs that diverged (loss not finite) count as ends that are too high.
    """
    if points < 3:
        raise InputError(f"points={points}: a parabola takes 3 or more")
    if len(rates) != len(losses) or any(not r > 0 for r in rates):
        raise InputError("every run of a sweep takes a rate above 0 and a loss")
    grid: dict[float, list[float]] = {}
    for rate, loss in zip(rates, losses, strict=True):
        grid.setdefault(rate, []).append(loss)
    x = np.log(sorted(grid))
    y = np.array([np.mean(grid[rate]) for rate in sorted(grid)])
    finite = np.isfinite(y)
    if finite.sum() < 3:
        raise NoOptimum(f"{finite.sum()} learning rates ended with a loss; sweep 3 or more")
    best = int(np.argmin(np.where(finite, y, np.inf)))
    if best in (0, len(x) - 1) or not (finite[best - 1] and finite[best + 1]):
        side = "higher" if best == len(x) - 1 else "lower"
        if 0 < best < len(x) - 1:
            side = "closer"
        raise NoOptimum(
            f"the lowest loss is at {math.exp(x[best]):.4g}, at the edge of the usable grid "
            f"[{math.exp(x[finite][0]):.4g}, {math.exp(x[finite][-1]):.4g}]; add {side} learning rates"
        )
    low, high = best - 1, best + 1
    while high - low + 1 < points:  # widen to the lower of the two neighbours
        left = y[low - 1] if low > 0 and finite[low - 1] else math.inf
        right = y[high + 1] if high < len(x) - 1 and finite[high + 1] else math.inf
        if not (math.isfinite(left) or math.isfinite(right)):
            break
        low, high = (low - 1, high) if left <= right else (low, high + 1)
    x, y = x[low : high + 1], y[low : high + 1]
    centre = x.mean()
    c, b, a = np.polynomial.polynomial.polyfit(x - centre, y, 2)
    vertex = centre - b / (2 * a) if a > 0 else math.nan
    if not x[0] <= vertex <= x[-1]:
        raise NoOptimum(
            f"no minimum between the learning rates {math.exp(x[0]):.4g} and {math.exp(x[-1]):.4g}: the losses "
            f"{np.round(y, 4).tolist()} are too flat or too noisy; sweep more seeds or a wider grid"
        )
    return math.exp(vertex), float(c - b * b / (4 * a)), float(2 * a)


def regress(tokens: Sequence[float], rates: Sequence[float], degree: int) -> Fit:
    """Least squares of ln(rate) on ln(D) of this degree. Raises InputError for fewer points than coefficients."""
    x, y = np.log(tokens), np.log(rates)
    if len(set(tokens)) < degree + 1:
        raise InputError(f"a fit of degree {degree} takes {degree + 1} data sizes, got {sorted(set(tokens))}")
    centre = float(x.mean())
    design = np.vander(x - centre, degree + 1, increasing=True)
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ (design.T @ y)
    freedom = len(x) - degree - 1
    rest = y - design @ coefficients
    variance = float(rest @ rest) / freedom if freedom else math.nan
    return Fit(centre, coefficients, inverse * variance, math.sqrt(variance), freedom)


def fit_law(trials: Sequence[Trial], rate: Rate = "lr", points: int = 3) -> Law:
    """The law of the best ``rate`` over D of trials of one model size and one setup.

    Raises InputError for mixed model sizes or setups, fewer than three data sizes, trials without effective_lr;
    NoOptimum, naming the data size, where a sweep has none.
    """
    _check_one_setup(trials)
    optima = []
    for tokens in sorted({trial.tokens for trial in trials}):
        sweep = [trial for trial in trials if trial.tokens == tokens]
        values = [trial.lr if rate == "lr" else trial.effective_lr for trial in sweep]
        known = [v for v in values if v is not None]
        if len(known) < len(values):
            raise InputError(f"effective_lr was not measured in {len(values) - len(known)} trials of {tokens} tokens")
        if rate == "effective_lr":
            known = _means_by_lr(sweep, known)
        try:
            vertex, loss, curvature = fit_parabola(known, [trial.loss for trial in sweep], points)
        except NoOptimum as error:
            raise NoOptimum(f"{tokens} tokens, {rate}: {error}") from None
        optima.append(Optimum(tokens, vertex, loss, curvature))
    if len(optima) < 3:
        raise InputError(f"an extrapolation takes sweeps of 3 or more data sizes, got {len(optima)}")
    sizes, best = [o.tokens for o in optima], [o.rate for o in optima]
    quadratic = regress(sizes, best, 2) if len(optima) >= 4 else None
    return Law(rate, optima, regress(sizes, best, 1), quadratic)


def transfer(trials: Sequence[Trial], tokens: float, confidence: float = 0.95, points: int = 3) -> Transfer:
    """The best rate at ``tokens``, from sweeps of one model size at three or more smaller data sizes.

    Where all trials have an effective_lr, the straighter of the two laws is taken (the effective one in a tie, as the
    paper's finding); else that of lr. Raises as :func:`fit_law`.
    """
    raw = fit_law(trials, "lr", points)
    if any(trial.effective_lr is None for trial in trials):
        prediction = raw.at(tokens, confidence)
        return Transfer(raw, None, prediction, prediction.value)
    effective = fit_law(trials, "effective_lr", points)
    straighter = math.isnan(raw.bend) or math.isnan(effective.bend) or effective.bend <= raw.bend
    chosen, other = (effective, raw) if straighter else (raw, effective)
    prediction = chosen.at(tokens, confidence)
    lr = prediction.value if chosen.rate == "lr" else _lr_of(prediction.value, trials)
    return Transfer(chosen, other, prediction, lr)


def _check_one_setup(trials: Sequence[Trial]) -> None:
    sizes, setups = {trial.params for trial in trials}, {trial.setup for trial in trials}
    if len(sizes) != 1:
        raise InputError(f"a law over data takes trials of one model size, got {sorted(sizes)}; fit each size alone")
    if len(setups) != 1:
        raise InputError(
            f"trials of different setups cannot be compared: {', '.join(sorted(map(repr, setups)))}; "
            "keep schedule and batch size fixed"
        )


def _means_by_lr(sweep: Sequence[Trial], values: Sequence[float]) -> list[float]:
    """Seeds of one lr measure slightly different eta_eff; they are one point of the grid."""
    by_lr: dict[float, list[float]] = {}
    for trial, value in zip(sweep, values, strict=True):
        by_lr.setdefault(trial.lr, []).append(math.log(value) if value > 0 else math.nan)
    return [math.exp(float(np.mean(by_lr[trial.lr]))) for trial in sweep]


def _lr_of(effective_lr: float, trials: Sequence[Trial]) -> float | None:
    """The lr that gave this eta_eff in the runs of the largest D; None outside of what they measured."""
    largest = max(trial.tokens for trial in trials)
    sweep = [trial for trial in trials if trial.tokens == largest and trial.effective_lr]
    means = _means_by_lr(sweep, [float(trial.effective_lr or 0.0) for trial in sweep])
    points = sorted({(math.log(value), math.log(trial.lr)) for value, trial in zip(means, sweep, strict=True)})
    x, y = np.array(points).T
    target = math.log(effective_lr)
    return math.exp(float(np.interp(target, x, y))) if x[0] <= target <= x[-1] else None
