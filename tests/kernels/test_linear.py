from __future__ import annotations

import pytest
import torch

from kernels import ops
from tests.support.quantized import make_q8_0

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("rows", "in_features", "out_features"), [(1, 576, 192), (5, 33, 7), (64, 1, 3), (0, 8, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_against_float64(rows: int, in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype) -> None:
    x = torch.randn(rows, in_features).to(dtype)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    result = ops.linear(x, weight, bias)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_weight_may_be_stored_narrower_than_the_activations() -> None:
    x, weight = torch.randn(3, 40), torch.randn(9, 40).bfloat16()
    expected = x.double() @ weight.double().T
    result = ops.linear(x, weight)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)


def test_quantized_weight_is_the_matrix_it_dequantizes_to() -> None:
    x, weight = torch.randn(4, 96), make_q8_0(torch.randn(5, 96))
    with ops.reference_only():
        result = ops.linear(x, weight)
    expected = x.double() @ weight.dequantize(torch.float32).double().T
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_sizes_that_do_not_meet_are_refused() -> None:
    with pytest.raises(ops.ShapeError, match="linear"):
        ops.linear(torch.zeros(1, 8), torch.zeros(4, 9))
