"""Product of one row with a weight matrix, with its neighbours: RMS norm before it, bias, gate or residual after it.

The time is that of streaming the weights once: a program takes a few weight rows with all of K in one tile, loads them
before it waits for the row, and norms the row in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.gated_activation import activate
from kernels.triton_ops.launch import dependent_launch, prefetch_lines, start_next, wait_for_inputs

# Beyond this many elements a row is taken in steps.
MAX_BLOCK_K = 16384


@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_features,
    in_features,
    eps,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_STEP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < out_features
    k = tl.arange(0, BLOCK_K)
    in_k = k < in_features
    mask = in_rows[:, None] & in_k[None, :]
    weight_ptrs = weight_ptr + row.to(tl.int64)[:, None] * in_features + k[None, :]
    weight = tl.load(weight_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    if ACTIVATION != "":
        up_offset = out_features.to(tl.int64) * in_features
        up_weight = tl.load(weight_ptrs + up_offset, mask=mask, other=0.0, eviction_policy="evict_first")
    if HAS_NORM:
        norm = tl.load(norm_ptr + k, mask=in_k, other=0.0)
    if PDL > 0 and tl.program_id(0) < AHEAD:
        # What is on the chip now waits; ask for the rows of the programs that follow, so that memory does not.
        ahead = tl.minimum(row + AHEAD * ROWS, out_features - 1).to(tl.int64)[:, None] * in_features
        line = tl.minimum(tl.arange(0, BLOCK_K // 64) * 64, in_features - 1)[None, :]
        prefetch_lines(weight_ptr + ahead + line)
        if ACTIVATION != "":
            prefetch_lines(weight_ptr + up_offset + ahead + line)
    wait_for_inputs(PDL)

    x = tl.load(x_ptr + k, mask=in_k, other=0.0).to(tl.float32)
    if HAS_NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / in_features + eps) * norm
        # Rounded as a separate norm would leave it.
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    product = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    if ACTIVATION != "":
        up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
    if not ONE_STEP:
        for start in tl.range(BLOCK_K, in_features, BLOCK_K):
            in_k = start + k < in_features
            mask = in_rows[:, None] & in_k[None, :]
            x = tl.load(x_ptr + start + k, mask=in_k, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first")
            product += tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
            if ACTIVATION != "":
                up_weight = tl.load(weight_ptrs + up_offset + start, mask, 0.0, eviction_policy="evict_first")
                up += tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
    if HAS_BIAS:
        product += tl.load(bias_ptr + row, mask=in_rows, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            up += tl.load(bias_ptr + out_features + row, mask=in_rows, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        product = activate(product, ACTIVATION) * up
    if HAS_RESIDUAL:
        product += tl.load(residual_ptr + row, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, product.to(out_ptr.dtype.element_ty), mask=in_rows)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    rows_per_program: int,
    num_warps: int,
    prefetch_programs: int = 0,
    next_starts_late: bool = False,
) -> None:
    """Write activation(W · norm(x) + bias) + residual for one row x [1, in] into out [1, features].

    weight [features, in], or [2 * features, in] = (gate | up) where `activation` is not "". A norm needs
    in_features ≤ 16,384. The first `prefetch_programs` programs ask L2 for the rows of as many after them.
    """
    out_features, in_features = out.shape[-1], weight.shape[1]
    block_k = min(MAX_BLOCK_K, triton.next_power_of_2(in_features))
    gemv_kernel[(triton.cdiv(out_features, rows_per_program),)](
        x,
        weight,
        norm_weight,
        bias,
        residual,
        out,
        out_features,
        in_features,
        eps,
        ROWS=rows_per_program,
        BLOCK_K=block_k,
        ONE_STEP=in_features <= block_k,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        AHEAD=prefetch_programs,
        num_warps=num_warps,
        **dependent_launch(x, next_starts_late),
    )
