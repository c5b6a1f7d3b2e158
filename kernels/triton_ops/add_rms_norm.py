"""RMS norm, alone or with the residual sum before it: y = h / sqrt(mean(h^2) + eps) * weight, h = x + residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    hidden_size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    inside = column < hidden_size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    hidden = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        hidden += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = hidden.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * hidden_size + column, rounded, mask=inside)
        hidden = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / hidden_size + eps)
    tl.store(normed_ptr + row * hidden_size + column, (hidden * scale * weight).to(normed_ptr.dtype.element_ty), inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`kernels.ops.rms_norm`: x [..., H], weight [H] float32; one program a row."""
    rows = x.reshape(-1, x.shape[-1])
    normed = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _launch(rows, None, weight, eps, normed, normed)
    return normed.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.ops.add_rms_norm`: (normed, x + residual), both [T, H]; one program a row."""
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    residual_out = torch.empty_like(normed)
    _launch(x, residual, weight, eps, normed, residual_out)
    return normed, residual_out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    residual_out: torch.Tensor,
) -> None:
    num_rows, hidden_size = x.shape
    if num_rows == 0:
        return
    block_h = triton.next_power_of_2(hidden_size)
    add_rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        normed,
        residual_out,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        hidden_size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK_H=block_h,
        num_warps=min(8, max(1, block_h // 512)),
        **dependent_launch(x),
    )
