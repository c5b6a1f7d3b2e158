"""RMS norm on the CPU."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import ACTIVATION_DTYPES, DTYPE_IDS, require_library


def accepts(x: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    return x.dtype in ACTIVATION_DTYPES and x.is_contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] float32; the result has the shape and dtype of x."""
    hidden = x.shape[-1]
    y = torch.empty_like(x)
    _rms_norm(
        x.data_ptr(),
        None,
        weight.data_ptr(),
        x.numel() // hidden,
        hidden,
        eps,
        y.data_ptr(),
        None,
        DTYPE_IDS[x.dtype],
    )
    return y


_rms_norm = require_library().wl_rms_norm
