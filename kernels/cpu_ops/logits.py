"""Next-token logits on the CPU, always float32."""

from __future__ import annotations

import torch

from kernels.cpu_ops.linear import accepts as linear_accepts
from kernels.cpu_ops.linear import multiply
from kernels.weights import LinearWeight


def accepts(hidden: torch.Tensor, weight: LinearWeight, soft_cap: float | None = None) -> bool:
    return hidden.dim() == 2 and linear_accepts(hidden, weight)


def logits(hidden: torch.Tensor, weight: LinearWeight, soft_cap: float | None = None) -> torch.Tensor:
    """hidden [n, H], weight [V, H] → [n, V] float32; soft_cap c maps s to c * tanh(s / c)."""
    scores = multiply(hidden, weight, None, torch.float32)
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)
