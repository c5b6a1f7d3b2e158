"""The decoder against transformers, from safetensors that transformers wrote and from GGUF: tiny random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from kernels import ops
from runners.loading.checkpoint import open_checkpoint
from runners.models.builder import build_decoder
from tests.support.forward import logits_in_pieces
from tests.support.gguf_writer import write_gguf
from tests.support.tensors import relative_error
from tests.support.tiny_models import FAMILIES, LLAMA3_ROPE, tiny_model

# Longer than the sliding windows (24), and over several blocks.
NUM_TOKENS = 75
PIECES = {
    "at once": [NUM_TOKENS],
    "chunked": [16, 1, 30, 7, 21],
    "prefill and decode": [NUM_TOKENS - 12] + [1] * 12,
}


@pytest.fixture(scope="module", params=[(family, suffix) for family in FAMILIES for suffix in ("safetensors", "gguf")])
def model_and_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.nn.Module, Path]:
    family, suffix = request.param
    model = tiny_model(family)
    path = tmp_path_factory.mktemp(family)
    if suffix == "safetensors":
        model.save_pretrained(path, max_shard_size="200KB")  # several shards
    else:
        write_gguf(model, path / "model.gguf")
    return model, path


def expected_logits(
    model: torch.nn.Module, token_ids: list[int], position_ids: list[int] | None = None
) -> torch.Tensor:
    positions = None if position_ids is None else torch.tensor([position_ids])
    mask = torch.ones(1, len(token_ids), dtype=torch.long)  # without it a jump in positions starts a new sequence
    with torch.no_grad():
        output: torch.Tensor = model(torch.tensor([token_ids]), attention_mask=mask, position_ids=positions).logits[0]
    return output


@pytest.mark.parametrize("implementation", ["reference", "registered"])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_logits_equal_transformers(
    model_and_path: tuple[torch.nn.Module, Path], pieces: list[int], implementation: str
) -> None:
    model, path = model_and_path
    token_ids = torch.randint(0, 160, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = build_decoder(open_checkpoint(path), dtype="float32", quantization="none")
    if implementation == "reference":
        with ops.reference_only():
            logits = logits_in_pieces(decoder, token_ids, pieces)
    else:
        logits = logits_in_pieces(decoder, token_ids, pieces)
    expected = expected_logits(model, token_ids)
    assert relative_error(logits, expected) <= 1e-4
    assert max(relative_error(ours, theirs) for ours, theirs in zip(logits, expected, strict=True)) <= 1e-4


def test_bfloat16_stays_close(model_and_path: tuple[torch.nn.Module, Path]) -> None:
    model, path = model_and_path
    token_ids = list(range(10, 60))
    decoder = build_decoder(open_checkpoint(path), dtype="bfloat16")
    assert relative_error(logits_in_pieces(decoder, token_ids, [49, 1]), expected_logits(model, token_ids)) <= 5e-2


@pytest.mark.parametrize(
    "rope_parameters",
    [LLAMA3_ROPE, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}],
    ids=["llama3", "linear"],
)
def test_scaled_rope_at_position_10000(rope_parameters: dict[str, object], tmp_path: Path) -> None:
    model = tiny_model("llama", max_position_embeddings=16384, rope_parameters=dict(rope_parameters))
    model.save_pretrained(tmp_path)
    decoder = build_decoder(open_checkpoint(tmp_path), dtype="float32")
    token_ids = list(range(3, 40))
    # Attention sees differences of positions: some keys lie far back.
    position_ids = [*range(12), *range(5_000, 5_005), *range(9_990, 10_010)]
    logits = logits_in_pieces(decoder, token_ids, [30, 7], position_ids=position_ids)
    assert relative_error(logits, expected_logits(model, token_ids, position_ids)) <= 1e-4
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    unscaled = tiny_model("llama", max_position_embeddings=16384, rope_parameters=plain)
    unscaled.load_state_dict(model.state_dict())
    assert relative_error(expected_logits(unscaled, token_ids, position_ids), logits) > 1e-2


def test_blocks_stay_blocks_where_there_are_kernels_and_mixed_types_keep_their_own(tmp_path: Path) -> None:
    """q, k and gate in Q8_0, v and up in Q5_0, as some files have them: two matrices each, the same product."""
    model = tiny_model("qwen3")
    mixed = {
        f"blk.{layer}.{name}.weight": GGMLQuantizationType.Q5_0 for layer in range(3) for name in ("attn_v", "ffn_up")
    }
    path = tmp_path / "model.gguf"
    write_gguf(model, path, matrix_type=GGMLQuantizationType.Q8_0, tensor_types=mixed)
    token_ids = list(range(20, 70))
    dequantized = build_decoder(open_checkpoint(path), dtype="float32", quantization="none")
    expected = logits_in_pieces(dequantized, token_ids, [40] + [1] * 10)
    assert relative_error(expected, expected_logits(model, token_ids)) < 0.2

    kept = build_decoder(open_checkpoint(path), dtype="float32")
    if {"q8_0", "q5_0"} <= ops.native_formats("cpu"):
        assert kept.weight_bytes < dequantized.weight_bytes / 2
        assert len(kept.layers[0].qkv_proj.weights) == len(kept.layers[0].gate_up_proj.weights) == 2
    # Kernels may round activations to eight bits.
    assert relative_error(logits_in_pieces(kept, token_ids, [40] + [1] * 10), expected) < 2e-2


def test_weight_bytes_count_a_tied_head_once(tmp_path: Path) -> None:
    model = tiny_model("smollm")
    model.save_pretrained(tmp_path)
    decoder = build_decoder(open_checkpoint(tmp_path), dtype="float32", quantization="none")
    assert decoder.weight_bytes == sum(parameter.numel() * 4 for parameter in model.parameters())
