from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def rotate_as_complex(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with pair i = (x[i], x[i + D/2]) as one complex number, turned by angles [T, D/2]."""
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 9, 64), (5, 3, 2), (4, 1, 256), (0, 2, 8)])
def test_is_a_rotation_of_pairs(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    table = torch.outer(torch.arange(50, dtype=torch.float64), frequencies)
    cos_sin = torch.cat((table.cos(), table.sin()), dim=-1).float()
    position_ids = torch.randint(0, 50, (num_tokens,), dtype=torch.int32)
    x = torch.randn(num_tokens, num_heads, head_dim).to(dtype)
    expected = rotate_as_complex(x, table[position_ids.long()])
    result = ops.rope(x, cos_sin, position_ids)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(3, 2, 8)
    cos_sin = torch.cat((torch.ones(1, 4), torch.zeros(1, 4)), dim=-1)
    assert torch.equal(ops.rope(x, cos_sin, torch.zeros(3, dtype=torch.int32)), x)


def test_table_of_another_head_size_is_refused() -> None:
    with pytest.raises(ops.ShapeError, match="rope"):
        ops.rope(torch.zeros(1, 1, 8), torch.zeros(4, 6), torch.zeros(1, dtype=torch.int32))
