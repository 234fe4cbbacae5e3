"""Blocks of a Transformer as AdaPM (adapm.py) tells them apart, by the names of parameters; what their momenta cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.optim.low_rank_parts import Part, parts_of

log = logging.getLogger("trainwright")
Momentum = Literal["full", "low_rank", "none"]
POLICY: dict[str, Momentum] = {
    "embedding": "none", "head": "none", "o": "none", "q": "low_rank", "k": "low_rank", "v": "full", "mlp": "low_rank",
    "expert": "low_rank", "router": "full", "norm": "full", "bias": "full", "scalar": "full", "default": "full",
}  # fmt: skip
PROBED = ("q", "k", "v", "o", "mlp", "qkv", "expert", "default")  # what roles=probe decides on
BLOCK_NAMES = {
    "q": "q q_proj query wq to_q q_lin q_a_proj q_b_proj",
    "k": "k k_proj key wk to_k k_lin",
    "v": "v v_proj value wv to_v v_lin",
    "o": "o o_proj wo to_out out_lin",
    "mlp": "gate up down gate_proj up_proj down_proj gate_up_proj c_fc fc1 fc2 fc_in fc_out w1 w2 w3 wi wi_0 wi_1 "
    "lin1 lin2 dense_h_to_4h dense_4h_to_h",
    "qkv": "c_attn qkv qkv_proj query_key_value Wqkv in_proj_weight kv_proj kv_a_proj_with_mqa kv_b_proj",
}
_BLOCK_OF = {name: block for block, names in BLOCK_NAMES.items() for name in names.split()}
# Names that are the attention's output or the MLP's, by what they are in.
_BY_PARENT = ("c_proj", "dense", "out_proj", "proj")


def block_of(name: str, role: str) -> str:
    """The block of a parameter: a key of POLICY, "qkv" for q, k and v in one matrix, "default" for names unknown."""
    if role != "matrix":
        return role
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        if parts[i] in _BLOCK_OF:
            return _BLOCK_OF[parts[i]]
        if parts[i] in _BY_PARENT:
            path = ".".join(parts[:i])
            if "attn" in path or "attention" in path:
                return "o"
            if any(word in path for word in ("mlp", "ffn", "feed_forward", "intermediate", "output")):
                return "mlp"
    return "default"


def is_pattern(key: str) -> bool:
    """Whether a key of a policy is a pattern of parameter names, not a block."""
    return "." in key or "*" in key


def momentum_parts(param: Tensor, rank: int | float, splits: Sequence[int] = ()) -> list[Part]:
    """The matrices of a parameter; their projected side is m above. ValueError for a rank above it."""
    found = parts_of(param, rank, splits)
    if isinstance(rank, int):
        return found
    return [replace(part, rank=max(1, math.ceil(rank * min(part.shape[-2:]) - 1e-9))) for part in found]


def momentum_numel(n: NamedParam, momentum: Momentum, rank: int | float) -> int:
    """Numbers that the momentum of a parameter takes."""
    return held_numel(n.param, momentum, rank, n.splits)


def held_numel(param: Tensor, momentum: Momentum, rank: int | float, splits: Sequence[int] = ()) -> int:
    if momentum != "low_rank":
        return param.numel() if momentum == "full" else 0
    parts = momentum_parts(param, rank, splits)
    return sum(part.projection_shape.numel() + part.reduced_shape.numel() for part in parts)


def report(blocks: dict[str, list[NamedParam]], policy: dict[str, Momentum], rank: int | float) -> None:
    """Logs what each block got, in share of AdamW's momentum."""
    for block, members in blocks.items():
        full = sum(n.param.numel() for n in members)
        kept = sum(momentum_numel(n, policy[block], rank) for n in members)
        log.info(
            "adapm: %s: %s momentum for %d parameters (%s%s), %.1f %% of AdamW's",
            block, policy[block], len(members), ", ".join(n.name for n in members[:3]),
            ", ..." if len(members) > 3 else "", 100 * kept / max(full, 1),
        )  # fmt: skip
    hidden = [n for members in blocks.values() for n in members if n.role == "matrix"]
    if hidden and all(n.role != "matrix" or block == "default" for block, ns in blocks.items() for n in ns):
        log.warning(
            "adapm knows none of the %d hidden matrices by name (%s, ...), all get %s momentum; "
            "name them in policy, e.g. policy: {'*.some_name.*': low_rank}, or set roles: probe",
            len(hidden), hidden[0].name, policy["default"],
        )  # fmt: skip
