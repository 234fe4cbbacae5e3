"""Operations of the decoder with fused CPU kernels; on GPUs and under torch.compile they are plain formulas, which
the compiler fuses."""

from trainwright.models.ops.causal_attention import causal_attention, causal_attention_reference, first_visible
from trainwright.models.ops.rms_norm import rms_norm, rms_norm_reference
from trainwright.models.ops.rope import apply_rope, apply_rope_reference
from trainwright.models.ops.swiglu import swiglu, swiglu_fused, swiglu_reference

__all__ = [
    "apply_rope",
    "apply_rope_reference",
    "causal_attention",
    "causal_attention_reference",
    "first_visible",
    "rms_norm",
    "rms_norm_reference",
    "swiglu",
    "swiglu_fused",
    "swiglu_reference",
]
