"""Between a Hugging Face ``config.json`` and an :class:`Architecture`, and between the two sets of weight names."""

from __future__ import annotations

from typing import Any

from trainwright.core.errors import ModelError
from trainwright.models.architecture import Architecture
from trainwright.models.rope import RopeScaling

# model_type -> class name; the families whose every option we compute.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",  # what experts balanced by a bias are written as
}


def architecture_from_hf(config: dict[str, Any], where: str) -> Architecture:
    """The architecture that ``config.json`` describes; ``where`` names the folder in errors.

    Raises ModelError for a model type or an option that our decoder does not compute.
    """
    kind = config.get("model_type")
    other = "train it through model: {name: hf, path: ...}"
    if kind not in ARCHITECTURES:
        raise ModelError(f"{where}: model_type {kind!r} is not one of {', '.join(ARCHITECTURES)}; {other}")

    def refuse(option: str) -> ModelError:
        return ModelError(f"{where}: {option}={config.get(option)!r} is not supported by our decoder; {other}")

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise ModelError(f"{where}: config.json has no {key}")
        return config[key]

    for option, plain in (
        ("hidden_act", "silu"), ("mlp_bias", False), ("router_jitter_noise", 0.0), ("n_shared_experts", 0),
        ("n_group", 1), ("routed_scaling_factor", 1.0), ("quantization_config", None),
    ):  # fmt: skip
        if config.get(option) not in (None, plain):
            raise refuse(option)
    n_layers, n_heads, dim = need("num_hidden_layers"), need("num_attention_heads"), need("hidden_size")
    max_seq_len = need("max_position_embeddings")
    rope = {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or config.get("rope_parameters") or {}),
    }
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        config = {**config, "partial_rotary_factor": rope.get("partial_rotary_factor")}
        raise refuse("partial_rotary_factor")
    try:
        scaling = RopeScaling.from_hf(rope)
    except ValueError as error:
        raise ModelError(f"{where}: RoPE parameters {rope} are not supported; {other} ({error})") from None
    if scaling is not None and scaling.type == "dynamic":
        # Hugging Face keeps the trained length as the maximum and lets the sequence run beyond it.
        scaling = scaling.model_copy(update={"original_max_seq_len": max_seq_len})
        max_seq_len = int(max_seq_len * scaling.factor)
    bias = bool(config.get("attention_bias", False))
    moe = kind in ("mixtral", "qwen3_moe", "glm4_moe")
    experts = next((config[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(k)), 0)
    if moe and not experts:
        raise ModelError(f"{where}: config.json does not say how many experts there are")
    return Architecture(
        vocab_size=need("vocab_size"),
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=config.get("head_dim") or dim // n_heads,
        ffn_dim=need("intermediate_size"),
        max_seq_len=max_seq_len,
        rope_theta=float(rope["rope_theta"] or 10_000.0),
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=kind in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
        qkv_bias=kind == "qwen2" or (bias and kind in ("llama", "qwen3", "qwen3_moe", "glm4_moe")),
        out_bias=bias and kind in ("llama", "qwen3", "qwen3_moe"),
        windows=_windows(config, kind, n_layers),
        n_experts=experts if moe else 0,
        n_experts_per_token=need("num_experts_per_tok") if moe else 0,
        moe_ffn_dim=(config["intermediate_size"] if kind == "mixtral" else need("moe_intermediate_size")) if moe else 0,
        dense_layers=_dense_layers(config, kind, n_layers),
        router_score="sigmoid" if kind == "glm4_moe" else "softmax",
        router_normalise=bool(config.get("norm_topk_prob", kind != "qwen3_moe")),
        balance={"glm4_moe": "bias"}.get(kind, "aux_loss") if moe else "none",  # type: ignore[arg-type]
        aux_loss_coefficient=config.get("router_aux_loss_coef", 0.001),
        family=kind,
    )


def _windows(config: dict[str, Any], kind: str, n_layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window", 4096 if kind == "mistral" else 0) or 0
    if not window or kind in ("llama", "glm4_moe"):
        return ()
    if kind in ("mistral", "mixtral"):
        return (window,) * n_layers
    if not config.get("use_sliding_window", False):
        return ()
    if kind == "qwen3_moe":
        return (window,) * n_layers
    types = config.get("layer_types")
    if types is None:
        full = config.get("max_window_layers", n_layers)
        types = ["sliding_attention" if i >= full else "full_attention" for i in range(n_layers)]
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _dense_layers(config: dict[str, Any], kind: str, n_layers: int) -> tuple[int, ...]:
    if kind == "glm4_moe":
        return tuple(range(min(config.get("first_k_dense_replace", 0), n_layers)))
    if kind == "qwen3_moe":
        step, only = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or [])
        return tuple(i for i in range(n_layers) if i in only or (i + 1) % step)
    return ()


def hf_model_type(arch: Architecture) -> str:
    """The Hugging Face model type that computes what ``arch`` does. Raises ModelError when there is none."""
    windows = set(arch.windows) - {0}
    uniform = not windows or set(arch.windows) == windows
    bias = arch.qkv_bias or arch.out_bias

    def refuse(what: str) -> ModelError:
        return ModelError(f"no transformers architecture has {what}; the model cannot be exported without changing it")

    if len(windows) > 1:
        raise refuse(f"sliding windows of different sizes ({sorted(windows)})")
    if arch.n_experts:
        if arch.router_score == "sigmoid":
            if windows or arch.out_bias or arch.dense_layers != tuple(range(len(arch.dense_layers))):
                raise refuse(
                    "sigmoid-routed experts with a sliding window, an output bias, or dense layers in the middle"
                )
            return "glm4_moe"
        if arch.balance == "bias":
            raise refuse("softmax-routed experts with a balancing bias (router_score: sigmoid can be exported)")
        if not uniform:
            raise refuse("experts with a sliding window on some layers only")
        if arch.qk_norm:
            return "qwen3_moe"
        if bias or arch.dense_layers or not arch.router_normalise:
            raise refuse("experts with attention biases, dense layers or unnormalised routing, but no norm on q and k")
        return "mixtral"
    if arch.qk_norm:
        return "qwen3"
    if arch.out_bias:
        if windows:
            raise refuse("a sliding window with a bias on attention's output, but no norm on q and k")
        return "llama"
    if arch.qkv_bias or not uniform:
        return "qwen2"
    return "mistral" if windows or arch.family == "mistral" else "llama"


def hf_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    """``config.json`` for ``arch``, readable by transformers 4 and 5."""
    kind = hf_model_type(arch)
    rope: dict[str, Any] = {"rope_type": "default"}
    max_seq_len = arch.max_seq_len
    if arch.rope_scaling is not None:
        rope = arch.rope_scaling.to_hf(arch.max_seq_len)
        if arch.rope_scaling.type == "dynamic":
            max_seq_len = arch.rope_scaling.original_max_seq_len or max_seq_len
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.dim,
        "num_hidden_layers": arch.n_layers,
        "num_attention_heads": arch.n_heads,
        "num_key_value_heads": arch.n_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.moe_ffn_dim if kind == "mixtral" else arch.ffn_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_seq_len,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_parameters": {**rope, "rope_theta": arch.rope_theta},
        "rope_scaling": None if arch.rope_scaling is None else {**rope, "rope_theta": arch.rope_theta},
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": arch.tie_embeddings,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if kind in ("llama", "qwen3", "qwen3_moe", "glm4_moe"):
        out["attention_bias"] = arch.qkv_bias or arch.out_bias
    window = max(arch.windows, default=0)
    if kind in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"):
        out["sliding_window"] = window or None
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        out["use_sliding_window"] = window > 0
    if kind in ("qwen2", "qwen3"):
        types = ["sliding_attention" if arch.window(i) else "full_attention" for i in range(arch.n_layers)]
        out |= {"layer_types": types, "max_window_layers": types.count("full_attention")}
    if arch.n_experts:
        out |= {"num_experts_per_tok": arch.n_experts_per_token, "router_aux_loss_coef": arch.aux_loss_coefficient}
    if kind == "mixtral":
        out["num_local_experts"] = arch.n_experts
    elif kind == "qwen3_moe":
        out |= {"num_experts": arch.n_experts, "moe_intermediate_size": arch.moe_ffn_dim, "decoder_sparse_step": 1}
        out |= {"mlp_only_layers": list(arch.dense_layers), "norm_topk_prob": arch.router_normalise}
    elif kind == "glm4_moe":
        out |= {"n_routed_experts": arch.n_experts, "moe_intermediate_size": arch.moe_ffn_dim, "n_shared_experts": 0}
        out |= {"first_k_dense_replace": len(arch.dense_layers), "norm_topk_prob": arch.router_normalise, "n_group": 1}
        out |= {
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": arch.qk_norm,
            "partial_rotary_factor": 1.0,
        }
        out["rope_parameters"]["partial_rotary_factor"] = 1.0
        out["num_nextn_predict_layers"] = 0
    return out


def hf_names(arch: Architecture, kind: str) -> dict[str, str | list[str]]:
    """Our name -> the Hugging Face name, or for stacked experts the names of the E matrices in order."""
    names: dict[str, str | list[str]] = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
    }
    if not arch.tie_embeddings:
        names["head.weight"] = "lm_head.weight"
    experts = {"gate": "w1", "up": "w3", "down": "w2"} if kind == "mixtral" else None
    for i in range(arch.n_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        names[f"{ours}.attn_norm.weight"] = f"{theirs}.input_layernorm.weight"
        names[f"{ours}.mlp_norm.weight"] = f"{theirs}.post_attention_layernorm.weight"
        for p in "qkvo":
            names[f"{ours}.attn.{p}.weight"] = f"{theirs}.self_attn.{p}_proj.weight"
            if arch.out_bias if p == "o" else arch.qkv_bias:
                names[f"{ours}.attn.{p}.bias"] = f"{theirs}.self_attn.{p}_proj.bias"
        if arch.qk_norm:
            names[f"{ours}.attn.q_norm.weight"] = f"{theirs}.self_attn.q_norm.weight"
            names[f"{ours}.attn.k_norm.weight"] = f"{theirs}.self_attn.k_norm.weight"
        if not arch.is_moe(i):
            for p in ("gate", "up", "down"):
                names[f"{ours}.mlp.{p}.weight"] = f"{theirs}.mlp.{p}_proj.weight"
            continue
        mlp = f"{theirs}.block_sparse_moe" if kind == "mixtral" else f"{theirs}.mlp"
        names[f"{ours}.mlp.router.weight"] = f"{mlp}.gate.weight"
        if arch.balance == "bias":
            names[f"{ours}.mlp.expert_bias"] = f"{mlp}.gate.e_score_correction_bias"
        for p in ("gate", "up", "down"):
            leaf = experts[p] if experts else f"{p}_proj"
            names[f"{ours}.mlp.{p}"] = [f"{mlp}.experts.{e}.{leaf}.weight" for e in range(arch.n_experts)]
    return names


def hf_constants(arch: Architecture, kind: str) -> dict[str, tuple[int, ...]]:
    """Tensors that ``kind`` wants and ``arch`` has not, by name and shape; written as zeros, which changes nothing."""
    out: dict[str, tuple[int, ...]] = {}
    kv, q = arch.n_kv_heads * arch.head_dim, arch.n_heads * arch.head_dim
    for i in range(arch.n_layers):
        layer = f"model.layers.{i}"
        if (kind == "qwen2" and not arch.qkv_bias) or (kind == "llama" and arch.out_bias and not arch.qkv_bias):
            out |= {f"{layer}.self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
        if kind in ("llama", "qwen3", "qwen3_moe") and arch.qkv_bias and not arch.out_bias:
            out[f"{layer}.self_attn.o_proj.bias"] = (arch.dim,)
        if kind == "glm4_moe" and arch.is_moe(i):
            if arch.balance != "bias":
                out[f"{layer}.mlp.gate.e_score_correction_bias"] = (arch.n_experts,)
            for p in ("gate", "up"):
                out[f"{layer}.mlp.shared_experts.{p}_proj.weight"] = (0, arch.dim)
            out[f"{layer}.mlp.shared_experts.down_proj.weight"] = (arch.dim, 0)
    return out
