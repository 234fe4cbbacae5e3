"""``trainwright plan comm``: bytes per step and link of every layout, and the predicted time of a step.

The recipe's own layout is that of a training on so many processes, refused where that would be; what ``parallel:
auto`` and ``sharding: amsp`` stand for is chosen by the memory and the nodes of the cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainwright.cli.output import out, print_json
from trainwright.core.errors import ConfigError
from trainwright.parallel.auto import Machine, choose
from trainwright.parallel.config import Degrees
from trainwright.parallel.mesh import DIMENSIONS
from trainwright.planning.comm_context import rows_of
from trainwright.planning.comm_optimizer import exchanges_of
from trainwright.planning.comm_optimizer import left_out as left_out_of_optimizer
from trainwright.planning.comm_passes import recomputed_layers
from trainwright.planning.comm_plan import Cluster, Prediction, Work, layouts, left_out, predict
from trainwright.train.degrees import check_settled, vocabulary, without_weights
from trainwright.train.degrees import work as auto_work
from trainwright.train.sharding import settled_sharding

DEFAULT_WORLD = 8
_USUAL_VOCABULARY = 32_768  # where no tokenizer says


def comm(
    recipe: Path | None,
    overrides: list[str],
    world: int | None,
    cluster: Path | None,
    lengths: Path | None,
    most: int,
    json: bool,
) -> None:
    """The recipe's own layout first, then the fastest ones. ``world`` None: DEFAULT_WORLD."""
    from trainwright.config import RunConfig

    config = RunConfig.load(recipe, overrides)
    machines = Cluster.load(cluster)
    said = "" if world is not None else ", the default"
    world = world or DEFAULT_WORLD
    try:
        config = _settled(config, world, machines)
        degrees = check_settled(config, world)
    except ConfigError as error:
        few = "" if world == 2 else ", e.g. --world 2"
        hint = f"the plan is for {world} ranks{said}; --world sets how many{few}"
        raise ConfigError(f"{error.message} ({hint})", key=error.key, value=error.value) from None
    work = work_of(config)
    if lengths is not None:
        work = dataclasses.replace(work, lengths=rows_of(_numbers(lengths), work.seq_len, work.rows))
    own = predict(work, degrees, config.parallel, machines)
    left = not_counted(config, work, degrees)
    found = layouts(work, config.parallel, world, machines, most)
    if json:
        print_json({"own": _row(own), "layouts": [_row(p) for p in found], "not_counted": left})
        return
    out().print(_table([("recipe", own), *((f"{i}", p) for i, p in enumerate(found, 1))]))
    if config.parallel.sharding is not None:
        out().print(f"\nSharding over ranks: {config.parallel.sharding.describe()}")
    out().print("\nThe recipe's own layout sends, per rank and step:")
    for t in own.transfers:
        over = "all" if t.over == DIMENSIONS else " x ".join(t.over)
        out().print(f"  {t.kind:<15} {t.bytes / 1e6:>12,.2f} MB in {t.calls:>6,} over {over} ({t.ranks}): {t.what}")
    for one in left:
        out().print(f"Not counted: {one}.")


def _settled(config: Any, world: int, machines: Cluster) -> Any:
    """``config`` with degrees for ``world`` ranks of ``machines``."""
    if config.parallel.sharding is not None or not config.parallel.auto:
        return settled_sharding(config, world, machines)
    machine = Machine(int(machines.memory_gb * 1e9), min(world, machines.ranks_per_node))
    choice = choose(world, config.parallel, auto_work(config), machine)
    chosen = {key: getattr(choice.degrees, key) for key in ("dp_replicate", "dp_shard", "cp", "tp")}
    parallel = config.parallel.model_copy(update=chosen)  # auto still: a setting may be left without a use
    return config.model_copy(update={"parallel": parallel})


def _numbers(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text("utf-8").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} should hold whole numbers between blanks: {error}", key="--lengths") from None


def work_of(config: Any) -> Work:
    """The recipe's step; the model is built without weights. ConfigError for models whose inside is not known."""
    import torch

    from trainwright.core.params import named_params
    from trainwright.optim.muon import iteration_dtype

    find = getattr(config.model, "architecture", None)
    if find is None:
        raise ConfigError("is for our own decoder: model decoder or pretrained", key="model", value=config.model.name)
    arch = find(vocabulary(config) or _USUAL_VOCABULARY)
    model: Any = without_weights(arch, config.transforms)
    train = config.train
    dtype = config.precision.build(torch.device("cpu")).compute_dtype if config.precision.name != "auto" else None
    size = dtype.itemsize if dtype is not None else 2
    # Of GPUs, as all of the plan, unless the recipe is for CPUs.
    narrow = iteration_dtype(torch.device("cpu")) if config.run.device == "cpu" else torch.bfloat16
    return Work(
        arch=arch,
        shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
        seq_len=train.seq_len,
        rows=train.global_batch_rows,
        micro_rows=train.micro_batch_size,
        flops_per_token=model.flops_per_token(train.seq_len),
        activation_bytes=size,
        gathered_bytes=size,
        exits=0 if model.exits is None else len(model.exits),
        exit_settings=None if model.exits is None else model.exits.settings,
        frozen=frozenset(name for name, p in model.named_parameters() if not p.requires_grad),
        recomputed=recomputed_layers(config.memory, arch.n_layers),
        exchanges=exchanges_of(config.optimizer, named_params(model), Work.parameter_bytes, narrow.itemsize),
    )


def not_counted(config: Any, work: Work, degrees: Degrees) -> list[str]:
    """What is sent besides, and why the plan leaves it out."""
    found = [left_out(work, degrees, config.parallel)]
    if degrees.world_size > degrees.pp and (
        degrees.dp_shard > 1 or degrees.tp > 1 or degrees.ep > 1 or config.parallel.sharding
    ):
        found.append(left_out_of_optimizer(config.optimizer))
    sliced = any(t.name == "grass_linear" for t in config.transforms)
    found.append(
        "that grass_linear adds up slices of gradients, fewer bytes than the whole ones given here" if sliced else None
    )
    return [one for one in found if one is not None]


def _name(prediction: Prediction) -> str:
    degrees = prediction.degrees
    used = [f"{d}={getattr(degrees, d)}" for d in (*DIMENSIONS, "ep") if getattr(degrees, d) > 1]
    return " ".join(used) or "one rank"


def _row(p: Prediction) -> dict[str, Any]:
    return {
        "layout": {d: getattr(p.degrees, d) for d in (*DIMENSIONS, "ep")},
        "step_s": p.step_s,
        "compute_s": p.compute_s,
        "exposed_s": p.exposed_s,
        "hidden_s": p.hidden_s,
        "bubble": p.bubble,
        "bytes": p.bytes,
        "bytes_inside_nodes": p.links["inside"],
        "bytes_between_nodes": p.links["between"],
        "state_gb": p.state_gb,
        "note": p.note,
        "transfers": [
            {k: getattr(t, k) for k in ("kind", "over", "ranks", "calls", "bytes", "what")} for t in p.transfers
        ],
    }


def _table(rows: list[tuple[str, Prediction]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("", "layout", "step ms", "computing", "exposed", "bubble", "MB in node", "MB between", "state GB", ""):
        table.add_column(name, justify="left" if name in ("", "layout") else "right")
    for label, p in rows:
        table.add_row(
            label,
            _name(p),
            f"{p.step_s * 1e3:,.1f}",
            f"{p.compute_s * 1e3:,.1f}",
            f"{p.exposed_s * 1e3:,.1f}",
            f"{p.bubble:.0%}",
            f"{p.links['inside'] / 1e6:,.1f}",
            f"{p.links['between'] / 1e6:,.1f}",
            f"{p.state_gb:,.2f}",
            p.note,
        )
    return table
