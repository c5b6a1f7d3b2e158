"""Residual addition and the norm after it: r' = r + x, y = rms_norm(r')."""

from __future__ import annotations

import torch

from kernels.reference.rms_norm import rms_norm


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H] → (y, r'), both [T, H]. The sum is rounded to the dtype of x before the norm reads it."""
    total = x + residual
    return rms_norm(total, weight, eps), total
