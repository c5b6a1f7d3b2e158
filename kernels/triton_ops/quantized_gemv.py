"""Product of one row with a quantised matrix, with its neighbours: RMS norm before it, bias, gate, residual after it.

The time is that of streaming the planes once. A program takes a few weight rows; each group's sum of q × x is made in
float32 and scaled once, so a weight costs an extraction and one multiplication.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.gated_activation import activate
from kernels.triton_ops.launch import dependent_launch, prefetch_lines, start_next, wait_for_inputs
from kernels.triton_ops.quantized_planes import plane_format
from kernels.triton_ops.quantized_tiles import BIAS, float_values, group_scales, has_assembler, load_tile
from kernels.weights import QuantizedWeight


@triton.jit
def _row_products(
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
    x,
    x_upper,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_NESTED: tl.constexpr,
    GROUPS_A_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ASM: tl.constexpr,
):
    """Products of weight rows `row` [ROWS] over bytes start..+BLOCK_B, by group of bytes: [ROWS, BLOCK_B / GROUP].

    x and x_upper [1, BLOCK_B / GROUP, GROUP] float32 belong to the low and the high nibbles.
    """
    low, high, shift, group, in_groups = load_tile(low_ptr, high_ptr, row, start, row_bytes, BITS, GROUP, ROWS, BLOCK_B)
    values = float_values(low, high, shift, False, BITS, False, ASM).to(tl.float32)
    scale, offset = group_scales(
        scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row[:, None], group, in_groups, groups_a_row,
        ZERO, HAS_MINIMUM, IS_NESTED, GROUPS_A_BLOCK,
    )  # fmt: skip
    product = scale * tl.sum(values * x, axis=2) + (offset - BIAS * scale) * tl.sum(x, axis=2)
    if BITS < 8:
        values = float_values(low, high, shift, True, BITS, False, ASM).to(tl.float32)
        scale, offset = group_scales(
            scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row[:, None], group + 32 // GROUP, in_groups,
            groups_a_row, ZERO, HAS_MINIMUM, IS_NESTED, GROUPS_A_BLOCK,
        )  # fmt: skip
        product += scale * tl.sum(values * x_upper, axis=2) + (offset - BIAS * scale) * tl.sum(x_upper, axis=2)
    return product


@triton.jit
def _normed(x_ptr, norm_ptr, at, mask, factor, HAS_NORM: tl.constexpr):
    """x[at] in float32, normed and rounded as a norm of its own would leave it."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        x = x * factor * tl.load(norm_ptr + at, mask=mask, other=0.0)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def quantized_gemv_kernel(
    x_ptr,
    low_ptr,
    high_ptr,
    scale_ptr,
    minimum_ptr,
    sub_scale_ptr,
    sub_minimum_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_features,
    in_features,
    eps,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GROUPS: tl.constexpr = BLOCK_B // GROUP
    GROUPS_A_BLOCK: tl.constexpr = 256 // GROUP
    out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = out_row < out_features
    row = tl.minimum(out_row, out_features - 1)
    row_bytes = in_features if BITS == 8 else in_features // 2
    groups_a_row = in_features // GROUP
    if PDL > 0:
        line = tl.minimum(tl.arange(0, BLOCK_B // 128) * 128, row_bytes - 1)
        prefetch_lines(low_ptr + row.to(tl.int64)[:, None] * row_bytes + line[None, :])
        if ACTIVATION != "":
            prefetch_lines(low_ptr + (row + out_features).to(tl.int64)[:, None] * row_bytes + line[None, :])
    wait_for_inputs(PDL)

    factor = 1.0
    if HAS_NORM:
        squares = tl.zeros([BLOCK_NORM], tl.float32)
        for at in tl.range(0, in_features, BLOCK_NORM):
            k = at + tl.arange(0, BLOCK_NORM)
            x = tl.load(x_ptr + k, mask=k < in_features, other=0.0).to(tl.float32)
            squares += x * x
        factor = tl.rsqrt(tl.sum(squares, axis=0) / in_features + eps)
    product = tl.zeros([ROWS, GROUPS], tl.float32)
    up = tl.zeros([ROWS, GROUPS], tl.float32)
    for start in tl.range(0, row_bytes, BLOCK_B):
        byte = start + tl.arange(0, BLOCK_B)
        element = byte if BITS == 8 else byte // 32 * 64 + byte % 32
        mask = byte < row_bytes
        x = tl.reshape(_normed(x_ptr, norm_ptr, element, mask, factor, HAS_NORM), (1, GROUPS, GROUP))
        x_upper = x
        if BITS < 8:
            x_upper = _normed(x_ptr, norm_ptr, element + 32, mask, factor, HAS_NORM)
            x_upper = tl.reshape(x_upper, (1, GROUPS, GROUP))
        product += _row_products(
            low_ptr, high_ptr, scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row, start, row_bytes,
            groups_a_row, x, x_upper, BITS, GROUP, ZERO, HAS_MINIMUM, IS_NESTED, GROUPS_A_BLOCK, ROWS, BLOCK_B, ASM,
        )  # fmt: skip
        if ACTIVATION != "":
            up += _row_products(
                low_ptr, high_ptr, scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row + out_features, start,
                row_bytes, groups_a_row, x, x_upper, BITS, GROUP, ZERO, HAS_MINIMUM, IS_NESTED, GROUPS_A_BLOCK, ROWS,
                BLOCK_B, ASM,
            )  # fmt: skip
    total = tl.sum(product, axis=1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + out_row, mask=in_rows, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        up_total = tl.sum(up, axis=1)
        if HAS_BIAS:
            up_total += tl.load(bias_ptr + out_features + out_row, mask=in_rows, other=0.0).to(tl.float32)
        total = activate(total, ACTIVATION) * up_total
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + out_row, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_row, total.to(out_ptr.dtype.element_ty), mask=in_rows)


def quantized_gemv(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    rows_per_program: int,
    block_bytes: int,
    num_warps: int,
    next_starts_late: bool = False,
) -> None:
    """Write activation(W · norm(x) + bias) + residual for one row x [1, in] into out [1, features].

    weight in planes, [features, in] or [2 * features, in] = (gate | up) where `activation` is not "".
    """
    spec, planes = plane_format(weight), weight.tensors
    out_features, in_features = out.shape[-1], weight.shape[1]
    row_bytes = in_features if spec.bits == 8 else in_features // 2
    block_bytes = min(block_bytes, max(128, triton.next_power_of_2(row_bytes)))
    low = planes["low"]
    quantized_gemv_kernel[(triton.cdiv(out_features, rows_per_program),)](
        x,
        low,
        planes.get("high", low),
        planes["scale"],
        planes.get("minimum", planes["scale"]),
        planes.get("sub_scale", planes["scale"]),
        planes.get("sub_minimum", planes["scale"]),
        norm_weight,
        bias,
        residual,
        out,
        out_features,
        in_features,
        eps,
        BITS=spec.bits,
        GROUP=spec.group,
        ZERO=spec.zero,
        HAS_MINIMUM=spec.has_minimum,
        IS_NESTED=spec.is_nested,
        ROWS=rows_per_program,
        BLOCK_B=block_bytes,
        BLOCK_NORM=min(4096, triton.next_power_of_2(in_features)),
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        ASM=has_assembler(),
        num_warps=num_warps,
        **dependent_launch(x, next_starts_late),
    )
