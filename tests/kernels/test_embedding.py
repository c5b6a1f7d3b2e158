from __future__ import annotations

import pytest
import torch

from kernels import ops
from tests.support.quantized import make_q8_0

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_times_scale(dtype: torch.dtype) -> None:
    weight = torch.randn(11, 6).to(dtype)
    input_ids = torch.tensor([3, 0, 10, 3], dtype=torch.int32)
    assert torch.equal(ops.embedding(input_ids, weight), weight[input_ids.long()])
    scaled = ops.embedding(input_ids, weight, 2.5)
    assert torch.equal(scaled, (weight[input_ids.long()].float() * 2.5).to(dtype))


def test_activations_may_have_another_type_than_the_weight() -> None:
    weight = torch.randn(5, 4).bfloat16()
    result = ops.embedding(torch.tensor([4], dtype=torch.int32), weight, 1.5, torch.float32)
    assert torch.equal(result, weight[4:].float() * 1.5)


def test_quantized_rows() -> None:
    weight = make_q8_0(torch.randn(7, 64))
    input_ids = torch.tensor([6, 1, 1], dtype=torch.int32)
    result = ops.embedding(input_ids, weight, 3.0)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, weight.dequantize(torch.float32)[input_ids.long()] * 3.0)
