"""Attention of one query token a sequence over paged KV (flash decoding: the context is split over programs).

Grid: (sequence, KV head, split). A program serves all query heads of its KV head. Where more than one split of a
context holds tokens, each leaves its maximum, sum and weighted values (float32), and the last to arrive merges them in
split order, so that the result does not depend on who was last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton_ops.attention_parts import (
    LOG2_E,
    capped,
    fold_block,
    merged_splits,
    rotated_key,
    rotated_query,
)
from kernels.triton_ops.launch import (
    arrival_counters,
    dependent_launch,
    num_multiprocessors,
    start_next,
    wait_for_inputs,
)

MAX_SPLITS = 64


@triton.jit(
    do_not_specialize=["num_splits", "window"],
    # They lie wherever the packed step puts them: a kernel for each alignment would be compiled while requests wait.
    do_not_specialize_on_alignment=["context_lens_ptr", "positions_ptr", "slots_ptr"],
)
def decode_attention_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    scale,
    soft_cap,
    window,
    eps,
    num_splits,
    q_stride,
    cos_sin_stride,
    table_stride,
    key_block_stride,
    key_head_stride,
    value_block_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ROTATE: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group = tl.arange(0, BLOCK_G)
    lane = tl.arange(0, BLOCK_D)
    in_group = group < GROUP
    in_head = lane < HEAD_DIM
    q_mask = in_group[:, None] & in_head[None, :]
    if not EARLY:
        wait_for_inputs(PDL)

    context = tl.load(context_lens_ptr + sequence, cache_modifier=".cg")
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context - window, 0)
    span = tl.cdiv(tl.cdiv(context - first, num_splits), BLOCK_N) * BLOCK_N
    begin = first + split * span
    end = tl.minimum(begin + span, context)
    if begin >= context:
        if EARLY:
            wait_for_inputs(PDL)
        return

    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    values = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    head_offset = (kv_head * GROUP + group) * HEAD_DIM
    table = block_tables_ptr + sequence * table_stride
    key_head = key_ptr + kv_head * key_head_stride
    value_head = value_ptr + kv_head * value_head_stride
    if ROTATE:
        # The last position is this step's token, not yet written. With EARLY, the first keys of the split are on their
        # way while the kernel before still computes this step's rows.
        holds_new = end == context
        end = tl.where(holds_new, context - 1, end)
        if EARLY:
            position = begin + tl.arange(0, BLOCK_N)
            block = tl.load(table + position // BLOCK_TOKENS, position < end, 0, cache_modifier=".cg").to(tl.int64)
            inner = (position % BLOCK_TOKENS) * HEAD_DIM
            kv_mask = (position < end)[:, None] & in_head[None, :]
            keys = tl.load(
                key_head + (block * key_block_stride + inner)[:, None] + lane[None, :], mask=kv_mask, other=0.0
            )
            first_values = tl.load(
                value_head + (block * value_block_stride + inner)[:, None] + lane[None, :], mask=kv_mask, other=0.0
            )
        angles = cos_sin_ptr + tl.load(positions_ptr + sequence, cache_modifier=".cg").to(tl.int64) * cos_sin_stride
        slot = tl.load(slots_ptr + sequence, cache_modifier=".cg")
        if EARLY:
            wait_for_inputs(PDL)
        row_ptr = q_ptr + sequence * q_stride
        q = rotated_query(row_ptr, head_offset, angles, q_norm_ptr, eps, q_mask, lane, HEAD_DIM, HAS_QK_NORM)
        if holds_new:
            key_row = row_ptr + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM
            key = rotated_key(key_row, angles, k_norm_ptr, eps, lane, HEAD_DIM, HAS_QK_NORM)
            value = tl.load(key_row + NUM_KV_HEADS * HEAD_DIM + lane, mask=in_head, other=0.0)
            written = in_head & (slot >= 0)
            offset = (slot % BLOCK_TOKENS) * HEAD_DIM + lane
            tl.store(key_head + slot // BLOCK_TOKENS * key_block_stride + offset, key, written)
            tl.store(value_head + slot // BLOCK_TOKENS * value_block_stride + offset, value, written)
            maximum = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scale
            if HAS_CAP:
                maximum = capped(maximum, soft_cap)
            maximum = maximum * LOG2_E
            total = tl.full([BLOCK_G], 1.0, tl.float32)
            values += value.to(tl.float32)[None, :]
        if EARLY:
            if begin < end:
                maximum, total, values = fold_block(
                    q, keys, first_values, position < end, maximum, total, values, scale, soft_cap, HAS_CAP
                )
            begin += BLOCK_N
    else:
        q = tl.load(q_ptr + sequence * q_stride + head_offset[:, None] + lane[None, :], mask=q_mask, other=0.0)

    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK_N)
        valid = position < end
        block = tl.load(table + position // BLOCK_TOKENS, mask=valid, other=0).to(tl.int64)
        inner = (position % BLOCK_TOKENS) * HEAD_DIM
        kv_mask = valid[:, None] & in_head[None, :]
        keys = tl.load(key_head + (block * key_block_stride + inner)[:, None] + lane[None, :], mask=kv_mask, other=0.0)
        block_values = tl.load(
            value_head + (block * value_block_stride + inner)[:, None] + lane[None, :], mask=kv_mask, other=0.0
        )
        maximum, total, values = fold_block(
            q, keys, block_values, valid, maximum, total, values, scale, soft_cap, HAS_CAP
        )

    out_ptrs = out_ptr + sequence * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head_offset[:, None] + lane[None, :]
    used_splits = tl.cdiv(context - first, span)
    if used_splits == 1:
        tl.store(out_ptrs, (values / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        ROW: tl.constexpr = BLOCK_D + 2
        pair = sequence * NUM_KV_HEADS + kv_head
        partial = partial_ptr + (pair * num_splits * GROUP + group) * ROW
        mine = partial + split * (GROUP * ROW)
        tl.store(mine[:, None] + lane[None, :], values, mask=in_group[:, None])
        tl.store(mine + BLOCK_D, maximum, mask=in_group)
        tl.store(mine + BLOCK_D + 1, total, mask=in_group)
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + pair, 1) == used_splits - 1:
            merged = merged_splits(
                partial_ptr + pair * num_splits * GROUP * ROW,
                used_splits,
                lane,
                GROUP,
                GROUP_ROWS,
                BLOCK_D,
                MERGE_SPLITS,
            )
            row = tl.arange(0, GROUP_ROWS)
            merged_ptrs = out_ptr + sequence * (NUM_KV_HEADS * GROUP * HEAD_DIM) + lane[None, :]
            merged_ptrs += ((kv_head * GROUP + row) * HEAD_DIM)[:, None]
            merged_mask = (row < GROUP)[:, None] & in_head[None, :]
            tl.store(merged_ptrs, merged.to(out_ptr.dtype.element_ty), mask=merged_mask)
            tl.store(counters_ptr + pair, 0)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Inputs of the fused form: the kernel takes rows of QKV, norms and rotates q and k, and writes K and V."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor
    position_ids: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Keys a step, pipeline stages, warps, and how many programs share one context."""

    block_n: int
    stages: int
    num_warps: int
    num_splits: int


def decode_tiling(num_programs: int, max_context_len: int, multiprocessors: int) -> DecodeTiling:
    """Tiling for `num_programs` (sequence, KV head) pairs: about four programs a multiprocessor.

    H200, 32 / 8 heads, in the decode step: 1 × 190 is fastest in splits of 32 keys, 1 × 2064 in 16 splits, 8 × 190 in
    3, 8 × 2064 in 8; 16 or more rows of 190 are best unsplit.
    """
    block_n, stages, least_keys = 64, 3, 512
    if num_programs <= 16:
        block_n, stages, least_keys = (32, 3, 32) if max_context_len <= 512 else (64, 4, 128)
    elif num_programs <= 64:
        least_keys = 64
    wanted = max(1, 4 * multiprocessors // num_programs)
    return DecodeTiling(block_n, stages, 4, min(wanted, triton.cdiv(max_context_len, least_keys), MAX_SPLITS))


def decode_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_heads: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_context_len: int,
    rotation: Rotation | None = None,
    tiling: DecodeTiling | None = None,
    early_loads: bool = False,
) -> torch.Tensor:
    """One token a sequence: q [B, Hq, D], or with `rotation` rows of QKV [B, (Hq + 2 Hk) * D]; returns [B, Hq, D].

    Caches, tables and lengths as in `kernels.ops.paged_attention`. A row whose context is 0 is padding: its output is
    unspecified. `max_context_len` only chooses the split, which a captured graph fixes; real lengths are read on the
    device. `early_loads` (with `rotation`): the kernel before was launched with `next_starts_late`, so tables, lengths
    and old keys may be read before it has completed; done where a program has few keys to read.
    """
    num_sequences, head_dim = q.shape[0], key_cache.shape[3]
    num_kv_heads = key_cache.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty(num_sequences, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if num_sequences == 0:
        return out
    pairs = num_sequences * num_kv_heads
    multiprocessors = num_multiprocessors(q.device.index) if q.is_cuda else 132
    if tiling is None:
        visible = max_context_len if sliding_window is None else min(max_context_len, sliding_window)
        tiling = decode_tiling(pairs, visible, multiprocessors)
    num_splits = tiling.num_splits
    block_d = triton.next_power_of_2(head_dim)
    partial = torch.empty(pairs * num_splits * group * (block_d + 2), dtype=torch.float32, device=q.device)
    decode_attention_kernel[(num_sequences, num_kv_heads, num_splits)](
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        out,
        partial,
        arrival_counters(q.device, pairs),
        rotation.q_norm if rotation else None,
        rotation.k_norm if rotation else None,
        rotation.cos_sin if rotation else None,
        rotation.position_ids if rotation else None,
        rotation.slot_mapping if rotation else None,
        scale,
        soft_cap or 0.0,
        sliding_window or 0,
        rotation.eps if rotation else 0.0,
        num_splits,
        q.stride(0),
        rotation.cos_sin.stride(0) if rotation else 0,
        block_tables.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_ROWS=triton.next_power_of_2(group),
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_TOKENS=key_cache.shape[2],
        BLOCK_N=tiling.block_n,
        MERGE_SPLITS=MAX_SPLITS,
        STAGES=tiling.stages,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=soft_cap is not None,
        ROTATE=rotation is not None,
        HAS_QK_NORM=rotation is not None and rotation.q_norm is not None,
        EARLY=early_loads and rotation is not None and pairs * num_splits <= 2 * multiprocessors,
        num_warps=tiling.num_warps,
        **dependent_launch(q),
    )
    return out
