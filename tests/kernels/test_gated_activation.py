from __future__ import annotations

import math

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (1, 3072), (0, 8)])
def test_against_the_formula(shape: tuple[int, int], activation: str, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        activated = gate / (1 + torch.exp(-gate))
    else:
        activated = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    result = ops.gated_activation(gate_up, activation)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), activated * up, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="relu"):
        ops.gated_activation(torch.zeros(1, 4), "relu")


def test_odd_width_is_refused() -> None:
    with pytest.raises(ops.ShapeError, match="odd width 5"):
        ops.gated_activation(torch.zeros(1, 5), "silu")
