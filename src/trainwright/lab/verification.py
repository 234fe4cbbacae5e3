"""What a candidate set of documents is worth, by a short anneal of a model that is nearly trained.

    default arm     70 % default mix, 30 % default mix (rows of an order of its own)
    candidate arm   the same 70 %,    30 % candidate
    both            from one checkpoint: its weights, its optimizer state, its learning rate falling to 0
    verdict         accept where the candidate arm's held-out loss, mean over the evaluation groups, is lower, and the
                    95 % t interval of the paired differences over the seeds is below 0 as well; reject otherwise

Seeds change the order of the data, so the interval is the noise of that. The 70 % are the same rows in both arms. With
the default mix as its own candidate both arms are the same run, and the difference is exactly 0.

Paper: Ultra-FineWeb, arXiv:2505.05427 (10B tokens from a 1B model that had seen 1T, recalled: 1 % of its training; 30 %
candidate). People warn that such verdicts hang on how the learning rate is re-warmed and on the mix that is replayed,
so both stand in the result: by default nothing is re-warmed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright import __version__
from trainwright.config.run_config import RunConfig
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import build as build_method
from trainwright.data.build.formats import guess_format
from trainwright.data.build.quality.overlap import overlapping
from trainwright.data.dataset import TokenDataset
from trainwright.data.module import DataConfig, build_data
from trainwright.data.packing import Pool
from trainwright.lab.annealing import Anneal, Mix, Slot, anneal_config, batcher_for, check_tokenizer
from trainwright.lab.identity import code_digest
from trainwright.lab.statistics import Interval, mean_interval, paired
from trainwright.train.run_dir import write_json
from trainwright.train.runs import find_checkpoint, open_config

log = logging.getLogger("trainwright")

Source = str | Path | Mapping[str, Any]
ARMS = ("default", "candidate")
DECAYED = 0.05  # of the peak rate; a model annealed that far has nothing left to decay


@dataclass
class Verification:
    """What :func:`verify_candidate` found. ``difference`` is candidate less default, below 0: the candidate helps."""

    verdict: Literal["accept", "reject"]
    reason: str
    difference: float
    interval: Interval | None
    differences: dict[int, float]  # by seed
    groups: dict[str, dict[str, Any]]  # of evaluation: losses of both arms and their difference
    losses: dict[str, dict[int, dict[str, float]]]  # arm -> seed -> group -> loss
    share: float
    tokens: int  # of one anneal
    tokens_in_all: int
    run_tokens: int  # that the run had seen
    mixture: dict[str, dict[str, float]]  # realized in the candidate arm
    repeats: float  # passes over the candidate
    learning_rate: dict[str, Any]
    start: dict[str, str]  # digests of weights and optimizer state, the same in every arm
    checkpoint: dict[str, Any]
    candidate: Any
    default: Any
    warnings: list[str] = field(default_factory=list)
    version: str = __version__

    @property
    def accepted(self) -> bool:
        return self.verdict == "accept"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify_candidate(
    run: Path | str,
    candidate: Source | Sequence[Source],
    *,
    default: Source | Sequence[Source] | None = None,
    share: float = 0.3,
    tokens: int | None = None,
    seeds: int | Sequence[int] = 3,
    checkpoint: str | int | Path = "latest",
    groups: Mapping[str, Source] | None = None,
    start_factor: float | None = None,
    on_overlap: Literal["refuse", "warn"] = "refuse",
    out: Path | str | None = None,
    keep: bool = False,
    report: Callable[[str], None] | None = None,
) -> Verification:
    """Anneal ``run`` with and without the candidate, and judge.

    candidate, default   sources: a path, or the entry of a recipe; default None: the run's own sources and weights
    tokens               of each anneal; None: a hundredth of what the run has seen
    seeds                how many, or which
    groups               further held-out sets by name, beside the run's validation split; each counts the same
    start_factor         of the peak rate at the start; None: what the checkpoint stands at, so no re-warming
    on_overlap           what to do where the candidate holds documents of an evaluation group and the default mix does
                         not
    out                  folder of the report ``verification.json`` and of the finished anneals, which are not run
                         again; None: ``verification/`` in the run's folder
    Raises ConfigError, DataError and CheckpointError.
    """
    say = report or (lambda line: None)
    if not 0 < share < 1:
        raise ConfigError(
            "should be between 0 and 1: what part of the rows the candidate fills", key="share", value=share
        )
    wanted = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not wanted or len(set(wanted)) != len(wanted):
        raise ConfigError("should be at least 1, or a list of different seeds", key="seeds", value=seeds)
    run = Path(run)
    config = open_config(run)
    path, meta, origin = _open_checkpoint(config, checkpoint)
    rate = _rate(run, origin["step"], start_factor)
    warnings = _rate_warnings(rate)
    tokens = tokens if tokens is not None else max(origin["tokens"] // 100, 1)
    steps = math.ceil(tokens / config.train.global_batch_tokens) if tokens > 0 else 0
    if steps < 1:
        raise ConfigError("should be at least 1", key="tokens", value=tokens)
    rows = steps * config.train.global_batch_rows
    if round(share * rows) < 1:
        raise ConfigError(f"gives the candidate none of {rows} rows; raise tokens", key="share", value=share)

    folder = Path(out) if out is not None else run / "verification"
    work = folder / "work"
    first = Anneal(anneal_config(config, work, steps, wanted[0]), path, rate["start_factor"])
    try:
        check_tokenizer(first.trainer.tokenizer, run)
        tokenizer, own = first.trainer.tokenizer, first.trainer.data

        def tokenized(sources: Source | Sequence[Source]) -> Any:
            data = config.data.model_dump(mode="json") | {"sources": entries(sources)}
            data["batcher"] = batcher_for(config).model_dump(mode="json")
            return build_data(DataConfig.model_validate(data), tokenizer, seq_len=config.train.seq_len, seed=0)

        base = Slot.of(own if default is None else tokenized(default))
        tried = Slot.of(tokenized(candidate))
        held_out = {name: _held_out(source, config, tokenizer) for name, source in (groups or {}).items()}
        if not own.validation_tokens:
            raise ConfigError(
                "the run has no validation documents to judge on",
                key="data.validation_fraction",
                value=config.data.validation_fraction,
            )
        validation: dict[str, TokenDataset] = {"validation": Pool(own.validation), **held_out}
        warnings += _check_overlap(tried, base, validation, on_overlap)
        start = first.start
    finally:
        first.trainer.close()
        shutil.rmtree(work, ignore_errors=True)
    mixes = {
        arm: {s: Mix.of({"base": (base, 1 - share), "slot": (slot, share)}, config, s) for s in wanted}
        for arm, slot in zip(ARMS, (base, tried), strict=True)
    }
    realized = mixes["candidate"][wanted[0]].realized(rows)
    repeats = realized["slot"]["tokens"] / tried.tokens
    if repeats > 1:
        warnings.append(
            f"the candidate has {tried.tokens:,} tokens for a share of {int(realized['slot']['tokens']):,}: it is seen "
            f"{repeats:.2f} times, which the default mix is not; give more of it or lower tokens"
        )
    for line in warnings:
        log.warning("%s", line)

    losses: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in ARMS}
    for seed in wanted:
        paths = {}
        for arm in ARMS:
            key = _key(config, path, meta, rate, steps, seed, share, arm, base, tried, validation)
            found = _arm(folder / "anneals" / key, arm, seed, config, path, rate, steps, mixes, held_out, start, keep)
            losses[arm][seed], paths[arm] = found["losses"], found["rates"]
            say(f"seed {seed}, {arm}: " + ", ".join(f"{k} {v:.4f}" for k, v in found["losses"].items()))
        if paths["default"] != paths["candidate"]:
            raise DataError("the two arms did not follow the same learning rate; the verdict would say nothing")
        rate["path"] = paths["default"]
    result = _judge(losses, list(validation))
    verification = Verification(
        **result,
        losses=losses,
        share=share,
        tokens=steps * config.train.global_batch_tokens,
        tokens_in_all=2 * len(wanted) * steps * config.train.global_batch_tokens,
        run_tokens=origin["tokens"],
        mixture={"candidate": realized["slot"], "default": realized["base"]},
        repeats=repeats,
        learning_rate=rate,
        start=start,
        checkpoint=origin,
        candidate=entries(candidate),
        default="the run's sources" if default is None else entries(default),
        warnings=warnings,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "verification.json", verification.to_dict())
    return verification


def entries(sources: Source | Sequence[Source]) -> list[dict[str, Any]]:
    """Recipe entries; of a path the kind of source is guessed by its files."""
    several = [sources] if isinstance(sources, str | Path | Mapping) else list(sources)
    out = []
    for source in several:
        if isinstance(source, Mapping):
            entry = dict(source)
        else:
            entry = {"name": guess_format([source]), "path": str(source)}
            if entry["name"] == "warc":
                raise ConfigError(
                    "is WARC, which is no source of a recipe; build a corpus of it first", key=str(source)
                )
        out.append(build_method("source", entry).model_dump(mode="json"))
    return out


def _open_checkpoint(config: RunConfig, which: str | int | Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    from trainwright.train.checkpoint import Checkpointer, inspect

    path = find_checkpoint(Checkpointer(config.checkpoint_dir, best_metric="val_loss"), which)
    found = inspect(path)
    progress = found.meta["progress"]
    origin = {"path": str(path), "step": progress["step"], "tokens": progress["tokens"], "run_id": found.run_id}
    return path, {"run_id": found.run_id, "step": found.step}, origin


def _rate(run: Path, step: int, start_factor: float | None) -> dict[str, Any]:
    """The learning rate at the checkpoint as a share of the run's highest, and what the anneal starts at."""
    from trainwright.train.metrics import effective, read_metrics

    file = run / "metrics.jsonl"
    rows = effective(read_metrics(file, strict=False)) if file.is_file() else []
    rates = {r["step"]: r["lr"] for r in rows if "lr" in r and "event" not in r}
    # As logged, so that it holds for any schedule, and for optimizers whose groups have rates of their own.
    peak = max(rates.values(), default=None)
    known = bool(peak) and any(s <= step for s in rates)
    factor = rates[max(s for s in rates if s <= step)] / peak if peak and known else 1.0
    if start_factor is not None and not (math.isfinite(start_factor) and start_factor > 0):
        raise ConfigError("should be above 0", key="start_factor", value=start_factor)
    start = factor if start_factor is None else start_factor
    return {
        "at_checkpoint": factor,
        "start_factor": start,
        "rewarmed": start > factor * (1 + 1e-9),
        "peak": peak,
        "known": known,
        "decay": "a straight line to 0",
    }


def _rate_warnings(rate: dict[str, Any]) -> list[str]:
    out = []
    if not rate["known"]:
        out.append("the run's metrics do not tell its learning rate at the checkpoint; the anneal starts at the peak")
    if rate["at_checkpoint"] <= DECAYED:
        out.append(
            f"the checkpoint is decayed already: its learning rate stands at {rate['at_checkpoint']:.1%} of the peak, "
            "so an anneal from it shows little; take an earlier checkpoint, of the stable phase"
        )
    if rate["rewarmed"]:
        out.append(
            f"the learning rate is re-warmed from {rate['at_checkpoint']:.3g} to {rate['start_factor']:.3g} of peak"
        )
    return out


def _held_out(source: Source, config: RunConfig, tokenizer: Any) -> TokenDataset:
    """All documents of a source, for evaluation."""
    data = config.data.model_dump(mode="json") | {"sources": entries(source), "validation_fraction": 0.0}
    data["batcher"] = {"name": "packed"}
    built = build_data(DataConfig.model_validate(data), tokenizer, seq_len=config.train.seq_len, seed=0)
    return Pool(built.train)


def _check_overlap(tried: Slot, base: Slot, validation: Mapping[str, TokenDataset], on_overlap: str) -> list[str]:
    if on_overlap not in ("refuse", "warn"):
        raise ConfigError("should be refuse or warn", key="on_overlap", value=on_overlap)
    if tried.fingerprint == base.fingerprint:
        return []
    out = []
    for name, held_out in validation.items():
        found = set(overlapping(Pool(tried.parts), held_out).tolist())
        if found:  # what the default mix has too is no advantage of the candidate
            found -= set(overlapping(Pool(base.parts), held_out).tolist())
        if found:
            line = (
                f"the candidate holds {len(found)} of the {held_out.num_docs} documents of the evaluation set {name}, "
                "so a lower loss there would say nothing; take them out of the candidate, or judge on other documents"
            )
            if on_overlap == "refuse":
                raise DataError(line)
            out.append(line)
    return out


def _key(
    config: RunConfig, path: Path, meta: dict[str, Any], rate: dict[str, Any], steps: int, seed: int, share: float,
    arm: str, base: Slot, tried: Slot, validation: Mapping[str, TokenDataset],
) -> str:  # fmt: skip
    """Names an anneal by everything that decides it, so that a second verification finds those that it shares."""
    recipe = {k: v for k, v in config.to_dict().items() if k not in ("run", "log", "checkpoint")}
    whole = {
        "recipe": recipe, "checkpoint": meta, "start": rate["start_factor"], "steps": steps, "seed": seed,
        "share": share, "arm": arm, "base": base.fingerprint, "code": code_digest(),
        "slot": (base if arm == "default" else tried).fingerprint,
        "groups": {k: v.fingerprint for k, v in validation.items()},
    }  # fmt: skip
    return (
        arm + "-" + hashlib.blake2b(json.dumps(whole, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    )


def _arm(
    folder: Path, arm: str, seed: int, config: RunConfig, checkpoint: Path, rate: dict[str, Any], steps: int,
    mixes: Mapping[str, Mapping[int, Mix]], groups: Mapping[str, TokenDataset], start: dict[str, str], keep: bool,
) -> dict[str, Any]:  # fmt: skip
    """Losses by group and the rates of all steps; trained unless the folder holds them."""
    done = folder / "result.json"
    if done.is_file():
        try:
            return dict(json.loads(done.read_text("utf-8")))
        except ValueError:
            pass  # written by halves by something else than us; train it again
    anneal = Anneal(anneal_config(config, folder / "run", steps, seed), checkpoint, rate["start_factor"])
    if anneal.start != start:
        raise DataError("the checkpoint changed while its anneals were running; verify again")
    anneal.use(mixes[arm][seed])
    found: dict[str, Any] = {"losses": anneal.fit(groups), "rates": anneal.rates}
    if not all(math.isfinite(v) for v in found["losses"].values()):
        raise DataError(f"the {arm} arm of seed {seed} diverged: {found['losses']}; lower start_factor")
    write_json(done, found)
    if not keep:
        shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    return found


def _judge(losses: Mapping[str, Mapping[int, Mapping[str, float]]], names: Sequence[str]) -> dict[str, Any]:
    """The verdict, from losses by arm, seed and group. Pure arithmetic."""

    def means(arm: str) -> dict[int, float]:
        return {seed: math.fsum(found[n] for n in names) / len(names) for seed, found in losses[arm].items()}

    differences = dict(zip(sorted(losses["default"]), paired(means("candidate"), means("default")), strict=True))
    mean, interval = mean_interval(list(differences.values()))
    assert mean is not None  # for mypy: there is a seed
    groups: dict[str, dict[str, Any]] = {}
    for name in names:
        sides: dict[str, dict[int, float]] = {arm: {s: f[name] for s, f in losses[arm].items()} for arm in ARMS}
        part, noise = mean_interval(paired(sides["candidate"], sides["default"]))
        groups[name] = {
            **{arm: math.fsum(side.values()) / len(side) for arm, side in sides.items()},
            "difference": part,
            "interval": noise,
        }
    verdict: Literal["accept", "reject"] = "reject"
    if interval is None:
        reason = "one seed: the noise of the difference is not known; use at least 2"
    elif all(d == 0 for d in differences.values()):
        reason = "no difference at all"
    elif interval[1] < 0:
        verdict, reason = "accept", "the candidate lowers the held-out loss by more than the noise of the seeds"
    elif interval[0] > 0:
        reason = "the candidate raises the held-out loss"
    else:
        reason = "the difference lies within the noise of the seeds"
    return {
        "verdict": verdict, "reason": reason, "difference": mean, "interval": interval, "differences": differences,
        "groups": groups,
    }  # fmt: skip
