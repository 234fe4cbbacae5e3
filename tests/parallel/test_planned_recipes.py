"""``trainwright plan comm`` of a recipe against what a trainer of it sends, to the byte: where activations are
recomputed, of adapters and frozen weights, and of optimizers that need whole matrices. Layouts by themselves are in
test_data_parallel.py.
"""

import json

import pytest
import torch
from rank_processes import run_ranks

pytestmark = pytest.mark.timeout(900)

FULL = {"memory": ["activation_checkpointing"]}
SELECTIVE, SECOND = (
    {"memory": [{"name": "activation_checkpointing", "mode": mode}]} for mode in ("selective", "every_n")
)
MIXTURE = {"model.family": "mixtral", "model.n_experts": 4, "model.moe_ffn_dim": 16}


def lora(*targets, **more):
    return {"transforms": [{"name": "lora", "rank": 2, **({"targets": list(targets)} if targets else {}), **more}]}


def frozen(*after, **more):
    return {"transforms": [{"name": "early_exit", "after": list(after), "freeze": True, **more}]}


def by(optimizer, **settings):
    return {"optimizer": {"name": optimizer, **settings}}


ODD = {"model.dim": 22, "model.head_dim": 6, "model.ffn_dim": 33, "model.n_layers": 3}
MUON, UPPER = by("muon"), r"blocks.[23].attn.(q|v)"
AMSP = {"sharding": {"name": "amsp", "parameters": 1, "gradients": 2, "states": 2}}
INTERLEAVED, IN_A_V = (
    {"pp": 2, "pipeline": {"schedule": schedule, "stages_per_rank": 2}} for schedule in ("interleaved", "zero_bubble")
)
FLASHCP, BYTESCALE = {"name": "flashcp", "min_chunk": 1}, {"name": "bytescale", "capacity": 16}
TWO = {
    "tp full": ({"tp": 2}, {"model.family": "qwen3", **FULL}),
    "tp selective": ({"tp": 2}, SELECTIVE),
    "tp every second, dropout": ({"tp": 2}, {"model.dropout": 0.1, **SECOND}),
    "tp stream whole": ({"tp": 2, "sequence_parallel": False}, FULL),
    "tp stream whole, dropout": ({"tp": 2, "sequence_parallel": False}, {"model.dropout": 0.1, **FULL}),
    "domino": ({"tp": 2, "tensor": {"name": "domino", "row": 2}}, {"model.dropout": 0.1, **FULL}),
    "tp experts": ({"tp": 2}, {**MIXTURE, **FULL}),
    "ring": ({"cp": 2}, FULL),
    "ring every second": ({"cp": 2}, SECOND),
    "ulysses": ({"cp": 2, "context": "ulysses"}, FULL),
    "flashcp": ({"cp": 2, "context": FLASHCP}, FULL),
    "flashcp, keys again": ({"cp": 2, "context": {**FLASHCP, "keep_keys": False}}, FULL),
    "bytescale": ({"cp": 2, "context": BYTESCALE}, FULL),
    "flexsp": ({"cp": 2, "context": {"name": "flexsp", "overhead": 0, "tokens_per_rank": 20}}, FULL),
    "basp": ({"cp": 2, "context": "basp"}, {**FULL, "train.micro_batch_size": 3}),
    "ring, experts": ({"cp": 2}, {**MIXTURE, **FULL}),
    "ep": ({"dp_shard": 2, "ep": 2}, {**MIXTURE, **FULL}),
    "shard full": ({"dp_shard": 2}, FULL),
    "interleaved": (INTERLEAVED, FULL),
    "amsp": (AMSP, FULL),
    "ddp lora": ({"dp_replicate": 2}, lora()),
    "shard lora": ({"dp_shard": 2}, lora()),
    "shard lora above": ({"dp_shard": 2}, lora(UPPER)),
    "shard lora, dora, norm": ({"dp_shard": 2}, lora(dora=True, also_train=["norm.weight"])),
    "shard lora, embed": ({"dp_shard": 2}, lora(UPPER, also_train=["embed.weight"])),
    "ring lora": ({"cp": 2}, lora()),
    "ring lora above, full": ({"cp": 2}, {**lora(UPPER), **FULL}),
    "ring lora behind": ({"cp": 2}, lora("blocks.1.mlp.up")),
    "ulysses lora q, v": ({"cp": 2, "context": "ulysses"}, lora("attn.(q|v)")),
    "ulysses lora o": ({"cp": 2, "context": "ulysses"}, {**lora("attn.o"), **SECOND}),
    "flashcp lora above": ({"cp": 2, "context": FLASHCP}, lora(UPPER)),
    "pp lora": ({"pp": 2}, lora()),
    "amsp lora": (AMSP, lora()),
    "ep lora": ({"dp_shard": 2, "ep": 2}, {**MIXTURE, **lora("attn.(q|v)")}),
    "shard lora, experts": ({"dp_shard": 2}, {**MIXTURE, **lora()}),
    "tp exits": ({"tp": 2}, frozen(1, 2, mlp=True)),
    "tp exits, stream whole": ({"tp": 2, "sequence_parallel": False}, {**frozen(1, 2), **FULL}),
    "shard exits": ({"dp_shard": 2}, frozen(1, 2)),
    "pp exits": ({"pp": 2}, frozen(1, 2)),
    "shard muon": ({"dp_shard": 2}, MUON),
    "shard muon odd": ({"dp_shard": 2}, {**ODD, **MUON}),
    "shard muon lora": ({"dp_shard": 2}, {**MUON, **lora()}),
    "tp muon": ({"tp": 2}, MUON),
    "pp muon": ({"pp": 2}, MUON),
    "ddp muon": ({"dp_replicate": 2}, MUON),
    "ep muon": ({"dp_shard": 2, "ep": 2}, {**MIXTURE, **MUON}),
    "amsp muon": (AMSP, MUON),
    "shard muon exits": ({"dp_shard": 2}, {**MUON, **frozen(1, mlp=True)}),
    "shard swan": ({"dp_shard": 2}, by("swan")),
    "tp numuon": ({"tp": 2}, by("numuon", schedule="fixed")),
    "shard sinkgd": ({"dp_shard": 2}, by("sinkgd", norms=["row", "spectral"])),
}
BY_NUMBER = ("adamw8bit", "lion", "sgd", "signum", "spam", "schedule_free")
GOES_WITH = {"spam": {"clip": "none"}, "schedule_free": {"schedule": {"name": "constant"}}}
TWO |= {f"shard {name}": ({"dp_shard": 2}, by(name) | GOES_WITH.get(name, {})) for name in BY_NUMBER}
FOUR = {
    "pp tp full": ({"pp": 2, "tp": 2}, FULL),
    "tp ring selective": ({"cp": 2, "tp": 2}, SELECTIVE),
    "usp full": ({"cp": 4, "context": {"name": "usp", "ulysses": 2}}, FULL),
    "pp ring lora": ({"pp": 2, "cp": 2}, {**lora(), **FULL}),
    "usp lora": ({"cp": 4, "context": {"name": "usp", "ulysses": 2}}, lora("attn.(k|v)")),
    "hsdp lora": ({"dp_replicate": 2, "dp_shard": 2}, lora(UPPER)),
    "pp shard lora": ({"pp": 2, "dp_shard": 2}, lora()),
    "pp tp exits": ({"pp": 2, "tp": 2}, frozen(1, 2)),
    "hsdp muon": ({"dp_replicate": 2, "dp_shard": 2}, MUON),
    "shard muon odd": ({"dp_shard": 4}, {**ODD, **MUON}),
    "tp shard muon": ({"tp": 2, "dp_shard": 2}, MUON),
    "tp replicate muon": ({"tp": 2, "dp_replicate": 2}, MUON),
    "pp shard muon": ({"pp": 2, "dp_shard": 2}, {**MUON, "model.n_layers": 5}),
    "interleaved shard muon": ({**INTERLEAVED, "dp_shard": 2}, {**MUON, "model.n_layers": 5}),
    "ep muon": ({"dp_shard": 4, "ep": 2}, {**MIXTURE, "model.n_experts": 2, **MUON}),
    "amsp muon": ({"sharding": {"name": "amsp", "parameters": 1, "gradients": 2, "states": 4}}, MUON),
}
CELLS = {2: TWO, 4: FOUR}
# What is routed to experts is taken to be even, and documents are not shared out evenly: the mean over ranks then.
MEANS = {"ep": {"all_to_all": 0.4}, "flashcp": {"send": 0}, "bytescale": {"send": 0}, "flexsp": {"all_to_all": 0}}


def spec(recipe, name, parallel, settings):
    small = {"model.dim": 16, "model.ffn_dim": 32, "model.n_layers": 4, "model.n_heads": 4, "model.n_kv_heads": 2}
    sizes = {
        "train.global_batch_tokens": 192,
        "train.micro_batch_size": 2,
        "train.steps": 2,
        "evaluate": {"tokens": 64},
    }
    return recipe(
        **{"run.name": name.replace(" ", "-").replace(",", ""), **small, **sizes, **settings}, parallel=parallel
    )


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """``results(world, recipe)``: by cell, what each rank recorded and planned."""
    folder = tmp_path_factory.mktemp("planned")

    def of(world, recipe):
        """Each world is started once, also where it fails."""
        recipes, out = folder / f"{world}.json", folder / f"{world}"
        if not recipes.exists():
            recipes.write_text(json.dumps({name: spec(recipe, name, *cell) for name, cell in CELLS[world].items()}))
            run_ranks("planned_worker.py", recipes, out, world=world, timeout=800)
        if not out.exists():
            pytest.fail(f"the {world} ranks failed; see the first test that started them")
        return torch.load(out)

    return of


@pytest.mark.parametrize("world, name", [(world, name) for world, cells in CELLS.items() for name in cells])
def test_planned_bytes_are_the_recorded_ones(results, recipe, world, name):
    ranks = results(world, recipe)[name]
    assert ranks[0]["not_counted"] == []
    recorded, planned = [one["passes"][0] for one in ranks], dict(ranks[0]["passes"][1])
    stages = sorted({one["stage"] for one in ranks})
    kinds = {kind for one in recorded for kind in one}
    # Of the rank with the largest shards, the mean over the stages of a pipeline.
    sent = {
        k: sum(max(one["passes"][0].get(k, 0) for one in ranks if one["stage"] == s) for s in stages) / len(stages)
        for k in kinds
    }
    for kind, within in next((means for key, means in MEANS.items() if name.startswith(key)), {}).items():
        mean = sum(one.get(kind, 0) for one in recorded) / world
        assert mean > 0 and mean == pytest.approx(planned.pop(kind), rel=within, abs=1)
        sent.pop(kind)
    if name.startswith("flexsp"):
        sent.pop("broadcast")  # of the plan itself
    assert sent == (planned if len(stages) == 1 else pytest.approx(planned, rel=0, abs=2))

    stepped, planned = [one["optimizer"][0] for one in ranks], ranks[0]["optimizer"][1]
    assert {k: sum(one.get(k, 0) for one in stepped) / world for k in set().union(*stepped)} == pytest.approx(
        planned, rel=0, abs=2
    )
    sharded = any(key in name for key in ("muon", "swan", "sinkgd"))
    assert bool(planned) == (sharded and name not in ("ddp muon", "pp muon"))
