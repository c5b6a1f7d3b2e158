"""`kernels.ops.linear` and `logits` for plain weights, through the product that also carries neighbours."""

from __future__ import annotations

import torch

from kernels.triton_ops.fused_linear import fused_linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in], weight [out, in] of one dtype, bias [out] → [..., out]."""
    if x.dim() == 2:
        return fused_linear(x, weight, bias)
    return fused_linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def logits(hidden: torch.Tensor, weight: torch.Tensor, soft_cap: float | None = None) -> torch.Tensor:
    """hidden [n, H], weight [V, H] of one dtype → [n, V] float32, not rounded on the way."""
    scores = fused_linear(hidden, weight, out_dtype=torch.float32)
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def is_plain(x: torch.Tensor, weight: object, *_: object) -> bool:
    """True where the weight is stored as it is multiplied."""
    return isinstance(weight, torch.Tensor) and weight.dtype == x.dtype
