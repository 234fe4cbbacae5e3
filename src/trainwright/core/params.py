"""Named parameters with roles: what an optimizer is built from."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

log = logging.getLogger("trainwright")

# matrix = hidden weight matrix [out, in]; expert = stacked expert matrices [E, out, in].
Role = Literal["embedding", "head", "norm", "bias", "matrix", "expert", "router", "scalar"]


@dataclass(frozen=True)
class NamedParam:
    """One trainable parameter. A tied weight appears once, under its first name."""

    name: str
    param: nn.Parameter
    role: Role
    # Rows (dim -2) of each matrix that was fused into this one, e.g. q, k and v; negative: columns (dim -1).
    # Empty: it is one matrix.
    splits: tuple[int, ...] = ()


def named_params(model: nn.Module) -> list[NamedParam]:
    """Trainable parameters of ``model`` with roles, each storage once.

    Models may define ``param_roles() -> dict[name, Role]``; otherwise roles come from module types and shapes,
    which covers transformers models, their fused matrices included.
    """
    roles: dict[str, Role] = model.param_roles() if hasattr(model, "param_roles") else guess_roles(model)  # type: ignore[operator]
    splits = fused_splits(model)
    return [NamedParam(n, p, roles[n], splits.get(n, ())) for n, p in model.named_parameters() if p.requires_grad]


def fused_splits(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Sizes of the matrices that transformers models keep in one parameter: q, k, v and gate, up.

    By the names that transformers gives them. Families that interleave q, k and v head by head (GPT-NeoX, BLOOM) are
    left as they are, with a warning: no cut takes them apart.
    """
    config = getattr(model, "config", None)
    found: dict[str, tuple[int, ...]] = {}
    interleaved = []
    for name, param in model.named_parameters():
        owner = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if param.ndim < 2:
            continue
        if owner in ("qkv_proj", "Wqkv", "in_proj_weight"):
            found[name] = _query_key_value(config, param.shape[-2])
        elif owner == "c_attn":  # GPT-2 keeps its matrices transposed
            found[name] = tuple(-n for n in _query_key_value(config, param.shape[-1]))
        elif owner == "gate_up_proj":  # experts [E, 2 F, D]; in Llama 4 [E, D, 2 F]
            transposed = param.shape[-2] == getattr(config, "hidden_size", None) != param.shape[-1]
            found[name] = (-(param.shape[-1] // 2),) * 2 if transposed else (param.shape[-2] // 2,) * 2
        elif owner == "query_key_value":
            interleaved.append(name)
    if interleaved:
        log.warning(
            "%s and %d more hold q, k and v interleaved by head; matrix methods take each as one matrix",
            interleaved[0],
            len(interleaved) - 1,
        )
    return found


def _query_key_value(config: Any, length: int) -> tuple[int, ...]:
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads and groups and length % (heads + 2 * groups) == 0:
        head = length // (heads + 2 * groups)
        return (heads * head, groups * head, groups * head)
    return (length // 3,) * 3 if length % 3 == 0 else ()


def guess_roles(model: nn.Module) -> dict[str, Role]:
    """Roles from module types: nn.Embedding -> embedding, the output embedding -> head, 1-D -> norm or bias."""
    head = None
    if hasattr(model, "get_output_embeddings"):
        out = model.get_output_embeddings()  # type: ignore[operator]
        head = getattr(out, "weight", None)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    roles: dict[str, Role] = {}
    for name, param in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if id(param) in embeddings:
            roles[name] = "embedding"
        elif param is head:
            roles[name] = "head"
        elif param.ndim == 0:
            roles[name] = "scalar"
        elif param.ndim == 1:
            roles[name] = "bias" if leaf == "bias" or leaf.endswith("_bias") else "norm"
        elif param.ndim >= 3:
            roles[name] = "expert"
        else:
            roles[name] = "matrix"
    return roles
