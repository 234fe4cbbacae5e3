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
from trainwright.parallel.mesh import DIMENSIONS
from trainwright.planning.comm_context import rows_of
from trainwright.planning.comm_plan import Cluster, Prediction, Work, layouts, predict
from trainwright.train.degrees import check
from trainwright.train.degrees import work as auto_work
from trainwright.train.sharding import settled_sharding


def comm(
    recipe: Path | None,
    overrides: list[str],
    world: int,
    cluster: Path | None,
    lengths: Path | None,
    most: int,
    json: bool,
) -> None:
    """The recipe's own layout first, then the fastest ones."""
    from trainwright.config import RunConfig

    config = RunConfig.load(recipe, overrides)
    machines = Cluster.load(cluster)
    config = _settled(config, world, machines)
    degrees = check(config, world)
    work = work_of(config)
    if lengths is not None:
        work = dataclasses.replace(work, lengths=rows_of(_numbers(lengths), work.seq_len, work.rows))
    own = predict(work, degrees, config.parallel, machines)
    found = layouts(work, config.parallel, world, machines, most)
    if json:
        print_json({"own": _row(own), "layouts": [_row(p) for p in found]})
        return
    out().print(_table([("recipe", own), *((f"{i}", p) for i, p in enumerate(found, 1))]))
    if config.parallel.sharding is not None:
        out().print(f"\nSharding over ranks: {config.parallel.sharding.describe()}")
    out().print("\nThe recipe's own layout sends, per rank and step:")
    for t in own.transfers:
        over = "all" if t.over == DIMENSIONS else " x ".join(t.over)
        out().print(f"  {t.kind:<15} {t.bytes / 1e6:>12,.2f} MB in {t.calls:>6,} over {over} ({t.ranks}): {t.what}")


def _settled(config: Any, world: int, machines: Cluster) -> Any:
    """``config`` with degrees for ``world`` ranks of ``machines``."""
    if config.parallel.sharding is not None or not config.parallel.auto:
        return settled_sharding(config, world, machines)
    machine = Machine(int(machines.memory_gb * 1e9), min(world, machines.ranks_per_node))
    choice = choose(world, config.parallel, auto_work(config), machine)
    chosen = {key: getattr(choice.degrees, key) for key in ("dp_replicate", "dp_shard", "cp", "tp")}
    parallel = config.parallel.model_copy(update={**chosen, "auto": False})
    return config.model_copy(update={"parallel": parallel})


def _numbers(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text("utf-8").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} should hold whole numbers between blanks: {error}", key="--lengths") from None


def work_of(config: Any) -> Work:
    """The recipe's step; the model is built without weights. ConfigError for models whose inside is not known."""
    import torch

    from trainwright.models.decoder import Decoder

    find = getattr(config.model, "architecture", None)
    if find is None:
        raise ConfigError("is for our own decoder: model decoder or pretrained", key="model", value=config.model.name)
    arch = find(getattr(config.model, "vocab_size", None) or _vocabulary(config))
    with torch.device("meta"):
        model = Decoder(arch)
    for transform in (t for t in config.transforms if t.name == "early_exit"):
        transform.apply(model)
    train = config.train
    dtype = config.precision.build(torch.device("cpu")).compute_dtype if config.precision.name != "auto" else None
    size = dtype.itemsize if dtype is not None else 2
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
    )


def _vocabulary(config: Any) -> int:
    """Ids of the recipe's tokenizer, where it says; else those of a usual one."""
    spec = config.tokenizer
    if spec is not None and spec.name == "bytes":
        return 257
    return int(getattr(spec, "vocab_size", None) or 32_768)


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
