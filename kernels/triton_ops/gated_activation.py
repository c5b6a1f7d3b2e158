"""SwiGLU and GeGLU: activation(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import dependent_launch, start_next, wait_for_inputs


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """silu(x) = x * sigmoid(x), or gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)), in float32."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_tanh")
    if ACTIVATION == "silu":
        activated = gate * tl.sigmoid(gate)
    else:
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return activated


@triton.jit
def gated_activation_kernel(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    features,
    ACTIVATION: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = column < features
    wait_for_inputs(PDL)
    gate_ptrs = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_ptrs, mask=inside, other=0.0)
    up = tl.load(gate_ptrs + features, mask=inside, other=0.0).to(tl.float32)
    product = activate(gate.to(tl.float32), ACTIVATION) * up
    tl.store(out_ptr + row * features + column, product.to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`kernels.ops.gated_activation`: gate_up [..., 2F] = (gate | up); returns [..., F]."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    features = rows.shape[1] // 2
    out = rows.new_empty(rows.shape[0], features)
    block_f = min(1024, triton.next_power_of_2(features))
    if rows.shape[0]:
        gated_activation_kernel[(rows.shape[0], triton.cdiv(features, block_f))](
            rows,
            out,
            rows.stride(0),
            features,
            ACTIVATION=activation,
            BLOCK_F=block_f,
            num_warps=4,
            **dependent_launch(rows),
        )
    return out.view(*gate_up.shape[:-1], features)
