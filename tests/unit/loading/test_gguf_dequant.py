"""Every block decoder against the `gguf` package, bit for bit, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from runners.errors import StartupError
from runners.loading import gguf_dequant
from runners.loading.ggml_types import BLOCK_SIZES, GGMLType
from runners.loading.gguf_dequant import DECODERS, dequantize_rows

# Where float16 values lie in a block: random bytes there would give NaN and infinities.
HALF_OFFSETS = {
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_NL: (0,),
    GGMLType.IQ4_XS: (0,),
}


def random_rows(ggml_type: GGMLType, rows: int, blocks: int, seed: int) -> np.ndarray:
    """uint8 [rows, blocks * block_bytes]: random quants with finite random scales."""
    rng = np.random.default_rng(seed)
    if ggml_type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        values = torch.from_numpy(rng.standard_normal((rows, blocks)).astype(np.float32))
        dtype = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}[ggml_type]
        return values.to(dtype).view(torch.uint8).numpy()
    data = rng.integers(0, 256, (rows * blocks, ggml_type.block_bytes), dtype=np.uint8)
    for offset in HALF_OFFSETS[ggml_type]:
        scales = rng.standard_normal(rows * blocks).astype(np.float16)
        data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


def oracle(data: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(ggml_type)))


def test_block_sizes_equal_the_gguf_package() -> None:
    for ggml_type, sizes in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml_type.name]] == sizes
        assert gguf.GGMLQuantizationType[ggml_type.name].value == int(ggml_type)
    assert set(BLOCK_SIZES) == set(GGMLType)


@pytest.mark.parametrize("ggml_type", list(DECODERS), ids=lambda t: t.name)
def test_decoder_equals_the_gguf_package(ggml_type: GGMLType) -> None:
    data = random_rows(ggml_type, rows=37, blocks=5, seed=int(ggml_type))
    decoded = dequantize_rows(torch.from_numpy(data), ggml_type, "w", torch.float32)
    expected = oracle(data, ggml_type)
    assert decoded.shape == (37, 5 * ggml_type.block_elements)
    np.testing.assert_array_equal(decoded.numpy(), expected)
    assert np.isfinite(expected).all()


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.F32], ids=lambda t: t.name)
def test_chunks_and_rounding(ggml_type: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_rows(ggml_type, rows=9, blocks=3, seed=3)
    whole = dequantize_rows(torch.from_numpy(data), ggml_type, "w", torch.float32)
    monkeypatch.setattr(gguf_dequant, "CHUNK_ELEMENTS", 2 * ggml_type.block_elements)
    np.testing.assert_array_equal(
        dequantize_rows(torch.from_numpy(data), ggml_type, "w", torch.float32).numpy(), whole.numpy()
    )
    assert torch.equal(dequantize_rows(torch.from_numpy(data), ggml_type, "w", torch.bfloat16), whole.bfloat16())


def test_unaligned_source_and_fresh_memory() -> None:
    values = np.arange(8, dtype=np.float32)
    buffer = np.zeros(33, np.uint8)
    buffer[1:] = values.view(np.uint8)
    decoded = dequantize_rows(torch.from_numpy(buffer[1:].reshape(1, 32)), GGMLType.F32, "w", torch.float32)
    buffer[:] = 0
    np.testing.assert_array_equal(decoded.numpy()[0], values)


def test_a_type_without_decoder_is_named() -> None:
    data = torch.zeros((1, GGMLType.IQ2_XXS.block_bytes), dtype=torch.uint8)
    with pytest.raises(StartupError, match=r"tensor 'blk\.0\.ffn_up\.weight' has type IQ2_XXS"):
        dequantize_rows(data, GGMLType.IQ2_XXS, "blk.0.ffn_up.weight", torch.float32)
