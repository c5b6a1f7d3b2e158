"""Linear layers with norm, bias, gate, residual: one row (GEMV), a few (thin product), many (vendor library)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels import reference
from tests.support.tensors import HALF_DTYPE, random_tensor, relative_error, tolerance


def composed(x, weight, bias, norm_weight, residual, activation):
    """The same from references, with float32 between the steps where the fused kernels keep it."""
    normed = x if norm_weight is None else reference.rms_norm(x, norm_weight, 1e-5)
    product = functional.linear(normed.float(), weight.float(), None if bias is None else bias.float())
    if activation:
        product = reference.gated_activation(product, activation)
    return product if residual is None else product + residual.float()


CASES = [
    # rows, in, features, norm, bias, residual, activation
    (1, 256, 96, True, False, False, ""),
    (1, 1000, 33, False, True, True, ""),
    (1, 320, 64, True, True, False, "silu"),
    (1, 20000, 6, False, False, True, ""),
    (3, 256, 96, True, False, True, ""),
    (8, 384, 80, False, True, False, "gelu_tanh"),
    (16, 512, 64, True, True, True, ""),
    (70, 128, 64, True, False, False, "silu"),
    (70, 128, 64, False, False, True, ""),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_linear(triton_device, case, dtype):
    from kernels.triton_ops.fused_linear import fused_linear

    rows, in_features, features, has_norm, has_bias, has_residual, activation = case
    stored = 2 * features if activation else features

    def tensor(*shape, seed, scale=1.0, as_dtype=dtype):
        return random_tensor(*shape, dtype=as_dtype, device=triton_device, seed=seed, scale=scale)

    x = tensor(rows, in_features, seed=1)
    weight = tensor(stored, in_features, seed=2, scale=in_features**-0.5)
    norm_weight = tensor(in_features, seed=3, as_dtype=torch.float32) if has_norm else None
    bias = tensor(stored, seed=4) if has_bias else None
    residual = tensor(rows, features, seed=5) if has_residual else None
    actual = fused_linear(x, weight, bias, norm_weight, 1e-5, residual, activation)
    expected = composed(x, weight, bias, norm_weight, residual, activation)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < 2 * tolerance(dtype)


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("activation", ["", "silu"])
def test_thin_product_tilings(triton_device, activation, weights_first, split_k):
    from kernels.triton_ops.thin_product import ThinTiling, thin_product

    rows, in_features, features = 5, 448, 72
    x = random_tensor(rows, in_features, dtype=HALF_DTYPE, device=triton_device)
    stored = 2 * features if activation else features
    weight = random_tensor(stored, in_features, dtype=HALF_DTYPE, device=triton_device, seed=2, scale=0.05)
    tiling = ThinTiling(64, 64, split_k, 3, 4, prefetch_k=128, weights_first=weights_first)
    for _ in range(2):
        out = torch.full((rows, features), float("nan"), dtype=HALF_DTYPE, device=triton_device)
        thin_product(x, weight, out, None, None, activation, tiling)
        assert relative_error(out, composed(x, weight, None, None, None, activation)) < tolerance(HALF_DTYPE)


def test_float32_output(triton_device):
    from kernels.triton_ops.fused_linear import fused_linear

    weight = random_tensor(300, 256, dtype=HALF_DTYPE, device=triton_device, seed=2)
    for rows in (1, 4, 40):
        x = random_tensor(rows, 256, dtype=HALF_DTYPE, device=triton_device)
        logits = fused_linear(x, weight, out_dtype=torch.float32)
        assert logits.dtype == torch.float32
        if rows <= 4 or triton_device.type == "cuda":
            assert relative_error(logits, x.float() @ weight.float().t()) < 1e-4
