from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library
from tests.support.gguf_blocks import SCALE_OFFSETS, block_elements, expected_values, random_weight

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")


@pytest.mark.parametrize("format_name", SCALE_OFFSETS)
@pytest.mark.parametrize("out_features", [1, 16, 50])
def test_tiles_hold_the_same_values(format_name: str, out_features: int) -> None:
    weight = random_weight(format_name, out_features, 3 * block_elements(format_name), seed=out_features)
    tiled = ops.pack_weight(weight)
    assert isinstance(tiled, ops.QuantizedWeight)
    assert tiled.format == f"cpu_{format_name}"
    assert torch.equal(tiled.dequantize(torch.float32), expected_values(weight))


@pytest.mark.parametrize("format_name", SCALE_OFFSETS)
def test_tiles_take_the_room_of_the_blocks(format_name: str) -> None:
    weight = random_weight(format_name, 64, 512)
    assert ops.pack_weight(weight).nbytes <= 1.04 * weight.nbytes


def test_packing_twice_is_packing_once() -> None:
    tiled = ops.pack_weight(random_weight("q4_1", 16, 32))
    assert ops.pack_weight(tiled) is tiled


def test_float_weights_stay_as_they_are() -> None:
    weight = torch.randn(4, 32)
    assert ops.pack_weight(weight) is weight


def test_int8_rounds_to_a_127th_of_the_largest_of_32() -> None:
    weight = torch.randn(33, 96)
    weight[0] = 0
    packed = ops.pack_weight(weight, "int8")
    assert packed.format == "cpu_q8_0"
    step = weight.view(33, 3, 32).abs().amax(-1, keepdim=True) / 127
    error = (packed.dequantize(torch.float32) - weight).view(33, 3, 32).abs()
    assert bool((error <= 0.57 * step).all())  # half a step, plus the rounding of the scale to float16


def test_unknown_quantization_is_named() -> None:
    with pytest.raises(ValueError, match="int3"):
        ops.pack_weight(torch.randn(4, 32), "int3")
    with pytest.raises(ValueError, match="multiple of 32"):
        ops.pack_weight(torch.randn(4, 33), "int8")
