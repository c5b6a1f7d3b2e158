from __future__ import annotations

import pytest
import torch

from kernels.weights import QuantizedWeight, concatenate_rows
from tests.support.quantized import make_q8_0


def test_sizes_and_rows_of_a_quantized_weight() -> None:
    weight = make_q8_0(torch.randn(6, 64))
    assert weight.shape == (6, 64)
    assert weight.nbytes == 6 * 2 * 34
    rows = weight.select_rows(torch.tensor([4, 0, 4]))
    assert rows.shape == (3, 64)
    assert torch.equal(rows.dequantize(torch.float32), weight.dequantize(torch.float32)[[4, 0, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantized_values_are_close_to_what_was_quantized(dtype: torch.dtype) -> None:
    original = torch.randn(3, 96)
    values = make_q8_0(original).dequantize(dtype)
    assert values.dtype == dtype
    torch.testing.assert_close(values.float(), original, rtol=0, atol=0.03)


def test_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="'q3_z'"):
        QuantizedWeight("q3_z", (1, 32), {"blocks": torch.zeros(1, 4, dtype=torch.uint8)}).dequantize(torch.float32)


def test_neighbours_stored_alike_are_joined_in_order() -> None:
    first, second, third = make_q8_0(torch.randn(2, 32)), make_q8_0(torch.randn(5, 32)), torch.randn(3, 32)
    joined = concatenate_rows([first, second, third])
    assert [tuple(weight.shape) for weight in joined] == [(7, 32), (3, 32)]
    assert isinstance(joined[0], QuantizedWeight)
    expected = torch.cat([first.dequantize(torch.float32), second.dequantize(torch.float32)])
    assert torch.equal(joined[0].dequantize(torch.float32), expected)
    assert joined[1] is third


def test_tensors_of_different_types_stay_apart() -> None:
    weights = [torch.randn(2, 8), torch.randn(2, 8).bfloat16(), torch.randn(1, 8).bfloat16()]
    assert [tuple(weight.shape) for weight in concatenate_rows(weights)] == [(2, 8), (3, 8)]
