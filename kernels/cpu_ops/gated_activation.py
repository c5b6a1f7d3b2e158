"""act(gate) · up on the CPU."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import ACTIVATION_DTYPES, DTYPE_IDS, require_library

_IS_GELU = {"silu": 0, "gelu_tanh": 1}


def accepts(gate_up: torch.Tensor, activation: str) -> bool:
    return gate_up.dtype in ACTIVATION_DTYPES and activation in _IS_GELU and gate_up.is_contiguous()


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up [T, 2F], gate first → [T, F]; computed in float32, rounded once."""
    width = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype)
    rows = gate_up.numel() // gate_up.shape[-1]
    _gated_activation(gate_up.data_ptr(), rows, width, _IS_GELU[activation], y.data_ptr(), DTYPE_IDS[gate_up.dtype])
    return y


_gated_activation = require_library().wl_gated_activation
