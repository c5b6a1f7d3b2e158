"""GGML blocks to floats, vectorised in torch on any device."""

from __future__ import annotations

import torch

from runners.loading.ggml_types import GGMLType


def dequantize_rows(
    rows: torch.Tensor, ggml_type: GGMLType, name: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """uint8 [n, row_bytes] → `dtype` [n, elements] on `device`."""
    raise NotImplementedError
