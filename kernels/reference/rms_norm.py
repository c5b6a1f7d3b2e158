"""RMS norm: y = x / sqrt(mean(x²) + eps) * w, computed in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] float32; the result has the dtype of x, rounded once."""
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight).to(x.dtype)
