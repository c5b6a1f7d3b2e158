"""Product of a few rows (2 to 64) with a quantised matrix on tensor cores, with bias, gate or residual after it.

The time is that of streaming the planes once. Weights become float16 in registers (scaled up by 64: small weights would
be subnormal) and are the left operand; rows become float16, scaled down by 16, which holds activations up to a million.
With SPLIT_K over 1, programs share a band along K; the last to arrive adds the parts in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton_ops.gated_activation import activate
from kernels.triton_ops.launch import arrival_counters, dependent_launch, prefetch_lines, start_next, wait_for_inputs
from kernels.triton_ops.quantized_planes import plane_format
from kernels.triton_ops.quantized_tiles import float_values, group_scales, has_assembler, load_tile
from kernels.weights import QuantizedWeight

WEIGHT_SCALE, ROW_SCALE = tl.constexpr(64.0), tl.constexpr(0.0625)


@triton.jit
def _weights(
    low_ptr,
    high_ptr,
    scale_ptr,
    minimum_ptr,
    sub_scale_ptr,
    sub_minimum_ptr,
    row,
    start,
    row_bytes,
    groups_a_row,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows `row` [ROWS] over bytes start..+BLOCK_B: (low, high) nibbles' weights × 64, float16 [ROWS, BLOCK_B]."""
    GROUPS_A_BLOCK: tl.constexpr = 256 // GROUP
    low, high, shift, group, in_groups = load_tile(low_ptr, high_ptr, row, start, row_bytes, BITS, GROUP, ROWS, BLOCK_B)
    scale, offset = group_scales(
        scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row[:, None], group, in_groups, groups_a_row,
        ZERO, HAS_MINIMUM, IS_NESTED, GROUPS_A_BLOCK,
    )  # fmt: skip
    values = float_values(low, high, shift, False, BITS, True, ASM)
    factor, addend = (scale * WEIGHT_SCALE).to(tl.float16), (offset * WEIGHT_SCALE).to(tl.float16)
    weights = tl.reshape(values * factor[:, :, None] + addend[:, :, None], (ROWS, BLOCK_B))
    upper_weights = weights
    if BITS < 8:
        scale, offset = group_scales(
            scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row[:, None], group + 32 // GROUP, in_groups,
            groups_a_row, ZERO, HAS_MINIMUM, IS_NESTED, GROUPS_A_BLOCK,
        )  # fmt: skip
        values = float_values(low, high, shift, True, BITS, True, ASM)
        factor, addend = (scale * WEIGHT_SCALE).to(tl.float16), (offset * WEIGHT_SCALE).to(tl.float16)
        upper_weights = tl.reshape(values * factor[:, :, None] + addend[:, :, None], (ROWS, BLOCK_B))
    return weights, upper_weights


@triton.jit(do_not_specialize=["num_rows"])
def quantized_product_kernel(
    x_ptr,
    low_ptr,
    high_ptr,
    scale_ptr,
    minimum_ptr,
    sub_scale_ptr,
    sub_minimum_ptr,
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
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_NESTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GATED: tl.constexpr = ACTIVATION != ""
    band = tl.program_id(0)
    split = tl.program_id(1)
    row_bytes = in_features if BITS == 8 else in_features // 2
    groups_a_row = in_features // GROUP
    span = tl.cdiv(tl.cdiv(row_bytes, BLOCK_B), SPLIT_K) * BLOCK_B
    begin = split * span
    end = tl.minimum(begin + span, row_bytes)
    n = band * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    in_n, in_m = n < out_features, m < num_rows
    row = tl.minimum(n, out_features - 1)
    if PDL > 0:
        prefetch_lines(low_ptr + row.to(tl.int64) * row_bytes + begin)
        if GATED:
            prefetch_lines(low_ptr + (row + out_features).to(tl.int64) * row_bytes + begin)
    wait_for_inputs(PDL)

    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_B, num_stages=STAGES):
        byte = start + tl.arange(0, BLOCK_B)
        element = byte if BITS == 8 else byte // 32 * 64 + byte % 32
        x_ptrs = x_ptr + m[None, :] * x_stride + element[:, None]
        x_mask = in_m[None, :] & (byte < row_bytes)[:, None]
        x = (tl.load(x_ptrs, mask=x_mask, other=0.0).to(tl.float32) * ROW_SCALE).to(tl.float16)
        x_upper = x
        if BITS < 8:
            x_upper = (tl.load(x_ptrs + 32, mask=x_mask, other=0.0).to(tl.float32) * ROW_SCALE).to(tl.float16)
        weights, upper_weights = _weights(
            low_ptr, high_ptr, scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row, start, row_bytes,
            groups_a_row, BITS, GROUP, ZERO, HAS_MINIMUM, IS_NESTED, BLOCK_N, BLOCK_B, ASM,
        )  # fmt: skip
        product = tl.dot(weights, x, product)
        if BITS < 8:
            product = tl.dot(upper_weights, x_upper, product)
        if GATED:
            weights, upper_weights = _weights(
                low_ptr, high_ptr, scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row + out_features, start,
                row_bytes, groups_a_row, BITS, GROUP, ZERO, HAS_MINIMUM, IS_NESTED, BLOCK_N, BLOCK_B, ASM,
            )  # fmt: skip
            up = tl.dot(weights, x, up)
            if BITS < 8:
                up = tl.dot(upper_weights, x_upper, up)
    product = tl.trans(product) * (1.0 / (WEIGHT_SCALE * ROW_SCALE))
    up = tl.trans(up) * (1.0 / (WEIGHT_SCALE * ROW_SCALE))

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
class QuantizedTiling:
    """`block_n` weight rows and `block_bytes` of the low plane a step."""

    block_n: int
    block_bytes: int
    split_k: int
    stages: int
    num_warps: int


def quantized_product(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    tiling: QuantizedTiling,
    next_starts_late: bool = False,
) -> None:
    """Write activation(x Wᵀ + bias) + residual for x [M, in], M ≤ 64, into out [M, features] (contiguous).

    weight in planes, [features, in] or [2 * features, in] = (gate | up) where `activation` is not "".
    """
    spec, planes = plane_format(weight), weight.tensors
    num_rows, in_features = x.shape
    out_features = out.shape[1]
    block_m = max(16, triton.next_power_of_2(num_rows))
    bands = triton.cdiv(out_features, tiling.block_n)
    parts = 2 if activation else 1
    size = bands * tiling.split_k * parts * block_m * tiling.block_n if tiling.split_k > 1 else 1
    low = planes["low"]
    quantized_product_kernel[(bands, tiling.split_k)](
        x,
        low,
        planes.get("high", low),
        planes["scale"],
        planes.get("minimum", planes["scale"]),
        planes.get("sub_scale", planes["scale"]),
        planes.get("sub_minimum", planes["scale"]),
        bias,
        residual,
        out,
        torch.empty(size, dtype=torch.float32, device=x.device),
        arrival_counters(x.device, bands),
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        BITS=spec.bits,
        GROUP=spec.group,
        ZERO=spec.zero,
        HAS_MINIMUM=spec.has_minimum,
        IS_NESTED=spec.is_nested,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_B=tiling.block_bytes,
        SPLIT_K=tiling.split_k,
        STAGES=tiling.stages,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        ASM=has_assembler(),
        num_warps=tiling.num_warps,
        **dependent_launch(x, next_starts_late),
    )
