"""Linear layer with its neighbours: activation(norm(x) Wᵀ + bias) + residual, by the fastest way for the row count.

1 row: a GEMV with everything inside. 2 to 64 rows: a norm launch, then a thin product with gate and residual inside.
More rows: the vendor library, with separate norm and activation launches.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.triton_ops.add_rms_norm import rms_norm
from kernels.triton_ops.gated_activation import gated_activation
from kernels.triton_ops.gemv import MAX_BLOCK_K, gemv
from kernels.triton_ops.thin_product import thin_product
from kernels.triton_ops.tuning import gemv_shape, thin_tiling


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    feeds_attention: bool = False,
    residual_is_spent: bool = False,
) -> torch.Tensor:
    """x [T, in] → [T, features] in `out_dtype` (default: that of x).

    weight [features, in], or (gate | up) [2 * features, in] where `activation` is "silu" or "gelu_tanh"; norm_weight
    [in] float32; residual [T, features]. With `feeds_attention` the next kernel starts late, so that it
    may read before its wait what kernels before this one wrote (`kernels.triton_ops.launch`). With
    `residual_is_spent` the result may be written over the residual.
    """
    num_rows, in_features = x.shape
    features = weight.shape[0] // 2 if activation else weight.shape[0]
    if num_rows == 1 and weight.is_contiguous():
        if norm_weight is not None and in_features > MAX_BLOCK_K:
            x, norm_weight = rms_norm(x, norm_weight, eps), None
        out = torch.empty(1, features, dtype=out_dtype or x.dtype, device=x.device)
        shape = gemv_shape(features, in_features, bool(activation))
        gemv(x, weight, out, norm_weight, eps, bias, residual, activation, *shape, feeds_attention)
        return out
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    tiling = thin_tiling(num_rows, features, in_features, bool(activation))
    if tiling is not None and weight.is_contiguous() and weight.element_size() == 2 and x.stride(1) == 1:
        out = torch.empty(num_rows, features, dtype=out_dtype or x.dtype, device=x.device)
        thin_product(x, weight, out, bias, residual, activation, tiling, feeds_attention)
        return out
    return _vendor_product(x, weight, bias, residual, activation, out_dtype, residual_is_spent)


def _vendor_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    residual_is_spent: bool,
) -> torch.Tensor:
    if residual is not None and not activation and bias is None and out_dtype in (None, x.dtype):
        # The library adds the residual as it writes; into a new tensor it would copy it there first.
        if residual_is_spent:
            return residual.addmm_(x, weight.t())
        return torch.addmm(residual, x, weight.t())
    if out_dtype not in (None, x.dtype) and not activation and bias is None and residual is None and x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    product = functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if activation:
        product = gated_activation(product, activation)
    if residual is not None:
        product = product + residual
    return product.to(out_dtype or x.dtype)
