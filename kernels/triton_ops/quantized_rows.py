"""Quantised rows as plain ones: for products of many rows by the vendor library, and for embeddings."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs
from kernels.triton_ops.quantized_planes import plane_format
from kernels.triton_ops.quantized_tiles import float_values, group_scales, has_assembler
from kernels.weights import QuantizedWeight


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def dequantize_rows_kernel(
    ids_ptr,
    low_ptr,
    high_ptr,
    scale_ptr,
    minimum_ptr,
    sub_scale_ptr,
    sub_minimum_ptr,
    out_ptr,
    first_row,
    in_features,
    multiplier,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_NESTED: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GROUPS: tl.constexpr = BLOCK_B // GROUP
    row_bytes = in_features if BITS == 8 else in_features // 2
    groups_a_row = in_features // GROUP
    out_row = tl.program_id(0)
    byte = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = byte < row_bytes
    wait_for_inputs(PDL)
    if HAS_IDS:
        row = tl.load(ids_ptr + out_row).to(tl.int64)
    else:
        row = (first_row + out_row).to(tl.int64)
    low = tl.reshape(tl.load(low_ptr + row * row_bytes + byte, mask=inside, other=0), (GROUPS, GROUP))
    high, shift = low, low
    if BITS == 5 or BITS == 6:
        UNITS_A_BYTE: tl.constexpr = 4 if BITS == 5 else 2
        unit = byte // 32
        high_bytes = tl.cdiv(row_bytes // 32, UNITS_A_BYTE) * 32
        high_ptrs = high_ptr + row * high_bytes + unit // UNITS_A_BYTE * 32 + byte % 32
        high = tl.reshape(tl.load(high_ptrs, mask=inside, other=0), (GROUPS, GROUP))
        shift = tl.reshape((unit % UNITS_A_BYTE) * (8 // UNITS_A_BYTE), (GROUPS, GROUP))
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    in_groups = group * GROUP < row_bytes
    if BITS == 8:
        lower = group
    elif GROUP == 32:
        lower = 2 * group
    else:
        lower = group // 2 * 4 + group % 2
    element = byte if BITS == 8 else byte // 32 * 64 + byte % 32
    out_ptrs = out_ptr + out_row.to(tl.int64) * in_features + element
    for upper in tl.static_range(1 if BITS == 8 else 2):
        scale, offset = group_scales(
            scale_ptr, minimum_ptr, sub_scale_ptr, sub_minimum_ptr, row, lower + upper * (32 // GROUP), in_groups,
            groups_a_row, ZERO, HAS_MINIMUM, IS_NESTED, 256 // GROUP,
        )  # fmt: skip
        values = float_values(low, high, shift, upper == 1, BITS, True, ASM).to(tl.float32)
        values = (values * scale[:, None] + offset[:, None]) * multiplier
        values = tl.reshape(values, (BLOCK_B,))
        tl.store(out_ptrs + upper * 32, values.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_rows(
    weight: QuantizedWeight,
    out: torch.Tensor,
    first_row: int = 0,
    ids: torch.Tensor | None = None,
    multiplier: float = 1.0,
) -> None:
    """Write rows `first_row`…, or rows `ids` [n], of a weight in planes, times `multiplier`, into out [n, in]."""
    spec, planes = plane_format(weight), weight.tensors
    num_rows, in_features = out.shape
    if num_rows == 0:
        return
    row_bytes = in_features if spec.bits == 8 else in_features // 2
    block_bytes = min(2048, max(128, triton.next_power_of_2(row_bytes)))
    low = planes["low"]
    dequantize_rows_kernel[(num_rows, triton.cdiv(row_bytes, block_bytes))](
        low if ids is None else ids,
        low,
        planes.get("high", low),
        planes["scale"],
        planes.get("minimum", planes["scale"]),
        planes.get("sub_scale", planes["scale"]),
        planes.get("sub_minimum", planes["scale"]),
        out,
        first_row,
        in_features,
        multiplier,
        BITS=spec.bits,
        GROUP=spec.group,
        ZERO=spec.zero,
        HAS_MINIMUM=spec.has_minimum,
        IS_NESTED=spec.is_nested,
        HAS_IDS=ids is not None,
        BLOCK_B=block_bytes,
        ASM=has_assembler(),
        num_warps=4,
        **dependent_launch(out),
    )
