"""Token embedding: row id of the weight, times a scale (gemma3: √hidden)."""

from __future__ import annotations

import torch

from kernels.weights import LinearWeight, QuantizedWeight


def embedding(
    input_ids: torch.Tensor, weight: LinearWeight, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """input_ids [T] int32, weight [V, H] → [T, H] in `dtype`, the product rounded once."""
    if isinstance(weight, QuantizedWeight):
        if "blocks" in weight.tensors:
            rows = weight.select_rows(input_ids).dequantize(torch.float32)
        else:  # a backend's own layout need not lead with rows
            rows = weight.dequantize(torch.float32).index_select(0, input_ids)
        dtype = dtype or torch.float32
    else:
        rows = weight.index_select(0, input_ids)
        dtype = dtype or weight.dtype
    if scale != 1.0:
        rows = rows.float() * scale
    return rows.to(dtype)
