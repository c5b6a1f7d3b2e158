"""Linear layer with its neighbours: activation(norm(x) Wᵀ + b) + residual, composed of the single ops."""

from __future__ import annotations

import torch

from kernels.dispatch import run
from kernels.weights import LinearWeight


def fuses(weight: LinearWeight, dtype: torch.dtype) -> bool:
    """Plain weights of the activations' type."""
    return isinstance(weight, torch.Tensor) and weight.dtype == dtype


def fused_linear(
    x: torch.Tensor,
    weight: LinearWeight,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    feeds_attention: bool = False,
    residual_is_spent: bool = False,
) -> torch.Tensor:
    """x [T, in] → [T, features] in `out_dtype` (None: that of x; float32 gives logits, not rounded on the way).

    `feeds_attention` is a hint for devices.
    """
    device_type = x.device.type
    if norm_weight is not None:
        x = run("rms_norm", device_type, x, norm_weight, eps)
    if out_dtype is torch.float32 and bias is None and residual is None and not activation:
        return run("logits", device_type, x, weight, None)
    product = run("linear", device_type, x, weight, bias)
    if activation:
        product = run("gated_activation", device_type, product, activation)
    if residual is not None:
        product = product + residual
    return product.to(out_dtype or x.dtype)
