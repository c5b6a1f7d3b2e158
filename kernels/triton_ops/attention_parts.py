"""Pieces of the attention kernels: the running softmax, the merge of splits, norm and rotation of q and k."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap), in float32."""
    return soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)


@triton.jit
def fold_block(q, keys, block_values, valid, maximum, total, values, scale, soft_cap, HAS_CAP: tl.constexpr):
    """One block of keys and values into the running softmax (maxima are in units of log2)."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:
        scores = capped(scores, soft_cap)
    scores = tl.where(valid[None, :], scores * LOG2_E, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_maximum[:, None])
    fade = tl.exp2(maximum - new_maximum)
    total = total * fade + tl.sum(weights, axis=1)
    values = tl.dot(weights.to(keys.dtype), block_values, values * fade[:, None], input_precision="ieee")
    return new_maximum, total, values


@triton.jit
def merged_splits(
    parts, used_splits, lane, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr
):
    """Softmax-weighted mean of the splits' partial results at `parts` [splits, GROUP, D + 2]: [ROWS, D] float32.

    Eight splits' values are read at once: one at a time, each would wait for the one before.
    """
    STRIDE: tl.constexpr = BLOCK_D + 2
    row = tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS)
    used = (split < used_splits)[:, None] & (row < GROUP)[None, :]
    scalars = parts + (split[:, None] * GROUP + row[None, :]) * STRIDE + BLOCK_D
    maxima = tl.load(scalars, mask=used, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(scalars + 1, mask=used, other=0.0, cache_modifier=".cg")
    maximum = tl.where(row < GROUP, tl.max(maxima, axis=0), 0.0)
    total = tl.sum(tl.exp2(maxima - maximum[None, :]) * totals, axis=0)
    merged = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, used_splits, 8):
        eight = start + tl.arange(0, 8)
        present = (eight < used_splits)[:, None] & (row < GROUP)[None, :]
        part = parts + (eight[:, None] * GROUP + row[None, :]) * STRIDE
        part_maxima = tl.load(part + BLOCK_D, mask=present, other=float("-inf"), cache_modifier=".cg")
        part_values = tl.load(part[:, :, None] + lane[None, None, :], present[:, :, None], 0.0, cache_modifier=".cg")
        merged += tl.sum(part_values * tl.exp2(part_maxima - maximum[None, :])[:, :, None], axis=0)
    return merged / tl.where(row < GROUP, total, 1.0)[:, None]


@triton.jit
def _sides(lane, HEAD_DIM: tl.constexpr):
    """For each element of a head: the other element of its pair, its angle's index, and the sign of the sine."""
    HALF: tl.constexpr = HEAD_DIM // 2
    in_low = lane < HALF
    partner = tl.where(in_low, lane + HALF, lane - HALF)
    return partner, tl.where(in_low, lane, lane - HALF), tl.where(in_low, -1.0, 1.0)


@triton.jit
def rotated_query(
    row_ptr, head_offset, angles, norm_ptr, eps, mask, lane, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Query heads of one token at row_ptr + head_offset [G], normed and rotated: [G, D] in the dtype of the row."""
    partner, angle, sign = _sides(lane, HEAD_DIM)
    in_head = lane < HEAD_DIM
    q = tl.load(row_ptr + head_offset[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    q_partner = tl.load(row_ptr + head_offset[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(q * q, axis=1) / HEAD_DIM + eps)[:, None]
        q = q * inverse * tl.load(norm_ptr + lane, mask=in_head, other=0.0)[None, :]
        q_partner = q_partner * inverse * tl.load(norm_ptr + partner, mask=in_head, other=0.0)[None, :]
        q = q.to(row_ptr.dtype.element_ty).to(tl.float32)
        q_partner = q_partner.to(row_ptr.dtype.element_ty).to(tl.float32)
    cos = tl.load(angles + angle, mask=in_head, other=0.0)
    sin = tl.load(angles + HEAD_DIM // 2 + angle, mask=in_head, other=0.0) * sign
    return (q * cos[None, :] + q_partner * sin[None, :]).to(row_ptr.dtype.element_ty)


@triton.jit
def rotated_key(key_row, angles, norm_ptr, eps, lane, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """One key head [D] at key_row, normed and rotated, in the dtype of the row."""
    partner, angle, sign = _sides(lane, HEAD_DIM)
    in_head = lane < HEAD_DIM
    key = tl.load(key_row + lane, mask=in_head, other=0.0).to(tl.float32)
    key_partner = tl.load(key_row + partner, mask=in_head, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(key * key, axis=0) / HEAD_DIM + eps)
        key = key * inverse * tl.load(norm_ptr + lane, mask=in_head, other=0.0)
        key_partner = key_partner * inverse * tl.load(norm_ptr + partner, mask=in_head, other=0.0)
        key = key.to(key_row.dtype.element_ty).to(tl.float32)
        key_partner = key_partner.to(key_row.dtype.element_ty).to(tl.float32)
    cos = tl.load(angles + angle, mask=in_head, other=0.0)
    sin = tl.load(angles + HEAD_DIM // 2 + angle, mask=in_head, other=0.0) * sign
    return (key * cos + key_partner * sin).to(key_row.dtype.element_ty)
