"""Trainings one after another, each on the weights that the one before left: staged order, continued training.

    run_stages(["stage1.yaml", "stage2.yaml"], "runs/panda")

Every stage is an ordinary run with optimizer, schedule and data of its own. Its weights are exported, and the next
stage's model is ``{name: pretrained, path: THAT FOLDER}``, with the tokenizer in it. A stage of no length (0 tokens,
steps or epochs) is left out: what comes out is then what the stages before it made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainwright.config.run_config import RunConfig, apply_override, read_recipe
from trainwright.core.errors import ConfigError

Recipe = str | Path | dict[str, Any]
LENGTHS = ("tokens", "steps", "epochs", "seconds")


def stage_recipe(recipe: Recipe, out: Path, number: int, before: Path | None) -> dict[str, Any] | None:
    """The recipe of a stage with its folder and, behind the first, its model; None for one of no length."""
    data = read_recipe(recipe)
    train = data.get("train") or {}
    given = {k: train[k] for k in LENGTHS if train.get(k) is not None}
    if given and all(_is_zero(v) for v in given.values()):
        return None
    data["run"] = {**(data.get("run") or {}), "dir": str(out), "name": f"stage-{number}"}
    if before is not None:
        model = data.get("model")
        kept = model if isinstance(model, dict) and model.get("name") in ("pretrained", "hf") else {}
        data["model"] = {"name": "pretrained", **kept, "path": str(before)}
        data.pop("tokenizer", None)  # that of the weights
    return data


def _is_zero(value: Any) -> bool:
    try:
        return float(value) == 0
    except (TypeError, ValueError):
        return False  # 2M, or wrong, which the stage's own check says


def run_stages(
    stages: Sequence[Recipe],
    out: str | Path,
    overrides: Sequence[str] = (),
    on_stage: Callable[[int, dict[str, Any]], None] | None = None,
) -> Path:
    """Train ``stages`` in their order below ``out``; returns the folder with the last weights, ``out/stage-N.hf``.

    ``overrides`` (``key=value``) are for every stage. Finished stages that are found in ``out`` are not trained again,
    and one that was interrupted goes on. ``on_stage`` gets the number of a stage, from 1, and its last figures.
    Raises ConfigError where no stage has any length, and whatever a stage's recipe or training raises.
    """
    from trainwright.train.runs import export_run
    from trainwright.train.trainer import Trainer

    out = Path(out)
    recipes = []
    for recipe in stages:
        data = read_recipe(recipe)
        for override in overrides:
            apply_override(data, override)
        recipes.append(data)
    last: Path | None = None
    for number, recipe in enumerate(recipes, 1):
        staged = stage_recipe(recipe, out, number, last)
        if staged is None:
            continue
        exported = out / f"stage-{number}.hf"
        if not exported.exists():
            config = RunConfig.load(staged)
            resume = (config.run_dir / "config.yaml").exists()
            figures = Trainer(config, resume=resume).fit()
            export_run(config.run_dir, exported)
            if on_stage is not None:
                on_stage(number, figures)
        last = exported
    if last is None:
        raise ConfigError("no stage has any length; give one of them train.tokens, steps or epochs")
    return last
