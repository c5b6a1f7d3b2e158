from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_against_float64(soft_cap: float | None, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight = torch.randn(3, 65).to(dtype), (torch.randn(130, 65) / 8).to(dtype)
    expected = hidden.double() @ weight.double().T
    if soft_cap is not None:
        expected = soft_cap * torch.tanh(expected / soft_cap)
    result = ops.logits(hidden, weight, soft_cap)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
