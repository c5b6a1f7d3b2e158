from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 2), (1, 3072), (5, 94), (200, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_reference(activation: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape) * 4).to(dtype)
    with ops.reference_only():
        expected = ops.gated_activation(gate_up, activation)
    result = ops.gated_activation(gate_up, activation)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2e-6}
    torch.testing.assert_close(result, expected, **tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_far_from_zero(activation: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, 90.0, 200.0, 1e4, float("nan"), 0.0])
    result = ops.gated_activation(torch.cat((gate, torch.ones(8)))[None], activation)[0]
    expected = torch.tensor([0.0, 0.0, 0.0, 90.0, 200.0, 1e4, float("nan"), 0.0])
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-30, equal_nan=True)
