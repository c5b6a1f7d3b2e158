"""Residual addition and the norm after it, in one pass."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import ACTIVATION_DTYPES, DTYPE_IDS, require_library


def accepts(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    return x.dtype in ACTIVATION_DTYPES and residual.dtype == x.dtype and x.is_contiguous() and residual.is_contiguous()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H] → (rms_norm(x + residual), x + residual); the sum is rounded before the norm reads it."""
    y, total = torch.empty_like(x), torch.empty_like(x)
    rows, hidden = x.shape
    _rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        rows,
        hidden,
        eps,
        y.data_ptr(),
        total.data_ptr(),
        DTYPE_IDS[x.dtype],
    )
    return y, total


_rms_norm = require_library().wl_rms_norm
