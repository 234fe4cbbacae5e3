"""Named parameters with roles: what an optimizer is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

# matrix = hidden weight matrix [out, in]; expert = stacked expert matrices [E, out, in].
Role = Literal["embedding", "head", "norm", "bias", "matrix", "expert", "router", "scalar"]


@dataclass(frozen=True)
class NamedParam:
    """One trainable parameter. A tied weight appears once, under its first name."""

    name: str
    param: nn.Parameter
    role: Role
    # Rows (dim -2) of each matrix that was fused into this one, e.g. q, k and v; empty: it is one matrix.
    splits: tuple[int, ...] = ()


def named_params(model: nn.Module) -> list[NamedParam]:
    """Trainable parameters of ``model`` with roles, each storage once.

    Models may define ``param_roles() -> dict[name, Role]``; otherwise roles come from module types and shapes,
    which covers transformers models.
    """
    roles: dict[str, Role] = model.param_roles() if hasattr(model, "param_roles") else guess_roles(model)  # type: ignore[operator]
    return [NamedParam(n, p, roles[n]) for n, p in model.named_parameters() if p.requires_grad]


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
