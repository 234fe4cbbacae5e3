"""``trainwright plan``: where a source of data should go, before the run, and how the prediction held, after it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trainwright.cli.output import figures, out, print_json
from trainwright.core.errors import ConfigError
from trainwright.core.seeds import derive


def placement(recipe: Path | None, overrides: list[str], source: str | None, json: bool) -> None:
    """The window in which ``source`` is remembered best, and the shares that the mixer ``trec`` would use."""
    from trainwright.config import RunConfig
    from trainwright.config.run_config import apply_override, read_recipe
    from trainwright.data.mixers.base import short_names
    from trainwright.data.mixers.trec import TrecMixerConfig

    data = read_recipe(recipe)
    for override in overrides:
        apply_override(data, override)
    if source is not None:
        section = data.setdefault("data", {})
        given = section.get("mixer")
        kept = given if isinstance(given, dict) and given.get("name") == "trec" else {}
        section["mixer"] = {**kept, "name": "trec", "source": source}
    config = RunConfig.load(data)
    mixer = config.data.mixer
    if not isinstance(mixer, TrecMixerConfig):
        raise ConfigError("name the source to place, here or as data.mixer={name: trec, source: ...}", key="--source")
    context = _context(config)
    try:
        built = mixer.build(context)
    except ConfigError as error:
        raise (error if error.key.startswith("optimizer") else error.under("data.mixer")) from None
    short = short_names(built.names)
    steps = len(context.lr) if context.lr is not None else 0
    found: dict[str, Any] = {
        "source": short[built.source],
        "steps": steps,
        "from_step": built.placement.start + 1,
        "to_step": built.placement.stop,
        "from_share": round(built.placement.start / steps, 4),
        "to_share": round(built.placement.stop / steps, 4),
        "curve_below_mean_by": round(built.placement.dip, 4),
        "m": mixer.exponent(context),
        "tokens_per_parameter": round(context.tokens_per_parameter, 3),
    }
    plan = [{short[n]: rows for n, rows in segment.rows.items()} for segment in built.plan or ()]
    if json:
        print_json({**found, "rows": plan, "curve": [round(float(x), 6) for x in mixer.curve(context)]})
        return
    figures(found)
    for name, segment in zip(("before", "in the window", "behind"), plan, strict=True):
        out().print(f"rows {name}: " + ", ".join(f"{n} {rows}" for n, rows in segment.items()))


def _context(config: Any) -> Any:
    import torch

    from trainwright.core.registry import build as build_method
    from trainwright.data.module import build_data, build_tokenizer
    from trainwright.train.interaction import mix_context

    train = config.train
    if train.seconds is not None or (train.steps is None and train.tokens is None and train.epochs is None):
        raise ConfigError(
            "the length of a run by the clock is not known; use train.steps, tokens or epochs", key="train.seconds"
        )
    spec = config.tokenizer
    if spec is None:
        path = config.model.tokenizer_path()
        spec = build_method("tokenizer", {"name": "hf", "path": path} if path else {"name": "bpe"})
    tokenizer = build_tokenizer(config.data, spec)
    rows = train.global_batch_rows
    data = build_data(config.data, tokenizer, seq_len=train.seq_len, seed=derive(config.run.seed, "data"))
    most = None if train.epochs is None else max(1, math.ceil(train.epochs * data.rows_per_epoch))
    if train.steps is not None:
        steps = train.steps
    elif train.tokens is not None:
        steps = math.ceil(train.tokens / train.global_batch_tokens)
    else:
        steps = math.ceil((most or rows) / rows)
    with torch.device("meta"):
        params = sum(p.numel() for p in config.model.build(tokenizer.vocab_size, train.seq_len).parameters())
    return mix_context(config, data, rows, steps, most, params)


def reevaluate(run: Path, against: Path | None, window: int | None, json: bool) -> None:
    """The re-evaluation curve of a finished run on its own batches, beside the predicted one."""
    from trainwright.analysis.trec import compare
    from trainwright.analysis.trec import reevaluate as measure
    from trainwright.data.mixers.trec import ADAMW
    from trainwright.data.module import build_data
    from trainwright.train.checkpoint import Checkpointer, inspect
    from trainwright.train.replay import Replay
    from trainwright.train.runs import find_checkpoint, load_run

    model, tokenizer, config = load_run(run, live=True)
    if config.optimizer.name not in ADAMW:
        raise ConfigError(f"{run} was trained with {config.optimizer.name}; the prediction is AdamW's", key="optimizer")
    meta = inspect(find_checkpoint(Checkpointer(config.checkpoint_dir, best_metric="val_loss"))).meta
    data = build_data(
        config.data, tokenizer, seq_len=config.train.seq_len, seed=derive(config.run.seed, "data"),
        global_batch_rows=config.train.global_batch_rows,
    )  # fmt: skip
    replay = Replay(config, data, meta, num_params=sum(p.numel() for p in model.parameters()))
    micro = max(1, 8192 // config.train.seq_len)
    device = next(model.parameters()).device
    curve = measure(model, replay.batches(), device=device, micro_batch_size=micro)
    if against is not None:
        other, other_tokenizer, _ = load_run(against, live=True)
        if other_tokenizer.fingerprint() != tokenizer.fingerprint():
            raise ConfigError("was trained with another tokenizer; its losses are of other tokens", key="--against")
        curve = curve - measure(other, replay.batches(), device=device, micro_batch_size=micro)
    found = compare(curve, replay.lr, config.optimizer.weight_decay, window=window)
    found = {"run": str(run), "against": None if against is None else str(against), **found}
    if json:
        print_json({**found, "curve": [float(x) for x in curve]})
    else:
        figures({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()})
