"""The operations of the decoder: shapes are checked here, `kernels.dispatch` picks the implementation by device.

Pure functions, except that KV caches and the pool are written in place. Letters in shapes: T packed tokens, H hidden
size, D head size, Hq and Hk query and KV heads, B sequences, V vocabulary, n rows that sample. Activations are float32,
bfloat16 or float16; every sum runs in float32; norm weights are float32. A KV cache view is
[num_blocks, Hk, block_tokens, D], with strides (see `runners.kv_cache.device_cache`).
`kernels/reference/<op>.py` is each op's specification. Those on logits and slots stand in `kernels.sampling_ops`.
"""

from __future__ import annotations

import torch

from kernels import reference
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
    "copy_blocks",
    "decode_inputs",
    "embedding",
    "fused_linear",
    "gated_activation",
    "kv_write",
    "linear",
    "logits",
    "native_formats",
    "pack_weight",
    "paged_attention",
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


def rope(x: Tensor, cos_sin: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by its position, half-split (NeoX) pairs; cos_sin [max_positions, D] float32 holds D/2
    cosines, then D/2 sines; position_ids [T] int32."""
    if x.dim() != 3 or cos_sin.shape[1] != x.shape[2] or position_ids.shape[0] != x.shape[0]:
        raise ShapeError(f"rope: x {tuple(x.shape)}, table {tuple(cos_sin.shape)}, {tuple(position_ids.shape)}")
    return run("rope", x.device.type, x, cos_sin, position_ids)


def kv_write(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, Hk, D] at slot_mapping [T] int64 = block_id * block_tokens + offset; -1 writes nothing."""
    if k.shape != v.shape or k.shape[1] != key_cache.shape[1] or slot_mapping.shape[0] != k.shape[0]:
        raise ShapeError(f"kv_write: k {tuple(k.shape)}, v {tuple(v.shape)}, cache {tuple(key_cache.shape)}")
    run("kv_write", k.device.type, k, v, key_cache, value_cache, slot_mapping)


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    position_ids: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Tensor:
    """Split qkv [T, (Hq + 2 Hk) * D], norm q and k per head where weights [D] are given, rotate both, write K and V
    into the caches, return q [T, Hq, D]."""
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim or slot_mapping.shape[0] != qkv.shape[0]:
        raise ShapeError(
            f"qk_norm_rope_kv_write: qkv {tuple(qkv.shape)}, {num_heads}/{num_kv_heads} heads of {head_dim}"
        )
    return run(
        "qk_norm_rope_kv_write",
        qkv.device.type,
        qkv,
        q_norm,
        k_norm,
        eps,
        cos_sin,
        position_ids,
        key_cache,
        value_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
    )


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_query_len: int,
    max_context_len: int,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over paged KV, packed by cu_seqlens_q [B + 1] int32; returns [T, Hq, D].

    Query j of sequence b sits at position context_lens[b] - (its query count) + j and sees the positions up to its
    own, no more than `sliding_window` of them where that is given. block_tables [B, max_blocks] int32, context_lens
    [B] int32 (this step's tokens included). `soft_cap` c maps a score s to c * tanh(s / c). Rows of q past
    cu_seqlens_q[B] are padding: their output is unspecified. max_query_len 1 is the decode case.
    """
    if q.dim() != 3 or q.shape[1] % key_cache.shape[1] or q.shape[2] != key_cache.shape[3]:
        raise ShapeError(f"paged_attention: q {tuple(q.shape)}, cache {tuple(key_cache.shape)}")
    if context_lens.shape[0] != block_tables.shape[0] or cu_seqlens_q.shape[0] != block_tables.shape[0] + 1:
        raise ShapeError(
            f"paged_attention: block_tables {tuple(block_tables.shape)}, context_lens {tuple(context_lens.shape)}, "
            f"cu_seqlens_q {tuple(cu_seqlens_q.shape)}"
        )
    return run(
        "paged_attention",
        q.device.type,
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        scale,
        sliding_window,
        soft_cap,
        max_query_len,
        max_context_len,
    )


def rotary_decode_attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    position_ids: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    num_heads: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_context_len: int,
    follows_linear: bool = False,
) -> Tensor:
    """`qk_norm_rope_kv_write`, then `paged_attention`, of one token a sequence: qkv [B, (Hq + 2 Hk) * D] → [B, Hq, D].

    A device may choose how it splits a context by `max_context_len`, and by nothing else that changes between steps.
    `follows_linear`: the op before was `fused_linear` with `feeds_attention`.
    """
    if qkv.shape[0] != context_lens.shape[0] or qkv.shape[1] % key_cache.shape[3]:
        raise ShapeError(f"rotary_decode_attention: qkv {tuple(qkv.shape)}, {context_lens.shape[0]} sequences")
    return run(
        "rotary_decode_attention",
        qkv.device.type,
        qkv,
        q_norm,
        k_norm,
        eps,
        cos_sin,
        position_ids,
        key_cache,
        value_cache,
        slot_mapping,
        block_tables,
        context_lens,
        num_heads,
        scale,
        sliding_window,
        soft_cap,
        max_context_len,
        follows_linear,
    )


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


def fused_linear(
    x: Tensor,
    weight: Tensor,
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

    weight is a plain [features, in], or (gate | up) [2 * features, in] where `activation` is "silu" or "gelu_tanh".
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
