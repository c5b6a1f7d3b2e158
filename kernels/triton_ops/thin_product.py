"""Product of a few rows (2 to 64) with a weight matrix on tensor cores, with bias, gate or residual after it.

The time is that of streaming the weights once, so a program takes a band of weight rows through a deep pipeline, and
asks for the band's first part (into L2) before it waits for the rows. With SPLIT_K over 1, programs share a band along
K; the last to arrive adds the parts in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton_ops.gated_activation import activate
from kernels.triton_ops.launch import arrival_counters, dependent_launch, prefetch_lines, start_next, wait_for_inputs


@triton.jit
def _prefetch_band(weight_ptr, first_row, in_features, k_begin, BLOCK_N: tl.constexpr, PREFETCH_K: tl.constexpr):
    """Columns k_begin.. of rows first_row..+BLOCK_N, one request a 128-byte line (64 elements of 2 bytes)."""
    row = first_row + tl.arange(0, BLOCK_N)
    column = k_begin + tl.arange(0, PREFETCH_K // 64) * 64
    column = tl.minimum(column, in_features - 1)
    prefetch_lines(weight_ptr + row.to(tl.int64)[:, None] * in_features + column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def thin_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    num_rows,
    out_features,
    in_features,
    x_stride,
    residual_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GATED: tl.constexpr = ACTIVATION != ""
    band = tl.program_id(0)
    split = tl.program_id(1)
    k_span = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K) * BLOCK_K
    k_begin = split * k_span
    k_end = tl.minimum(k_begin + k_span, in_features)
    n = band * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    in_n, in_m = n < out_features, m < num_rows
    k = tl.arange(0, BLOCK_K)
    up_offset = out_features.to(tl.int64) * in_features
    if PDL > 0 and PREFETCH_K > 0 and EVEN_N:
        _prefetch_band(weight_ptr, band * BLOCK_N, in_features, k_begin, BLOCK_N, PREFETCH_K)
        if GATED:
            _prefetch_band(weight_ptr + up_offset, band * BLOCK_N, in_features, k_begin, BLOCK_N, PREFETCH_K)
    wait_for_inputs(PDL)

    if WEIGHTS_FIRST:
        product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * in_features + k[None, :]
    x_rows = x_ptr + m[:, None] * x_stride + k[None, :]
    for start in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
        x_mask = in_m[:, None]
        weight_mask = in_n[:, None]
        if not EVEN_K:
            x_mask = x_mask & (start + k < k_end)[None, :]
            weight_mask = weight_mask & (start + k < k_end)[None, :]
        x = tl.load(x_rows + start, mask=x_mask, other=0.0)
        if EVEN_K and EVEN_N:
            weight = tl.load(weight_rows + start, eviction_policy="evict_first")
        else:
            weight = tl.load(weight_rows + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        if WEIGHTS_FIRST:
            product = tl.dot(weight, tl.trans(x), product, input_precision="ieee")
        else:
            product = tl.dot(x, tl.trans(weight), product, input_precision="ieee")
        if GATED:
            if EVEN_K and EVEN_N:
                up_weight = tl.load(weight_rows + up_offset + start, eviction_policy="evict_first")
            else:
                up_weight = tl.load(weight_rows + up_offset + start, weight_mask, 0.0, eviction_policy="evict_first")
            if WEIGHTS_FIRST:
                up = tl.dot(up_weight, tl.trans(x), up, input_precision="ieee")
            else:
                up = tl.dot(x, tl.trans(up_weight), up, input_precision="ieee")
    if WEIGHTS_FIRST:
        product = tl.trans(product)
        up = tl.trans(up)

    if SPLIT_K > 1:
        AREA: tl.constexpr = BLOCK_M * BLOCK_N
        PARTS: tl.constexpr = 2 if GATED else 1
        tile = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = partial_ptr + band.to(tl.int64) * (SPLIT_K * PARTS * AREA) + tile
        tl.store(parts + split * (PARTS * AREA), product, mask=in_m[:, None])
        if GATED:
            tl.store(parts + split * (PARTS * AREA) + AREA, up, mask=in_m[:, None])
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + band, 1) != SPLIT_K - 1:
            return
        product = tl.load(parts, mask=in_m[:, None], other=0.0, cache_modifier=".cg")
        if GATED:
            up = tl.load(parts + AREA, mask=in_m[:, None], other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT_K):
            theirs = parts + other * (PARTS * AREA)
            product += tl.load(theirs, mask=in_m[:, None], other=0.0, cache_modifier=".cg")
            if GATED:
                up += tl.load(theirs + AREA, mask=in_m[:, None], other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr + band, 0)

    mask = in_m[:, None] & in_n[None, :]
    if HAS_BIAS:
        product += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + out_features + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        product = activate(product, ACTIVATION) * up
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m[:, None] * residual_stride + n[None, :], mask=mask, other=0.0)
        product += residual.to(tl.float32)
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class ThinTiling:
    """Tile sizes in elements; `prefetch_k` columns of a band are asked for before the wait; `weights_first` makes the
    weight the left operand, so that few rows fill the narrow side of the tensor-core tile."""

    block_n: int
    block_k: int
    split_k: int
    stages: int
    num_warps: int
    prefetch_k: int = 0
    weights_first: bool = True


def thin_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    tiling: ThinTiling,
    next_starts_late: bool = False,
) -> None:
    """Write activation(x Wᵀ + bias) + residual for x [M, in], M ≤ 64, into out [M, features] (contiguous).

    weight [features, in], or [2 * features, in] = (gate | up) where `activation` is not "".
    """
    num_rows, in_features = x.shape
    out_features = out.shape[1]
    block_m = (
        max(8, triton.next_power_of_2(num_rows)) if tiling.weights_first else max(16, triton.next_power_of_2(num_rows))
    )
    bands = triton.cdiv(out_features, tiling.block_n)
    gated = activation != ""
    partial_size = bands * tiling.split_k * (2 if gated else 1) * block_m * tiling.block_n if tiling.split_k > 1 else 1
    partial = torch.empty(partial_size, dtype=torch.float32, device=x.device)
    thin_product_kernel[(bands, tiling.split_k)](
        x,
        weight,
        bias,
        residual,
        out,
        partial,
        arrival_counters(x.device, bands),
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        SPLIT_K=tiling.split_k,
        STAGES=tiling.stages,
        PREFETCH_K=tiling.prefetch_k,
        EVEN_N=out_features % tiling.block_n == 0,
        EVEN_K=in_features % tiling.block_k == 0,
        WEIGHTS_FIRST=tiling.weights_first,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        num_warps=tiling.num_warps,
        **dependent_launch(x, next_starts_late),
    )
