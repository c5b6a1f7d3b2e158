"""Per-head norm of q and k, half-split rotation, KV write: everything between the QKV product and attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs

HEADS_PER_PROGRAM = 16


@triton.jit(do_not_specialize=["num_tokens", "num_keys"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def qk_norm_rope_kv_write_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    key_ptr,
    value_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    num_tokens,
    num_keys,
    eps,
    qkv_stride,
    cos_sin_stride,
    key_block_stride,
    key_head_stride,
    value_block_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    DENSE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, BLOCK_HALF)
    in_pair = pair < HALF
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    mask = ((head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]) & in_pair[None, :]
    wait_for_inputs(PDL)

    source = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM + pair[None, :]
    is_token = token < num_tokens  # rows past the last token (DENSE) read nothing and come out as zeros
    first = tl.load(source, mask=mask & is_token, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask & is_token, other=0.0).to(tl.float32)
    if HAS_Q_NORM or HAS_K_NORM:
        first, second = _norm_heads(
            first,
            second,
            is_query,
            is_key,
            q_norm_ptr,
            k_norm_ptr,
            pair,
            in_pair,
            eps,
            HEAD_DIM,
            HAS_Q_NORM,
            HAS_K_NORM,
        )
        # The reference rounds between norm and rotation.
        first = first.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        second = second.to(qkv_ptr.dtype.element_ty).to(tl.float32)

    position = tl.load(positions_ptr + token, mask=is_token, other=0).to(tl.int64)
    angles = cos_sin_ptr + position * cos_sin_stride + pair
    cos = tl.load(angles, mask=in_pair, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=in_pair, other=0.0)[None, :]
    rotates = (is_query | is_key)[:, None]
    low = tl.where(rotates, first * cos - second * sin, first).to(q_out_ptr.dtype.element_ty)
    high = tl.where(rotates, second * cos + first * sin, second).to(q_out_ptr.dtype.element_ty)

    q_out = q_out_ptr + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + pair[None, :]
    q_mask = mask & is_query[:, None]
    tl.store(q_out, low, mask=q_mask)
    tl.store(q_out + HALF, high, mask=q_mask)
    if DENSE:
        has_key = token < num_keys
        dense_low, dense_high = tl.where(has_key, low, 0.0), tl.where(has_key, high, 0.0)
        k_out = k_out_ptr + (token * NUM_KV_HEADS + head[:, None] - NUM_HEADS) * HEAD_DIM + pair[None, :]
        tl.store(k_out, dense_low, mask=mask & is_key[:, None])
        tl.store(k_out + HALF, dense_high, mask=mask & is_key[:, None])
        v_out = v_out_ptr + (token * NUM_KV_HEADS + head[:, None] - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM + pair[None, :]
        tl.store(v_out, dense_low, mask=mask & is_value[:, None])
        tl.store(v_out + HALF, dense_high, mask=mask & is_value[:, None])
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1)
    block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    key_out = key_ptr + block * key_block_stride + (head - NUM_HEADS)[:, None] * key_head_stride
    key_out += offset * HEAD_DIM + pair[None, :]
    k_mask = mask & is_key[:, None] & (slot >= 0)
    tl.store(key_out, low, mask=k_mask)
    tl.store(key_out + HALF, high, mask=k_mask)
    value_out = value_ptr + block * value_block_stride + (head - NUM_HEADS - NUM_KV_HEADS)[:, None] * value_head_stride
    value_out += offset * HEAD_DIM + pair[None, :]
    v_mask = mask & is_value[:, None] & (slot >= 0)
    tl.store(value_out, low, mask=v_mask)
    tl.store(value_out + HALF, high, mask=v_mask)


@triton.jit
def _norm_heads(
    first,
    second,
    is_query,
    is_key,
    q_norm_ptr,
    k_norm_ptr,
    pair,
    in_pair,
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
):
    """RMS norm over each head's two halves [heads, D/2]; value heads, and those without a weight, pass unchanged."""
    HALF: tl.constexpr = HEAD_DIM // 2
    square_sum = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(square_sum / HEAD_DIM + eps)[:, None]
    low, high = first, second
    if HAS_Q_NORM:
        q_low = tl.load(q_norm_ptr + pair, mask=in_pair, other=0.0)[None, :]
        q_high = tl.load(q_norm_ptr + HALF + pair, mask=in_pair, other=0.0)[None, :]
        low = tl.where(is_query[:, None], first * scale * q_low, low)
        high = tl.where(is_query[:, None], second * scale * q_high, high)
    if HAS_K_NORM:
        k_low = tl.load(k_norm_ptr + pair, mask=in_pair, other=0.0)[None, :]
        k_high = tl.load(k_norm_ptr + HALF + pair, mask=in_pair, other=0.0)[None, :]
        low = tl.where(is_key[:, None], first * scale * k_low, low)
        high = tl.where(is_key[:, None], second * scale * k_high, high)
    return low, high


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    position_ids: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """`kernels.ops.qk_norm_rope_kv_write`: one program for 16 heads of a token; returns q [T, Hq, D]."""
    caches = (key_cache, value_cache, slot_mapping)
    sizes = (num_heads, num_kv_heads, head_dim)
    num_rows = (0, qkv.shape[0])
    return _launch(qkv, q_norm, k_norm, eps, cos_sin, position_ids, *caches, *sizes, *num_rows, dense=False)[0]


def qk_norm_rope_kv_split(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    position_ids: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_keys: int,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernels.ops.qk_norm_rope_kv_split`: q [num_rows, Hq, D], k and v [num_rows, Hk, D]."""
    caches = (key_cache, value_cache, slot_mapping)
    sizes = (num_heads, num_kv_heads, head_dim)
    q, k, v = _launch(qkv, q_norm, k_norm, eps, cos_sin, position_ids, *caches, *sizes, num_keys, num_rows, dense=True)
    assert k is not None
    assert v is not None
    return q, k, v


def _launch(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    position_ids: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_keys: int,
    num_rows: int,
    *,
    dense: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    def rows_of(heads: int) -> torch.Tensor:
        return torch.empty(num_rows, heads, head_dim, dtype=qkv.dtype, device=qkv.device)

    q_out = rows_of(num_heads)
    k_out, v_out = (rows_of(num_kv_heads), rows_of(num_kv_heads)) if dense else (None, None)
    if num_rows:
        grid = (num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))
        qk_norm_rope_kv_write_kernel[grid](
            qkv,
            q_norm,
            k_norm,
            cos_sin,
            position_ids,
            slot_mapping,
            key_cache,
            value_cache,
            q_out,
            k_out,
            v_out,
            qkv.shape[0],
            num_keys,
            eps,
            qkv.stride(0),
            cos_sin.stride(0),
            key_cache.stride(0),
            key_cache.stride(1),
            value_cache.stride(0),
            value_cache.stride(1),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_TOKENS=key_cache.shape[2],
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_HEADS=HEADS_PER_PROGRAM,
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            DENSE=dense,
            num_warps=4,
            **dependent_launch(qkv),
        )
    return q_out, k_out, v_out
