from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library
from tests.support.gguf_blocks import SCALE_OFFSETS, expected_values, random_weight

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")


@pytest.mark.parametrize("format_name", SCALE_OFFSETS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_rows_of_a_tiled_weight(format_name: str, dtype: torch.dtype | None) -> None:
    weight = random_weight(format_name, 70, 256)
    ids = torch.tensor([69, 0, 15, 16, 16, 33, 31], dtype=torch.int32)
    expected = (expected_values(weight)[ids.long()] * 24.0).to(dtype or torch.float32)
    assert torch.equal(ops.embedding(ids, ops.pack_weight(weight), 24.0, dtype), expected)


@pytest.mark.parametrize("bad_id", [-1, 70])
def test_an_id_outside_the_vocabulary_is_an_error(bad_id: int) -> None:
    weight = ops.pack_weight(random_weight("q8_0", 70, 64))
    with pytest.raises(IndexError, match=f"{bad_id} is outside"):
        ops.embedding(torch.tensor([3, bad_id], dtype=torch.int32), weight)


def test_the_reference_reads_tiles_too() -> None:
    weight = ops.pack_weight(random_weight("q4_1", 70, 64))
    ids = torch.tensor([5, 69], dtype=torch.int32)
    with ops.reference_only():
        expected = ops.embedding(ids, weight)
    assert torch.equal(ops.embedding(ids, weight), expected)
