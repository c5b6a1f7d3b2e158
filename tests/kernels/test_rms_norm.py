from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (7, 65), (0, 64), (3, 5, 33)])
def test_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1])
    expected = functional.rms_norm(x.double(), (shape[-1],), weight.double(), 1e-5)
    result = ops.rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_a_zero_row_stays_finite() -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_large_half_precision_values_do_not_overflow() -> None:
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(ops.rms_norm(x, torch.ones(64), 1e-6), torch.ones(1, 64, dtype=torch.float16))


def test_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ops.ShapeError, match="rms_norm"):
        ops.rms_norm(torch.zeros(2, 8), torch.ones(7), 1e-6)
