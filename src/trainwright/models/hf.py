"""``model: {name: hf, path: FOLDER}``: any causal language model that transformers loads, behind our interface.

transformers has no common way to say where the head is, what happens to the logits after it, or how documents in a row
are kept apart. So each is tried on random ids when the model is built, and used only where the numbers agree: the head
(hidden states through the output embedding, its scale and soft cap, must give the model's own logits), and the packing
(logits of a packed row must equal those of its documents alone).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from trainwright.core.errors import ModelError
from trainwright.core.params import Role, guess_roles
from trainwright.core.registry import register
from trainwright.models.attention import document_mask, document_starts
from trainwright.models.base import Head, Hidden, LanguageModel, ModelConfig
from trainwright.models.cache import PAD_DOCUMENT
from trainwright.models.decoder import head_logits
from trainwright.models.flops import frozen_correction
from trainwright.models.hf_io import read_json
from trainwright.models.pretrained import check_fit

Packing = Literal["mask", "positions", "none"]


class HFCache:
    """transformers' own key-value cache, with the padding of each row beside it."""

    def __init__(self, cache: Any):
        self.cache = cache
        self.real: Tensor | None = None  # [B, S] int64; 0 = padding

    def extend(self, tokens: Tensor, doc_ids: Tensor | None) -> Tensor:
        real = torch.ones_like(tokens) if doc_ids is None else (doc_ids != PAD_DOCUMENT).to(tokens.dtype)
        self.real = real if self.real is None else torch.cat((self.real, real), dim=1)
        return self.real


class HFModel(LanguageModel):
    """A transformers causal LM. ``hf`` is the wrapped model; its parameters keep their names under ``hf.``."""

    def __init__(self, hf: Any):
        super().__init__()
        self.hf = hf
        self.config = hf.config.get_text_config(decoder=True)
        embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
        if embedding is None or getattr(head, "weight", None) is None:
            raise ModelError(f"{type(hf).__name__} has no linear output embedding; it cannot be trained here")
        self.vocab_size = min(head.weight.shape[0], embedding.weight.shape[0])
        limits = (getattr(self.config, k, None) for k in ("max_position_embeddings", "n_positions", "max_seq_len"))
        self.max_seq_len = next((n for n in limits if n), 1 << 30)
        self.hf_files: dict[str, str] = {}
        self.scale, self.softcap = self._find_head()
        self.packing: Packing = self._find_packing()

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        """The list of layers: among the module lists of like modules, the one with most parameters."""
        lists = [m for m in self.hf.modules() if isinstance(m, nn.ModuleList) and len(m)]
        if not lists:
            raise ModelError(f"{type(self.hf).__name__} has no list of layers")
        return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        doc_ids: Tensor | None = None,
        cache: Any = None,
        head_fn: Callable[[Hidden], Any] | None = None,
    ) -> Any:
        """See :class:`LanguageModel`. Raises ModelError for several documents in a row when the architecture lets
        them see each other whatever it is told."""
        inputs = {"input_ids": tokens, **self._inputs(tokens, positions, doc_ids, cache)}
        states = self.hf.base_model(**inputs).last_hidden_state
        head = self.hf.get_output_embeddings()
        hidden = Hidden(states, Head(head.weight, getattr(head, "bias", None), self.softcap, self.scale))
        return head_logits(hidden) if head_fn is None else head_fn(hidden)

    def new_cache(self, capacity: int) -> HFCache:
        from transformers import DynamicCache

        del capacity  # it grows
        return HFCache(DynamicCache(config=self.config))

    def _inputs(
        self, tokens: Tensor, positions: Tensor | None, doc_ids: Tensor | None, cache: HFCache | None
    ) -> dict[str, Any]:
        if cache is not None:
            real = cache.extend(tokens, doc_ids)
            if positions is None:
                positions = (real.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            name = "cache" if _renamed_cache() else "past_key_values"
            return {name: cache.cache, "use_cache": True, "attention_mask": real, "position_ids": positions}
        inputs: dict[str, Any] = {"use_cache": False}
        if doc_ids is not None and document_starts(doc_ids).numel() > tokens.shape[0]:
            if self.packing == "none":
                raise ModelError(
                    f"{type(self.hf).__name__} lets documents in one row see each other; give it one document a row"
                )
            if self.packing == "positions":
                positions = _positions(doc_ids)  # these alone tell the documents apart, so they must agree with them
            else:
                positions = _positions(doc_ids) if positions is None else positions
                inputs["attention_mask"] = self._masks(doc_ids)
        if positions is not None:
            inputs["position_ids"] = positions
        return inputs

    def _masks(self, doc_ids: Tensor) -> Any:
        """Additive ``[B, 1, T, T]``, or one per kind of layer where the architecture mixes full and windowed ones."""

        def additive(window: int) -> Tensor:
            seen = document_mask(doc_ids, doc_ids.shape[1], window, doc_ids.device)
            dtype = next(self.hf.parameters()).dtype
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

        types = set(getattr(self.config, "layer_types", None) or ())
        window = getattr(self.config, "sliding_window", None) or 0
        if getattr(self.config, "use_sliding_window", True) is False:
            window = 0
        if types - {"full_attention", "sliding_attention"}:
            raise ValueError(f"unknown kinds of attention: {types}")
        if types:
            return {t: additive(window if t == "sliding_attention" else 0) for t in types}
        return additive(window)

    # -- what the architecture does, found out on random ids ----------------------------------------------------------

    @torch.no_grad()
    def _probe(self, tokens: Tensor) -> Tensor:
        return self.hf(input_ids=tokens, use_cache=False).logits.float()

    def _find_head(self) -> tuple[float, float | None]:
        """Scale and soft cap with which hidden states through the output embedding give the model's own logits."""
        if next(self.hf.parameters()).is_meta:
            return self._scales()[0], getattr(self.config, "final_logit_softcapping", None)
        training = self.hf.training
        self.hf.eval()
        tokens = self._random_ids(2, 7)
        with torch.no_grad():
            states = self.hf.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        want = self._probe(tokens)
        head = self.hf.get_output_embeddings()
        self.hf.train(training)
        cap = getattr(self.config, "final_logit_softcapping", None)
        error = float("inf")
        for scale in self._scales():
            with torch.no_grad():
                got = head_logits(Hidden(states, Head(head.weight, getattr(head, "bias", None), cap, scale))).float()
            if got.shape == want.shape:
                error = min(error, float((got - want).abs().max()))
                if error <= 1e-3 * max(1.0, float(want.abs().max())) * (1.0 if states.dtype == torch.float32 else 30.0):
                    return scale, cap
        raise ModelError(
            f"{type(self.hf).__name__}: its logits are not its last hidden states times its output embedding (off by "
            f"{error:.3g}), so losses computed from them would be wrong; this architecture cannot be trained here"
        )

    def _scales(self) -> list[float]:
        scales = [1.0]
        if getattr(self.config, "logit_scale", None):
            scales.insert(0, float(self.config.logit_scale))
        if getattr(self.config, "logits_scaling", None):
            scales.insert(0, 1.0 / float(self.config.logits_scaling))
        return scales

    def _random_ids(self, rows: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        device = next(self.hf.parameters()).device
        return torch.randint(min(self.vocab_size, 1000), (rows, length), generator=generator).to(device)

    def _find_packing(self) -> Packing:
        """The first way of telling documents apart under which each one's logits equal those that it has alone."""
        if next(self.hf.parameters()).is_meta:
            return "positions"
        training = self.hf.training
        self.hf.eval()
        tokens = self._random_ids(1, 13)
        doc_ids = torch.tensor([[0] * 6 + [1] * 7], dtype=torch.int32, device=tokens.device)
        alone = torch.cat((self._probe(tokens[:, :6]), self._probe(tokens[:, 6:])), dim=1)
        tolerance = 1e-3 * max(1.0, float(alone.abs().max()))
        tolerance *= 1.0 if next(self.hf.parameters()).dtype == torch.float32 else 30.0
        found: Packing = "none"
        # From positions that start again transformers makes its own masks, with its rules for windows: first choice.
        ways: tuple[Packing, ...] = ("positions", "mask")
        for way in ways:
            self.packing = way
            try:
                with torch.no_grad():
                    packed = self(tokens, doc_ids=doc_ids).float()
            except (TypeError, ValueError, AttributeError, RuntimeError, KeyError):
                continue  # the architecture does not take this kind of input: not this way
            if float((packed - alone).abs().max()) <= tolerance:
                found = way
                break
        self.hf.train(training)
        return found

    # -- figures ------------------------------------------------------------------------------------------------------

    def param_roles(self) -> dict[str, Role]:
        inner = guess_roles(self.hf)
        return {f"hf.{name}": role for name, role in inner.items()}

    def flops_per_token(self, seq_len: int) -> float:
        """Estimated from the weights of linear modules (of stacked experts, the active share) and the heads' sizes."""
        c = self.config
        head = self.hf.get_output_embeddings()
        macs = float(head.weight.numel())
        for module in self.hf.modules():
            for name, param in module.named_parameters(recurse=False):
                if "lora_" in name or param is head.weight or isinstance(module, nn.Embedding):
                    continue
                if param.ndim == 2:
                    macs += param.numel()
                elif param.ndim == 3:
                    macs += param.numel() * getattr(c, "num_experts_per_tok", 1) / param.shape[0]
        heads = getattr(c, "num_attention_heads", 0) or 0
        width = getattr(c, "head_dim", None) or (c.hidden_size // heads if heads else 0)
        window = min(getattr(c, "sliding_window", None) or seq_len, seq_len)
        keys = (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
        pairs = 12.0 * heads * width * keys
        fixed = frozen_correction(
            self, head.weight, getattr(c, "num_experts_per_tok", None) or 1, [pairs] * len(self.blocks)
        )
        return 6.0 * (macs + len(self.blocks) * 2 * heads * width * keys) + fixed

    def write_hf(self, part: Path, max_shard_size: int) -> None:
        """Config and weights into the folder ``part``, by transformers."""
        from trainwright.core.distributed import full_tensor, is_main

        state = {n: full_tensor(p.detach()).cpu() for n, p in self.hf.state_dict().items()}
        if is_main():
            self.hf.save_pretrained(part, state_dict=state, max_shard_size=max_shard_size)


def _renamed_cache() -> bool:
    """transformers 5.20 and later call the argument ``cache``."""
    import inspect

    from transformers import LlamaModel

    return "cache" in inspect.signature(inspect.unwrap(LlamaModel.forward)).parameters


def _positions(doc_ids: Tensor) -> Tensor:
    """Position of each token in its document, from the changes of ``doc_ids [B, T]``."""
    slots = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    starts = torch.zeros_like(slots)
    starts[:, 1:] = torch.where(doc_ids[:, 1:] != doc_ids[:, :-1], slots[:, 1:], 0)
    return slots - starts.cummax(dim=1).values


@register("model", "hf")
class HFModelConfig(ModelConfig):
    """Any causal language model folder that transformers loads (AutoModelForCausalLM); needs the `hf` extra."""

    path: str = Field(description="Hugging Face model folder.")
    dtype: Literal["float32", "bfloat16", "float16", "stored"] = Field(
        "float32",
        description="Type of the trained weights; small updates vanish in bfloat16. stored: as in the folder.",
    )
    fresh: bool = Field(False, description="Keep the architecture and draw new weights.")

    def build(self, vocab_size: int, seq_len: int) -> HFModel:
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise ModelError("model hf needs transformers: pip install 'trainwright[hf]'") from error
        folder = Path(self.path)
        config_file = read_json(folder / "config.json")
        stored = config_file.get("dtype") or config_file.get("torch_dtype") or "float32"
        dtype = getattr(torch, stored if self.dtype == "stored" else self.dtype)
        from transformers.utils import logging as transformers_logging

        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()  # it would be drawn into ours
        try:
            if self.fresh:
                hf = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(folder, local_files_only=True), dtype=dtype
                )
            else:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, local_files_only=True, output_loading_info=True
                )
                hf, info = loaded
                lost = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
                if lost:
                    raise ModelError(f"{folder} misses weights or has them in another shape: {', '.join(lost[:6])}")
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"{folder} cannot be loaded by transformers: {str(error).strip().splitlines()[0]}"
            ) from error
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
        model = HFModel(hf.to(torch.get_default_device()).train())
        check_fit(model.vocab_size, model.max_seq_len, vocab_size, seq_len, self.path)
        return model

    def tokenizer_path(self) -> str | None:
        return self.path
