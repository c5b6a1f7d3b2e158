"""The operations around attention, checked and dispatched like those of `kernels.ops`, which re-exports them."""

from __future__ import annotations

import torch

from kernels.dispatch import ShapeError, run

Tensor = torch.Tensor


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


def qk_norm_rope_kv_split(
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
    num_keys: int,
    num_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope_kv_write` that returns q [num_rows, Hq, D] and K and V [num_rows, Hk, D] as well: what
    `causal_attention` takes. num_keys ≤ T ≤ num_rows: rows of K and V from num_keys on, and of q from T on, are zeros,
    so that tokens behind a prompt leave no trace in it."""
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim or not num_keys <= qkv.shape[0] <= num_rows:
        raise ShapeError(
            f"qk_norm_rope_kv_split: qkv {tuple(qkv.shape)}, {num_heads}/{num_kv_heads} heads of {head_dim}, "
            f"{num_rows} rows"
        )
    norms = (q_norm, k_norm, eps, cos_sin, position_ids)
    caches = (key_cache, value_cache, slot_mapping)
    sizes = (num_heads, num_kv_heads, head_dim, num_keys, num_rows)
    return run("qk_norm_rope_kv_split", qkv.device.type, qkv, *norms, *caches, *sizes)


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


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one whole sequence: q [S, Hq, D], k and v [S, Hk, D], all dense → [S, Hq, D].

    A device may prepare something for each S, so callers round it up (`prefers_causal_attention` says where it pays).
    Rows of padding at the end must be finite.
    """
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ShapeError(f"causal_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    return run("causal_attention", q.device.type, q, k, v, scale)


def prefers_causal_attention(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Whether a long prompt without history is better served by `causal_attention` than by `paged_attention`."""
    return bool(run("prefers_causal_attention", device.type, device, dtype, num_heads, num_kv_heads, head_dim))


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
