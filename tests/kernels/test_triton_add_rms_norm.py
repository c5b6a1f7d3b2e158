"""RMS norm, with and without the residual sum."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from tests.support.tensors import random_tensor, relative_error, tolerance

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 576), (3, 2048), (5, 100)])
def test_rms_norm(triton_device, rows, hidden, dtype):
    from kernels.triton_ops.add_rms_norm import rms_norm

    x = random_tensor(rows, hidden, dtype=dtype, device=triton_device, scale=3)
    weight = random_tensor(hidden, dtype=torch.float32, device=triton_device, seed=1)
    assert relative_error(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 640), (4, 1024)])
def test_add_rms_norm(triton_device, rows, hidden, dtype):
    from kernels.triton_ops.add_rms_norm import add_rms_norm

    x = random_tensor(rows, hidden, dtype=dtype, device=triton_device)
    residual = random_tensor(rows, 2 * hidden, dtype=dtype, device=triton_device, seed=1)[:, :hidden]
    weight = random_tensor(hidden, dtype=torch.float32, device=triton_device, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    expected_normed, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    # The interpreter rounds bfloat16 toward zero.
    assert relative_error(total, expected_total) < tolerance(dtype)
    assert relative_error(normed, expected_normed) < tolerance(dtype)
