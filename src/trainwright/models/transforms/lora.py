"""LoRA: the weights stay as they are, and a product of two thin matrices is learned beside each.

    y = x W^T + b + s (drop(x) A^T) B^T        W [out, in] frozen, A [r, in], B [out, r]
    s = alpha / r, or alpha / sqrt(r) with ``rslora``
    DoRA: y = (x W^T + s (drop(x) A^T) B^T) m / |W + s B A| + b     m [out] learned, norms by row, not differentiated

A starts random (Kaiming uniform, as PEFT's), B at zero and m at the norms of W, so that the model computes at first
what it did. Stacked experts [E, out, in] get an A [E, r, in] and a B [E, out, r], a pair for each expert.

LoRA arXiv:2106.09685, rsLoRA arXiv:2312.03732, DoRA arXiv:2402.09353. Dropout acts on the learned branch alone, as in
the papers; PEFT's DoRA drops out the frozen branch's input too.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from trainwright.core.errors import ConfigError, nearest
from trainwright.core.params import Role
from trainwright.core.registry import MethodConfig, register
from trainwright.models.base import LanguageModel
from trainwright.models.moe import MoE, grouped_linear
from trainwright.models.ops import swiglu

log = logging.getLogger("trainwright")
EXPERTS = ("gate", "up", "down")  # the stacked matrices of our MoE
TINY = 1e-12  # norms below it are not divided by


class LoRALinear(nn.Linear):
    """``linear`` with a low-rank change beside its frozen weight; a drop-in that keeps the names weight and bias.

    linear   nn.Linear, or transformers' Conv1D (``transposed``: its weight is [in, out])
    rank     r, at least 1 and at most the shorter side of the weight (ValueError)
    alpha    s = alpha / rank, or alpha / sqrt(rank) with ``rslora``
    dropout  on what A sees
    dora     learn the norms of the rows apart
    dtype    of what is learned; None: the weight's, but float32 where that has 16 bits
    """

    def __init__(
        self,
        linear: nn.Module,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        *,
        rslora: bool = False,
        dora: bool = False,
        dtype: torch.dtype | None = None,
    ):
        weight, bias = cast(Tensor, linear.weight), cast("Tensor | None", linear.bias)
        self.transposed = not isinstance(linear, nn.Linear)
        in_features, out_features = weight.shape if self.transposed else reversed(weight.shape)
        nn.Module.__init__(self)
        self.in_features, self.out_features = int(in_features), int(out_features)
        _check_rank(rank, min(weight.shape))
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]
        dtype = dtype or (torch.float32 if weight.element_size() < 4 else weight.dtype)
        self.lora_a = nn.Parameter(weight.new_empty(rank, self.in_features, dtype=dtype))
        self.lora_b = nn.Parameter(weight.new_zeros(self.out_features, rank, dtype=dtype))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scale, self.dropout = alpha / (math.sqrt(rank) if rslora else rank), dropout
        norms = torch.linalg.vector_norm(self._rows().to(dtype), dim=1)
        self.lora_magnitude = nn.Parameter(norms) if dora else None
        self.active = True
        self._unmerged: Tensor | None = None
        self.train(linear.training)

    def _rows(self) -> Tensor:
        """The weight as [out, in]."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self._unmerged is not None or not self.active:
            return F.linear(x, self._rows(), self.bias)
        if self.lora_magnitude is None:
            y = F.linear(x, self._rows(), self.bias)
            return y + self._change(x).to(y.dtype)
        y = F.linear(x, self._rows())
        with torch.no_grad():
            norms = torch.linalg.vector_norm(self._direction(), dim=1).clamp(min=TINY)
        y = (y + self._change(x).to(y.dtype)) * (self.lora_magnitude / norms).to(y.dtype)
        return y if self.bias is None else y + self.bias

    def _change(self, x: Tensor) -> Tensor:
        x = F.dropout(x.to(self.lora_a.dtype), self.dropout, self.training)
        return self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    def _direction(self) -> Tensor:
        return self._rows().to(self.lora_a.dtype) + self.scale * self.lora_b @ self.lora_a

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """W with what was learned, laid out as the weight is. Computed in float32 at least; ``dtype`` (W's) casts."""
        base = self.weight if self._unmerged is None else self._unmerged
        wide = torch.promote_types(torch.float32, base.dtype)
        rows = (base.t() if self.transposed else base).to(wide)
        rows = rows + self.scale * self.lora_b.to(wide) @ self.lora_a.to(wide)
        if self.lora_magnitude is not None:
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=TINY)
            rows = rows * (self.lora_magnitude.to(wide)[:, None] / norms)
        return (rows.t() if self.transposed else rows).to(dtype or base.dtype).contiguous()

    @torch.no_grad()
    def merge(self) -> None:
        """Compute with one weight; the frozen one is kept beside it. Training now is an error of the caller's."""
        if self._unmerged is None:
            merged = self.merged_weight()
            self._unmerged, self.weight.data = self.weight.data, merged

    def unmerge(self) -> None:
        """Back to the frozen weight, bit by bit."""
        if self._unmerged is not None:
            self.weight.data, self._unmerged = self._unmerged, None

    def plain(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A layer of the original kind with the merged weight."""
        layer: Any
        with torch.device("meta"):
            if self.transposed:
                from transformers.pytorch_utils import Conv1D

                layer = Conv1D(self.out_features, self.in_features)
            else:
                layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = nn.Parameter(self.merged_weight(dtype))
        layer.bias = None if self.bias is None else nn.Parameter(self.bias.detach().to(dtype or self.bias.dtype))
        return layer.train(self.training)

    def extra_repr(self) -> str:
        dora = "" if self.lora_magnitude is None else ", dora"
        return f"{super().extra_repr()}, rank={self.lora_a.shape[0]}, scale={self.scale:g}{dora}"


class LoRAMoE(MoE):
    """Our MoE with a low-rank change beside some of its stacked matrices [E, out, in]; the router stays as it is."""

    def __init__(
        self,
        moe: MoE,
        names: tuple[str, ...],
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        *,
        rslora: bool = False,
        dtype: torch.dtype | None = None,
    ):
        nn.Module.__init__(self)
        self.__dict__.update({k: v for k, v in moe.__dict__.items() if k not in self.__dict__})
        self._parameters, self._buffers, self._modules = dict(moe._parameters), dict(moe._buffers), dict(moe._modules)
        self._non_persistent_buffers_set = set(moe._non_persistent_buffers_set)
        self.adapted, self.scale, self.dropout = names, alpha / (math.sqrt(rank) if rslora else rank), dropout
        self.active = True
        self._unmerged: dict[str, Tensor] = {}
        for name in names:
            weight = cast(Tensor, getattr(moe, name))  # [E, out, in]
            _check_rank(rank, min(weight.shape[1:]))
            kind = dtype or (torch.float32 if weight.element_size() < 4 else weight.dtype)
            a = nn.Parameter(weight.new_empty(weight.shape[0], rank, weight.shape[2], dtype=kind))
            nn.init.uniform_(a, -1 / math.sqrt(weight.shape[2]), 1 / math.sqrt(weight.shape[2]))
            b = nn.Parameter(weight.new_zeros(weight.shape[0], weight.shape[1], rank, dtype=kind))
            self.register_parameter(f"{name}_lora_a", a)
            self.register_parameter(f"{name}_lora_b", b)
        self.train(moe.training)

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        device = rows.device.type
        if torch.is_autocast_enabled(device):
            rows = rows.to(torch.get_autocast_dtype(device))
        hidden = swiglu(self._product(rows, "gate", counts), self._product(rows, "up", counts))
        return self._product(hidden, "down", counts)

    def _product(self, x: Tensor, name: str, counts: Tensor) -> Tensor:
        y = _grouped(x, cast(Tensor, getattr(self, name)), counts)
        if name not in self.adapted or self._unmerged or not self.active:
            return y
        a, b = self._pair(name)
        change = _grouped(_grouped(F.dropout(x, self.dropout, self.training), a, counts), b, counts)
        return y + self.scale * change

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return cast(Tensor, getattr(self, f"{name}_lora_a")), cast(Tensor, getattr(self, f"{name}_lora_b"))

    @torch.no_grad()
    def merged(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The matrices [E, out, in] of ``name`` with what was learned."""
        base = self._unmerged.get(name, cast(Tensor, getattr(self, name)))
        wide = torch.promote_types(torch.float32, base.dtype)
        a, b = self._pair(name)
        return torch.baddbmm(base.to(wide), b.to(wide), a.to(wide), alpha=self.scale).to(dtype or base.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        if not self._unmerged:
            for name in self.adapted:
                weight, merged = cast(Tensor, getattr(self, name)), self.merged(name)
                self._unmerged[name], weight.data = weight.data, merged

    def unmerge(self) -> None:
        for name, weight in self._unmerged.items():
            cast(Tensor, getattr(self, name)).data = weight
        self._unmerged = {}

    def plain(self, dtype: torch.dtype | None = None) -> MoE:
        """The same without adapters."""
        moe = MoE.__new__(MoE)
        nn.Module.__init__(moe)
        skip = {"adapted", "scale", "dropout", "active", "_unmerged", "_parameters", "_buffers", "_modules"}
        moe.__dict__.update({k: v for k, v in self.__dict__.items() if k not in skip})
        moe._buffers, moe._modules = dict(self._buffers), dict(self._modules)
        moe._parameters = {}
        for name in EXPERTS:
            weight = self.merged(name, dtype) if name in self.adapted else cast(Tensor, getattr(self, name)).detach()
            moe._parameters[name] = nn.Parameter(weight)
        return moe


def _grouped(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """Products expert by expert, in the type of ``x``; as MoE's own."""
    if x.device.type == "cuda" and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, w.to(x.dtype).transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    return grouped_linear(x, w.to(x.dtype), counts)


def _check_rank(rank: int, side: int) -> None:
    if not 1 <= rank <= side:
        raise ValueError(f"rank={rank} should be between 1 and the shorter side ({side}) of the weight")


# -- a whole model ----------------------------------------------------------------------------------------------------


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear | LoRAMoE]]:
    """Adapted modules with their names."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear | LoRAMoE):
            yield name, module


def merge_adapters(model: nn.Module) -> None:
    """Compute with merged weights, the frozen ones kept beside them; :func:`unmerge_adapters` takes it back."""
    for _, module in adapters(model):
        module.merge()


def unmerge_adapters(model: nn.Module) -> None:
    for _, module in adapters(model):
        module.unmerge()


def remove_adapters(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Put plain layers with merged weights in place of adapted ones, in ``model`` itself, which is returned.

    ``dtype`` casts the whole model; what was learned is added in float32 at least.
    """
    for name, module in list(adapters(model)):
        _put(model, name, module.plain(dtype))
    model.requires_grad_(True)
    return model if dtype is None else model.to(dtype)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside it the model computes as it did before it was trained (but for what ``also_train`` named)."""
    for _, module in adapters(model):
        module.active = False
    try:
        yield
    finally:
        for _, module in adapters(model):
            module.active = True


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


@register("transform", "lora", paper="arXiv:2106.09685")
class LoraConfig(MethodConfig):
    """LoRA adapters on the hidden matrices, all else frozen; rsLoRA's scale and DoRA's magnitudes on request."""

    rank: PositiveInt = Field(8, description="Rank of the change that is learned.")
    alpha: PositiveFloat = Field(16.0, description="The change is scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on what the adapters see.")
    targets: list[str] = Field(
        ["matrix", "expert"],
        description="What gets adapters: roles (matrix: every hidden matrix; expert: stacked experts) or regular "
        "expressions that match the end of a module's name, such as q, attn.(q|v) or blocks.[01].mlp.down.",
    )
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank), which keeps high ranks learning.")
    dora: bool = Field(False, description="Learn the norms of the rows of each matrix apart (not of experts).")
    also_train: list[str] = Field(
        [], description="Regular expressions for the ends of names of parameters to train in full, e.g. embed.weight."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type of what is learned; auto: that of the weights, float32 for 16-bit ones."
    )

    def apply(self, model: LanguageModel) -> LanguageModel:
        """Freeze ``model`` and put adapters into it. Raises ConfigError for targets that match nothing or cannot be
        adapted, and for a rank above a matrix's shorter side."""
        found = self._find(model)
        trained = self._find_parameters(model)
        model.requires_grad_(False)
        settings: dict[str, Any] = {
            "rslora": self.rslora,
            "dtype": None if self.dtype == "auto" else getattr(torch, self.dtype),
        }
        for name, parts in found.items():
            module = model.get_submodule(name)
            try:
                if parts:
                    experts = LoRAMoE(cast(MoE, module), parts, self.rank, self.alpha, self.dropout, **settings)
                    _put(model, name, experts)
                else:
                    _put(
                        model, name, LoRALinear(module, self.rank, self.alpha, self.dropout, dora=self.dora, **settings)
                    )
            except ValueError as error:
                raise ConfigError(f"transforms.lora on {name}: {error}", key="rank", value=self.rank) from None
        for param in trained:
            param.requires_grad_(True)
        return model

    def _find(self, model: LanguageModel) -> dict[str, tuple[str, ...]]:
        """Names of modules to adapt -> of a MoE its stacked matrices, else ()."""
        names = model.param_roles()
        # By the parameter itself: a tied head has the role of the embedding, under another name.
        roles = {id(p): names[n] for n, p in model.named_parameters() if n in names}
        candidates: dict[str, tuple[str, str, Role]] = {}  # full name -> module, matrix within, role
        for name, module in model.named_modules():
            if isinstance(module, MoE):
                for part in EXPERTS:
                    candidates[f"{name}.{part}"] = (name, part, "expert")
            elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                candidates[name] = (name, "", roles.get(id(module.weight), "matrix"))
        found: dict[str, tuple[str, ...]] = {}
        for target in self.targets:
            if target in ("matrix", "expert"):
                chosen = [c for c in candidates.values() if c[2] == target]
                if target == "expert" and not chosen and "expert" in names.values():
                    log.warning(
                        "lora: the experts of this model are stacked in a way that is not adapted here; they stay as "
                        "they are (model pretrained adapts those of Mixtral and Qwen3-MoE)"
                    )
            else:
                ends = _ending(target, "targets")
                matched = [n for n in candidates if ends.search(n)]
                if not matched:
                    raise ConfigError(
                        f"{target!r} matches the end of no linear module's name; "
                        f"{nearest(target, {n.rsplit('.', 1)[-1] for n in candidates})}",
                        key="targets",
                        value=self.targets,
                    )
                chosen = [candidates[n] for n in matched]
            for name, part, role in chosen:
                if role in ("head", "embedding"):
                    raise ConfigError(
                        f"{target!r} matches {name}, which the loss reads as a plain matrix; train it in full by "
                        f"also_train: [{name}.weight]",
                        key="targets",
                        value=self.targets,
                    )
                parts = found.get(name, ())
                found[name] = parts if not part or part in parts else (*parts, part)
        if self.dora and any(found.values()):
            raise ConfigError("is not made for stacked experts; set targets without expert", key="dora", value=True)
        if not found:
            raise ConfigError("name no matrix that could be adapted", key="targets", value=self.targets)
        return found

    def _find_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        out: list[nn.Parameter] = []
        for pattern in self.also_train:
            ends = _ending(pattern, "also_train")
            matched = [p for n, p in model.named_parameters() if ends.search(n)]
            if not matched:
                names = {n for n, _ in model.named_parameters()}
                raise ConfigError(
                    f"{pattern!r} matches the end of no parameter's name; {nearest(pattern, names)}",
                    key="also_train",
                    value=self.also_train,
                )
            out += matched
        return out


def _ending(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(?:^|\.)(?:{pattern})$")
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression: {error}", key=key) from None
