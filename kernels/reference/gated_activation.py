"""Gated linear unit: act(gate) · up (Shazeer 2020, arXiv:2002.05202); silu(x) = x σ(x),
gelu_tanh(x) = x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))."""

from __future__ import annotations

import torch
from torch.nn import functional


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up [T, 2F], gate first → [T, F]; computed in float32, rounded once. ValueError on another activation."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "silu":
        activated = functional.silu(gate)
    elif activation == "gelu_tanh":
        activated = functional.gelu(gate, approximate="tanh")
    else:
        raise ValueError(f"unknown activation {activation!r}")
    return (activated * up).to(gate_up.dtype)
