from __future__ import annotations

import pytest
import torch

from kernels import ops


def test_plain_torch_keeps_the_weight_as_it_is() -> None:
    weight = torch.randn(3, 8)
    with ops.reference_only():
        assert ops.pack_weight(weight) is weight


def test_unknown_quantization_is_named() -> None:
    with ops.reference_only(), pytest.raises(ValueError, match="int3"):
        ops.pack_weight(torch.randn(3, 8), "int3")
