from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library
from tests.support.gguf_blocks import SCALE_OFFSETS, expected_values, random_weight

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")

# Activations keep 15 bits of the largest of 32: errors of 2^-15 each, averaged over the row.
TILED_TOLERANCE = 1e-4


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("format_name", SCALE_OFFSETS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 131])
def test_tiled_weight(format_name: str, rows: int) -> None:
    weight = random_weight(format_name, 50, 512, seed=rows)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
    expected = x.double() @ expected_values(weight).double().T
    assert relative_error(ops.linear(x, ops.pack_weight(weight)), expected) < TILED_TOLERANCE


@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (15, 96), (17, 576), (640, 1056)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_odd_shapes(out_features: int, in_features: int, rows: int) -> None:
    weight = random_weight("q4_1", out_features, in_features)
    x, bias = torch.randn(rows, in_features), torch.randn(out_features)
    expected = x.double() @ expected_values(weight).double().T + bias
    assert relative_error(ops.linear(x, ops.pack_weight(weight), bias), expected) < TILED_TOLERANCE


def test_bfloat16_in_and_out() -> None:
    weight = random_weight("q8_0", 33, 64)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    expected = x.double() @ expected_values(weight).double().T
    result = ops.linear(x, ops.pack_weight(weight), torch.zeros(33, dtype=torch.bfloat16))
    assert result.dtype == torch.bfloat16
    assert relative_error(result, expected) < 2**-8


def test_rows_with_a_stride() -> None:
    weight = ops.pack_weight(random_weight("q4_0", 20, 64))
    wide = torch.randn(6, 192)
    assert torch.equal(ops.linear(wide[:, 64:128], weight), ops.linear(wide[:, 64:128].contiguous(), weight))
    assert torch.equal(ops.linear(wide.T[64:128].T, weight), ops.linear(wide[:, 64:128].contiguous(), weight))


@pytest.mark.parametrize("in_features", [512, 768])
@pytest.mark.parametrize("format_name", [*SCALE_OFFSETS, "float32"])
def test_a_row_does_not_depend_on_its_neighbours(format_name: str, in_features: int) -> None:
    """Equal bits in passes of every size, on the way a prompt takes and on a decode step's."""
    if format_name == "float32":
        in_features += 5
        weight: ops.LinearWeight = torch.randn(50, in_features)
    else:
        weight = ops.pack_weight(random_weight(format_name, 50, in_features))
    x = torch.randn(150, in_features)
    together = ops.linear(x, weight)
    for rows in (1, 2, 3, 7, 8, 17, 140):
        assert torch.equal(ops.linear(x[:rows], weight), together[:rows])
    assert torch.equal(ops.linear(x[131:132], weight), together[131:132])
    assert torch.equal(ops.logits(x[5:9], weight), ops.logits(x, weight)[5:9])


def test_outliers_cost_only_their_own_block() -> None:
    weight = random_weight("q4_1", 16, 64)
    x = torch.randn(1, 64)
    x[0, 40] = 1e4
    first_half = x.clone()
    first_half[0, 32:] = 0
    expected = first_half.double() @ expected_values(weight).double().T
    assert relative_error(ops.linear(first_half, ops.pack_weight(weight)), expected) < TILED_TOLERANCE


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_activations_reach_the_output(poison: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = poison
    result = ops.linear(x, ops.pack_weight(random_weight("q4_1", 20, 64)))
    assert bool((~result[1].isfinite()).all())
    assert bool(result[[0, 2]].isfinite().all())


def test_zero_rows_give_the_bias() -> None:
    bias = torch.randn(20)
    result = ops.linear(torch.zeros(2, 64), ops.pack_weight(random_weight("q5_1", 20, 64)), bias)
    assert torch.equal(result, bias.expand(2, 20))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 6, 20])
def test_dense_weight(weight_dtype: torch.dtype, x_dtype: torch.dtype, rows: int) -> None:
    weight, bias = torch.randn(1030, 75).to(weight_dtype), torch.randn(1030).to(x_dtype)
    x = torch.randn(rows, 75).to(x_dtype)
    expected = x.double() @ weight.double().T + bias.double()
    result = ops.linear(x, weight, bias)
    assert result.dtype == x_dtype
    assert relative_error(result, expected) < (1e-6 if x_dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(soft_cap: float | None, dtype: torch.dtype) -> None:
    weight = random_weight("q8_0", 1000, 64)
    hidden = torch.randn(3, 64).to(dtype)
    expected = hidden.double() @ expected_values(weight).double().T
    if soft_cap is not None:
        expected = soft_cap * torch.tanh(expected / soft_cap)
    result = ops.logits(hidden, ops.pack_weight(weight), soft_cap)
    assert result.dtype == torch.float32
    assert relative_error(result, expected) < TILED_TOLERANCE
