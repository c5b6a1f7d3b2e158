from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("shape", [(1, 576), (9, 31), (0, 8)])
def test_sum_and_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1])
    before = residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, before)
    assert torch.equal(total, x + residual)
    wide = (x + residual).double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ops.ShapeError, match="add_rms_norm"):
        ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.ones(8), 1e-6)
