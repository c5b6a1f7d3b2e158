"""Norm and rotation of a query tile and of one key, inside the decode attention kernel."""

from __future__ import annotations

import triton
import triton.language as tl


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
