from __future__ import annotations

import pytest
import torch

from kernels import ops


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("neighbours", [True, False])
def test_it_is_the_single_ops_in_a_row(activation: str, neighbours: bool) -> None:
    x, weight = torch.randn(3, 8), torch.randn(12, 8)
    bias, norm = (torch.randn(12), torch.randn(8)) if neighbours else (None, None)
    features = 6 if activation else 12
    residual = torch.randn(3, features) if neighbours else None
    wide = x.double()
    if norm is not None:
        wide = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    expected = wide @ weight.double().t() + (0 if bias is None else bias)
    if activation:
        gate, up = expected.chunk(2, dim=-1)
        expected = gate * torch.sigmoid(gate) * up
    if residual is not None:
        expected = expected + residual
    actual = ops.fused_linear(x, weight, bias, norm, 1e-5, residual, activation)
    assert (actual - expected).norm() / expected.norm() < 1e-6


def test_logits_come_out_in_float32() -> None:
    x, weight = torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16)
    assert ops.fused_linear(x, weight, out_dtype=torch.float32).dtype is torch.float32
    assert ops.fused_linear(x, weight).dtype is torch.bfloat16


def test_sizes_must_fit() -> None:
    with pytest.raises(ValueError, match="fused_linear"):
        ops.fused_linear(torch.zeros(1, 8), torch.zeros(4, 9))
