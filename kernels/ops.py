"""The operations of the decoder: shapes are checked here, `kernels.dispatch` picks the implementation by device.

Pure functions, except that KV caches and the pool are written in place. Letters in shapes: T packed tokens, H hidden
size, D head size, Hq and Hk query and KV heads, B sequences, V vocabulary, n rows that sample. Activations are float32,
bfloat16 or float16; every sum runs in float32; norm weights are float32. A KV cache view is
[num_blocks, Hk, block_tokens, D], with strides (see `runners.kv_cache.device_cache`).
`kernels/reference/<op>.py` is each op's specification. Those around attention stand in
`kernels.attention_ops`, those on logits and slots in `kernels.sampling_ops`.
"""

from __future__ import annotations

import torch

from kernels import reference
from kernels.attention_ops import (
    causal_attention,
    kv_write,
    paged_attention,
    prefers_causal_attention,
    qk_norm_rope_kv_split,
    qk_norm_rope_kv_write,
    rope,
    rotary_decode_attention,
)
from kernels.dispatch import (
    ShapeError,
    native_formats,
    reference_only,
    register,
    register_formats,
    register_reference,
    run,
)
from kernels.sampling import SamplingTensors
from kernels.sampling_ops import (
    add_logit_bias,
    advance_slots,
    apply_penalties,
    apply_token_mask,
    argmax,
    decode_inputs,
    sample,
    top_logprobs,
)
from kernels.weights import LinearWeight, QuantizedWeight

__all__ = [
    "LinearWeight",
    "QuantizedWeight",
    "SamplingTensors",
    "ShapeError",
    "add_logit_bias",
    "add_rms_norm",
    "advance_slots",
    "apply_penalties",
    "apply_token_mask",
    "argmax",
    "causal_attention",
    "copy_blocks",
    "decode_inputs",
    "embedding",
    "fused_linear",
    "fuses",
    "gated_activation",
    "kv_write",
    "linear",
    "logits",
    "native_formats",
    "pack_weight",
    "paged_attention",
    "prefers_causal_attention",
    "qk_norm_rope_kv_split",
    "qk_norm_rope_kv_write",
    "reference_only",
    "register",
    "register_formats",
    "rms_norm",
    "rope",
    "rotary_decode_attention",
    "sample",
    "top_logprobs",
]

Tensor = torch.Tensor

for _name, _implementation in reference.IMPLEMENTATIONS.items():
    register_reference(_name, _implementation)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] over its root mean square, times weight [H] float32; same shape and dtype as x."""
    if weight.shape[0] != x.shape[-1]:
        raise ShapeError(f"rms_norm: weight {tuple(weight.shape)} for x {tuple(x.shape)}")
    return run("rms_norm", x.device.type, x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H]."""
    if x.shape != residual.shape or weight.shape[0] != x.shape[-1]:
        raise ShapeError(
            f"add_rms_norm: x {tuple(x.shape)}, residual {tuple(residual.shape)}, weight {tuple(weight.shape)}"
        )
    return run("add_rms_norm", x.device.type, x, residual, weight, eps)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of gate_up [T, 2F] = (gate | up); activation "silu" or "gelu_tanh"; returns [T, F]."""
    if gate_up.shape[-1] % 2:
        raise ShapeError(f"gated_activation: odd width {gate_up.shape[-1]}")
    return run("gated_activation", gate_up.device.type, gate_up, activation)


def embedding(input_ids: Tensor, weight: LinearWeight, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Rows input_ids [T] of weight [V, H], times `scale`, as [T, H] in `dtype` (None: the weight's, float32 for
    quantised weights)."""
    return run("embedding", input_ids.device.type, input_ids, weight, scale, dtype)


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out] in the dtype of x, not the weight's."""
    if x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"linear: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    return run("linear", x.device.type, x, weight, bias)


def fuses(weight: LinearWeight, dtype: torch.dtype) -> bool:
    """Whether `fused_linear` has a kernel for this weight and activations of `dtype`."""
    return bool(run("fuses", weight.device.type, weight, dtype))


def fused_linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    feeds_attention: bool = False,
    residual_is_spent: bool = False,
) -> Tensor:
    """activation(rms_norm(x) Wᵀ + bias) + residual, each neighbour only where it is given: x [T, in] → [T, features].

    weight is [features, in], or (gate | up) [2 * features, in] where `activation` is "silu" or "gelu_tanh".
    residual [T, features]. `out_dtype` None is the dtype of x; float32 keeps what the sum had.
    `feeds_attention`: the next op on this device is `rotary_decode_attention` with `follows_linear`, which may then
    read the cache and the tables before this op has ended. `residual_is_spent`: nobody reads `residual` afterwards, so
    the result may take its place.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"fused_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    neighbours = (bias, norm_weight, eps, residual, activation)
    return run("fused_linear", x.device.type, x, weight, *neighbours, out_dtype, feeds_attention, residual_is_spent)


def logits(hidden: Tensor, weight: LinearWeight, soft_cap: float | None = None) -> Tensor:
    """hidden [n, H] times weight [V, H] transposed, in float32 [n, V]; soft_cap c maps s to c * tanh(s / c)."""
    if hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(f"logits: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}")
    return run("logits", hidden.device.type, hidden, weight, soft_cap)


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks `sources` [n] int64 of pool [num_blocks, ...] over blocks `targets` [n], in place, all at once."""
    if sources.shape != targets.shape:
        raise ShapeError(f"copy_blocks: {sources.shape[0]} sources, {targets.shape[0]} targets")
    run("copy_blocks", pool.device.type, pool, sources, targets)


def pack_weight(weight: LinearWeight, quantization: str = "none") -> LinearWeight:
    """The weight [out, in] in the form that this device's kernels want, made once when a model is built.

    `quantization` "none" keeps values as stored (repacking is allowed); another name ("int8") asks the backend to
    quantise a float weight. ValueError where no backend of the device knows that name.
    """
    return run("pack_weight", weight.device.type, weight, quantization)
