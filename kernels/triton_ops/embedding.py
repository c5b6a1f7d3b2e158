"""Rows of the embedding matrix, times a scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, weight_stride, hidden_size, scale, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = column < hidden_size
    wait_for_inputs(PDL)
    token = tl.load(ids_ptr + row).to(tl.int64)
    values = tl.load(weight_ptr + token * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden_size + column, (values * scale).to(out_ptr.dtype.element_ty), mask=inside)


def embedding(
    input_ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`kernels.ops.embedding` for plain weights [V, H]: rows input_ids [T] int32 or int64 as [T, H].

    Ids must lie in the vocabulary; they are not checked on the device.
    """
    num_tokens, hidden_size = input_ids.shape[0], weight.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=dtype or weight.dtype, device=weight.device)
    block_h = min(1024, triton.next_power_of_2(hidden_size))
    if num_tokens:
        embedding_kernel[(num_tokens, triton.cdiv(hidden_size, block_h))](
            input_ids,
            weight,
            out,
            weight.stride(0),
            hidden_size,
            scale,
            BLOCK_H=block_h,
            num_warps=4,
            **dependent_launch(weight),
        )
    return out
