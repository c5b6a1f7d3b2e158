"""Token embedding from a tiled weight: only the rows that are asked for are dequantised."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import ACTIVATION_DTYPES
from kernels.cpu_ops.tile_formats import FORMAT_IDS, gather_rows
from kernels.weights import LinearWeight, QuantizedWeight


def accepts(
    input_ids: torch.Tensor, weight: LinearWeight, scale: float = 1.0, dtype: torch.dtype | None = None
) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.format in FORMAT_IDS


def embedding(
    input_ids: torch.Tensor, weight: LinearWeight, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """input_ids [T] int32, weight [V, H] → [T, H] in `dtype` (None: float32), the product rounded once."""
    assert isinstance(weight, QuantizedWeight)
    dtype = dtype or torch.float32
    if dtype in ACTIVATION_DTYPES:
        return gather_rows(weight, input_ids, scale, dtype)
    return gather_rows(weight, input_ids, scale, torch.float32).to(dtype)
