from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")

TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6}}
SHAPES = [(1, 16), (1, 576), (3, 5), (7, 100), (300, 640)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype) * 5, torch.rand(shape[1]) + 0.5
    with ops.reference_only():
        expected = ops.rms_norm(x, weight, 1e-5)
    result = ops.rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) * 9, torch.rand(shape[1])
    before = residual.clone()
    with ops.reference_only():
        expected, expected_total = ops.add_rms_norm(x, residual, weight, 1e-6)
    result, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert torch.equal(residual, before)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


def test_more_than_two_dimensions_and_a_zero_row() -> None:
    x = torch.randn(4, 3, 48)
    x[1, 1] = 0
    with ops.reference_only():
        expected = ops.rms_norm(x, torch.ones(48), 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, torch.ones(48), 1e-6), expected, **TOLERANCE[torch.float32])


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(2, 64)
    x[0, 63] = float("nan")
    result = ops.rms_norm(x, torch.ones(64), 1e-6)
    assert bool(result[0].isnan().all())
    assert bool(result[1].isfinite().all())
