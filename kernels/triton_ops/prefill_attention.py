"""Attention of packed queries of many sequences over paged KV, history included (flash attention, arXiv:2307.08691).

Grid: (query tile, KV head, sequence). A tile's rows are (query, head of the group) pairs, so that all query heads of a
KV head share the keys that were loaded, and a short prompt still fills the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.attention_parts import LOG2_E, capped
from kernels.triton_ops.launch import capability, dependent_launch, start_next, wait_for_inputs


@triton.jit
def _attend_blocks(
    q,
    maximum,
    total,
    values,
    start,
    end,
    positions,
    context,
    table,
    key_head,
    value_head,
    key_block_stride,
    value_block_stride,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys start..end-1 into the running softmax. Unmasked blocks must be visible to every row and full."""
    lane = tl.arange(0, BLOCK_D)
    in_head = lane < HEAD_DIM
    for block_start in tl.range(start, end, BLOCK_N):
        key_position = block_start + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table + key_position // BLOCK_TOKENS, mask=key_position < context, other=0).to(tl.int64)
            kv_mask = (key_position < context)[:, None] & in_head[None, :]
        else:
            block = tl.load(table + key_position // BLOCK_TOKENS).to(tl.int64)
            kv_mask = in_head[None, :]
        inner = (key_position % BLOCK_TOKENS) * HEAD_DIM
        key_ptrs = key_head + (block * key_block_stride + inner)[:, None] + lane[None, :]
        value_ptrs = value_head + (block * value_block_stride + inner)[:, None] + lane[None, :]
        if MASKED or HEAD_DIM != BLOCK_D:
            keys = tl.load(key_ptrs, mask=kv_mask, other=0.0)
        else:
            keys = tl.load(key_ptrs)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:
            scores = capped(scores, soft_cap) * LOG2_E
        if MASKED:
            visible = key_position[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible = visible & (key_position[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        if HAS_WINDOW:
            # A row may see nothing yet: its maximum is still -inf, and -inf - -inf is NaN.
            anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        else:
            anchor = new_maximum
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(maximum - anchor)
        if MASKED or HEAD_DIM != BLOCK_D:
            block_values = tl.load(value_ptrs, mask=kv_mask, other=0.0)
        else:
            block_values = tl.load(value_ptrs)
        total = total * fade + tl.sum(weights, axis=1)
        weights = weights.to(block_values.dtype)
        values = tl.dot(weights, block_values, values * fade[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, values


@triton.jit(
    do_not_specialize=["window"],
    # They lie wherever the packed step puts them: a kernel for each alignment would be compiled while requests wait.
    do_not_specialize_on_alignment=["context_lens_ptr", "cu_seqlens_ptr"],
)
def prefill_attention_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    context_lens_ptr,
    cu_seqlens_ptr,
    out_ptr,
    scale,
    soft_cap,
    window,
    table_stride,
    key_block_stride,
    key_head_stride,
    value_block_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    # The last tiles see the longest context: start them first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    wait_for_inputs(PDL)
    first_token = tl.load(cu_seqlens_ptr + sequence)
    query_len = tl.load(cu_seqlens_ptr + sequence + 1) - first_token
    if tile * BLOCK_M >= query_len * GROUP:
        return
    context = tl.load(context_lens_ptr + sequence)
    history = context - query_len

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, row % GROUP
    positions = history + query
    lane = tl.arange(0, BLOCK_D)
    q_mask = (query < query_len)[:, None] & (lane < HEAD_DIM)[None, :]
    q_offset = (first_token + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head
    q_offset = q_offset[:, None] * HEAD_DIM + lane[None, :]
    q = tl.load(q_ptr + q_offset, mask=q_mask, other=0.0)

    first_position = history + tile * BLOCK_M // GROUP
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
    end = history + last_query + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        clear_end = begin
    else:
        clear_end = (first_position + 1) // BLOCK_N * BLOCK_N
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_tables_ptr + sequence * table_stride
    key_head = key_ptr + kv_head * key_head_stride
    value_head = value_ptr + kv_head * value_head_stride
    # exp2 instead of exp: its factor joins the scale, or follows the cap.
    factor = scale if HAS_CAP else scale * LOG2_E
    if not HAS_WINDOW:
        maximum, total, values = _attend_blocks(
            q, maximum, total, values, begin, clear_end, positions, context, table, key_head, value_head,
            key_block_stride, value_block_stride, factor, soft_cap, window,
            HEAD_DIM, BLOCK_D, BLOCK_TOKENS, BLOCK_N, HAS_WINDOW, HAS_CAP, False,
        )  # fmt: skip
    maximum, total, values = _attend_blocks(
        q, maximum, total, values, clear_end, end, positions, context, table, key_head, value_head,
        key_block_stride, value_block_stride, factor, soft_cap, window,
        HEAD_DIM, BLOCK_D, BLOCK_TOKENS, BLOCK_N, HAS_WINDOW, HAS_CAP, True,
    )  # fmt: skip
    tl.store(out_ptr + q_offset, (values / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)


def tile_shape(head_dim: int, max_query_len: int, shared_memory_is_large: bool) -> tuple[int, int, int, int]:
    """(rows of a query tile, keys a step, warps, pipeline stages), as measured on an H200 with 128 elements a head.

    Over 32 layers: 64 prompts of 23 tokens 0.56 ms (0.72 with the tile of long ones), 64 of 128 tokens 3.12 (3.67).
    """
    if head_dim > 128:
        return (64, 32, 4, 2)
    if max_query_len <= 32:
        return (64, 32, 4, 4)
    if not shared_memory_is_large:
        return (64, 64, 4, 2)
    return (128, 64, 4, 3) if max_query_len <= 256 else (128, 128, 8, 3)


def prefill_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_query_len: int,
    tile: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """`kernels.ops.paged_attention` for any query counts: q [T, Hq, D] contiguous; returns [T, Hq, D].

    Rows of q past cu_seqlens_q[B] are left unwritten.
    """
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, group = key_cache.shape[1], num_heads // key_cache.shape[1]
    out = torch.empty_like(q)
    if tile is None and q.element_size() > 2:
        tile = (64, 32, 4, 2)
    elif tile is None:
        tile = tile_shape(head_dim, max_query_len, q.is_cuda and capability(q.device.index) in ((8, 0), (9, 0)))
    block_m, block_n, num_warps, num_stages = tile
    grid = (triton.cdiv(max_query_len * group, block_m), num_kv_heads, context_lens.shape[0])
    if 0 in grid:
        return out
    prefill_attention_kernel[grid](
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        cu_seqlens_q,
        out,
        scale,
        soft_cap or 0.0,
        sliding_window or 0,
        block_tables.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_TOKENS=key_cache.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=soft_cap is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        **dependent_launch(q),
    )
    return out
