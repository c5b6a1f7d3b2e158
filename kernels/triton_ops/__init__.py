"""Triton kernels, one op a file; `kernels.dispatch` calls `register_ops` before the first op on a CUDA device."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from kernels.dispatch import register, register_formats
from kernels.weights import register_dequantizer

# Ops that run here whatever their arguments, by the module of their name.
_OPS = (
    "add_logit_bias",
    "add_rms_norm",
    "advance_slots",
    "apply_penalties",
    "argmax",
    "decode_inputs",
    "gated_activation",
    "paged_attention",
    "qk_norm_rope_kv_write",
    "rotary_decode_attention",
    "sample",
)


def register_ops() -> None:
    """Register every op; nothing where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return
    from kernels.triton_ops.add_rms_norm import rms_norm
    from kernels.triton_ops.causal_attention import causal_attention, prefers_causal_attention
    from kernels.triton_ops.dense_linear import is_plain, linear, logits
    from kernels.triton_ops.embedding import embedding
    from kernels.triton_ops.fused_linear import fused_linear
    from kernels.triton_ops.qk_norm_rope_kv_write import qk_norm_rope_kv_split

    for name in _OPS:
        register(name, "cuda", getattr(importlib.import_module(f"kernels.triton_ops.{name}"), name))
    register("rms_norm", "cuda", rms_norm)
    register("causal_attention", "cuda", causal_attention)
    register("prefers_causal_attention", "cuda", prefers_causal_attention)
    register("qk_norm_rope_kv_split", "cuda", qk_norm_rope_kv_split)
    register("embedding", "cuda", embedding, _has_plain_weight)
    for name, implementation in (("linear", linear), ("logits", logits), ("fused_linear", fused_linear)):
        register(name, "cuda", implementation, is_plain)
    _register_quantized()


def _register_quantized() -> None:
    """Ops on weights that stay in blocks."""
    from kernels.triton_ops import quantized_linear as quantized
    from kernels.triton_ops.quantized_planes import FORMATS, PREFIX, dequantize_planes, is_packed, pack_weight

    register("pack_weight", "cuda", pack_weight)
    register_formats("cuda", FORMATS)
    for name in FORMATS:
        register_dequantizer(PREFIX + name, dequantize_planes)
    register("linear", "cuda", quantized.quantized_linear, quantized.has_packed_weight)
    register("logits", "cuda", quantized.quantized_logits, quantized.has_packed_weight)
    register("fused_linear", "cuda", quantized.quantized_fused_linear, quantized.has_packed_weight)
    register("fuses", "cuda", lambda weight, dtype: True, is_packed)
    register("embedding", "cuda", quantized.quantized_embedding, quantized.has_packed_weight)


def _has_plain_weight(input_ids: Any, weight: Any, *_: Any) -> bool:
    return hasattr(weight, "dtype")
