"""Ops on weights in planes: linear with its neighbours, head, embedding, each by the fastest way for the row count.

A norm launch, then for 1 row a GEMV, for 2 to 64 rows a tensor-core product, each with gate and residual inside. More
rows: bands of weight rows become plain in a workspace, and the vendor library multiplies.
"""

from __future__ import annotations

import torch

from kernels.triton_ops import quantized_tuning as tuning
from kernels.triton_ops.add_rms_norm import rms_norm
from kernels.triton_ops.gated_activation import gated_activation
from kernels.triton_ops.launch import capability
from kernels.triton_ops.quantized_gemv import quantized_gemv
from kernels.triton_ops.quantized_planes import is_packed
from kernels.triton_ops.quantized_product import quantized_product
from kernels.triton_ops.quantized_rows import dequantize_rows
from kernels.triton_ops.quantized_tuning import gemv_shape, product_tiling
from kernels.weights import QuantizedWeight


def quantized_fused_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    feeds_attention: bool = False,
    residual_is_spent: bool = False,
) -> torch.Tensor:
    """`kernels.ops.fused_linear` for a weight in planes: x [T, in] → [T, features]."""
    num_rows, in_features = x.shape
    features = weight.shape[0] // 2 if activation else weight.shape[0]
    if norm_weight is not None and (num_rows > 1 or not tuning.NORM_IN_GEMV):
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    if num_rows == 1:
        out = torch.empty(1, features, dtype=out_dtype or x.dtype, device=x.device)
        shape = gemv_shape(features, in_features, weight.format, bool(activation))
        quantized_gemv(x, weight, out, norm_weight, eps, bias, residual, activation, *shape, feeds_attention)
        return out
    if num_rows <= tuning.MAX_PRODUCT_ROWS and x.stride(1) == 1:
        out = torch.empty(num_rows, features, dtype=out_dtype or x.dtype, device=x.device)
        is_large = x.is_cuda and capability(x.device.index) in ((8, 0), (9, 0))
        tiling = product_tiling(num_rows, features, in_features, weight.format, bool(activation), is_large)
        quantized_product(x, weight, out, bias, residual, activation, tiling, feeds_attention)
        return out
    product = _banded_product(x, weight, out_dtype or x.dtype)
    if bias is not None:
        product = product + bias
    if activation:
        product = gated_activation(product, activation)
    if residual is not None:
        product = product + residual
    return product.to(out_dtype or x.dtype)


def _banded_product(x: torch.Tensor, weight: QuantizedWeight, out_dtype: torch.dtype) -> torch.Tensor:
    """x Wᵀ [T, out] of many rows; a band of W at a time is plain."""
    out_features, in_features = weight.shape
    product = torch.empty(x.shape[0], out_features, dtype=out_dtype, device=x.device)
    rows = max(128, tuning.BAND_BYTES // (x.element_size() * in_features) // 128 * 128)
    band = torch.empty(min(rows, out_features), in_features, dtype=x.dtype, device=x.device)
    for first in range(0, out_features, rows):
        plain = band[: min(rows, out_features - first)]
        dequantize_rows(weight, plain, first)
        target = product[:, first : first + plain.shape[0]]
        if out_dtype == x.dtype:
            torch.mm(x, plain.t(), out=target)
        elif x.is_cuda:
            target.copy_(torch.mm(x, plain.t(), out_dtype=out_dtype))
        else:
            target.copy_(x.to(out_dtype) @ plain.t().to(out_dtype))
    return product


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in], weight in planes [out, in], bias [out] → [..., out]."""
    product = quantized_fused_linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return product.view(*x.shape[:-1], weight.shape[0])


def quantized_logits(hidden: torch.Tensor, weight: QuantizedWeight, soft_cap: float | None = None) -> torch.Tensor:
    """hidden [n, H], weight in planes [V, H] → [n, V] float32, not rounded on the way."""
    scores = quantized_fused_linear(hidden, weight, out_dtype=torch.float32)
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def quantized_embedding(
    input_ids: torch.Tensor, weight: QuantizedWeight, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rows input_ids [T] of a weight in planes [V, H], times `scale`: [T, H] in `dtype` (None: float32)."""
    out = torch.empty(input_ids.shape[0], weight.shape[1], dtype=dtype or torch.float32, device=input_ids.device)
    dequantize_rows(weight, out, ids=input_ids, multiplier=scale)
    return out


def has_packed_weight(x: torch.Tensor, weight: object, *_: object) -> bool:
    """Whether the weight is in planes; nothing else of the arguments matters."""
    return is_packed(weight)
