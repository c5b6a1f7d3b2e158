"""Linear layer: y = x Wᵀ + b. A quantised weight means the matrix that its blocks dequantise to."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.weights import LinearWeight, QuantizedWeight


def linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in], weight [out, in], bias [out] → [..., out] in the dtype of x."""
    dense = weight.dequantize(x.dtype) if isinstance(weight, QuantizedWeight) else weight.to(x.dtype)
    return functional.linear(x, dense, None if bias is None else bias.to(x.dtype))
