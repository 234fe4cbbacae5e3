"""Blocks of a Transformer as AdaPM (adapm.py) tells them apart, by the names of parameters."""

from __future__ import annotations

from typing import Literal

Momentum = Literal["full", "low_rank", "none"]
POLICY: dict[str, Momentum] = {
    "embedding": "none", "head": "none", "o": "none", "q": "low_rank", "k": "low_rank", "v": "full", "mlp": "low_rank",
    "expert": "low_rank", "router": "full", "norm": "full", "bias": "full", "scalar": "full", "default": "full",
}  # fmt: skip
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
