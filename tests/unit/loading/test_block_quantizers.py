"""Quantising at load: blocks that other readers decode, errors as small as the format allows, sensible fallbacks."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from runners.errors import StartupError
from runners.loading.block_quantizers import quantize_q4_k, quantize_q8_0
from runners.loading.checkpoint import open_checkpoint
from runners.loading.ggml_types import GGMLType
from runners.loading.quantized_at_load import QuantizedAtLoad
from runners.models.builder import build_decoder
from tests.support.forward import logits_in_pieces
from tests.support.tiny_models import tiny_model


def decoded(blocks: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """By the `gguf` package, the oracle."""
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_q8_0_is_the_oracles_own() -> None:
    values = weights(7, 96)
    expected = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    ours = decoded(quantize_q8_0(values), gguf.GGMLQuantizationType.Q8_0)
    theirs = torch.from_numpy(gguf.quants.dequantize(expected, gguf.GGMLQuantizationType.Q8_0))
    # The step is rounded to float16 before the division here: values follow the step that is stored.
    assert (ours - values).norm() <= (theirs - values).norm() * 1.001


def test_q4_k_error_of_normal_weights() -> None:
    values = weights(64, 512)
    blocks = quantize_q4_k(values)
    assert blocks.shape == (64, 2 * 144)
    relative = (decoded(blocks, gguf.GGMLQuantizationType.Q4_K) - values).norm() / values.norm()
    # Rounding to 16 steps over the range of 32 normal values costs about 8 %; least squares saves a tenth of that.
    assert relative < 0.075


def test_q4_k_is_better_than_plain_rounding_to_the_range() -> None:
    values = weights(64, 512, seed=3)
    subs = values.reshape(-1, 32)
    low, high = subs.amin(1, keepdim=True), subs.amax(1, keepdim=True)
    step = (high - low) / 15
    plain = ((subs - low) / step).round() * step + low
    ours = decoded(quantize_q4_k(values), gguf.GGMLQuantizationType.Q4_K)
    assert (ours - values).norm() < 0.98 * (plain.reshape(values.shape) - values).norm()


@pytest.mark.parametrize("quantize", [quantize_q8_0, quantize_q4_k])
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25, 1e-9, 3e4])
def test_constant_rows(quantize: object, value: float) -> None:
    assert callable(quantize)
    kind = gguf.GGMLQuantizationType.Q8_0 if quantize is quantize_q8_0 else gguf.GGMLQuantizationType.Q4_K
    result = decoded(quantize(torch.full((2, 256), value)), kind)
    assert torch.isfinite(result).all()
    # 1e-9 is under float16's smallest step: zero is what the block can say.
    assert (result - value).abs().max() <= max(0.01 * abs(value), 1e-8)


def test_q4_k_of_one_sign() -> None:
    values = weights(4, 256).abs() + 0.5
    for sign in (1, -1):
        result = decoded(quantize_q4_k(sign * values), gguf.GGMLQuantizationType.Q4_K)
        assert (result - sign * values).abs().max() < 0.06


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = weights(9, 256)
    whole = quantize_q4_k(values)
    monkeypatch.setattr("runners.loading.block_quantizers.CHUNK_ELEMENTS", 512)
    assert torch.equal(quantize_q4_k(values), whole)


@pytest.mark.parametrize("quantization", ["q8_0", "q4_k"])
def test_a_decoder_quantised_at_load(tmp_path: Path, quantization: str) -> None:
    tiny_model("llama", seed=4, hidden_size=256, intermediate_size=320, num_attention_heads=8).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    source = QuantizedAtLoad(checkpoint, quantization, torch.device("cpu"))
    wide = GGMLType.Q8_0 if quantization == "q8_0" else GGMLType.Q4_K
    types = {name: source.get(name).ggml_type for name in source.names()}
    assert types["layers.0.q_proj"] is wide
    assert types["layers.0.down_proj"] is GGMLType.Q8_0  # 320 columns are no blocks of 256
    assert types["embed_tokens"] is types["lm_head"] is GGMLType.Q8_0
    assert types["norm"] is GGMLType.F32
    ids = [5, 17, 99, 3, 42]
    exact = logits_in_pieces(build_decoder(checkpoint), ids, [5])
    close = logits_in_pieces(build_decoder(checkpoint, quantization=quantization), ids, [5])
    error = (close - exact).norm() / exact.norm()
    assert 0 < error < (0.03 if quantization == "q8_0" else 0.25)
    # The same blocks without native kernels: what is left is the kernels' own rounding of activations.
    plain = logits_in_pieces(build_decoder(source, quantization="none"), ids, [5])
    assert (close - plain).norm() / plain.norm() < 0.03


def test_what_no_block_divides_stays(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=96, intermediate_size=100, num_attention_heads=6).save_pretrained(tmp_path)
    source = QuantizedAtLoad(open_checkpoint(tmp_path), "q4_k", torch.device("cpu"))
    assert source.get("layers.0.down_proj").ggml_type is GGMLType.F32


def test_an_unknown_form_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(StartupError, match=r"q3_k.*auto, none, q8_0, q4_k"):
        build_decoder(open_checkpoint(tmp_path), quantization="q3_k")
