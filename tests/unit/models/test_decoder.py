"""The decoder against transformers, from folders that transformers wrote: tiny random models of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import ops
from runners.loading.checkpoint import open_checkpoint
from runners.models.builder import build_decoder
from tests.support.forward import logits_in_pieces
from tests.support.tensors import relative_error
from tests.support.tiny_models import FAMILIES, LLAMA3_ROPE, tiny_model

# Longer than the sliding windows (24), and over several blocks.
NUM_TOKENS = 75
PIECES = {
    "at once": [NUM_TOKENS],
    "chunked": [16, 1, 30, 7, 21],
    "prefill and decode": [NUM_TOKENS - 12] + [1] * 12,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model_and_folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model = tiny_model(family)
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder)
    return model, folder


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
    model_and_folder: tuple[torch.nn.Module, Path], pieces: list[int], implementation: str
) -> None:
    model, folder = model_and_folder
    token_ids = torch.randint(0, 160, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = build_decoder(open_checkpoint(folder), dtype="float32", quantization="none")
    if implementation == "reference":
        with ops.reference_only():
            logits = logits_in_pieces(decoder, token_ids, pieces)
    else:
        logits = logits_in_pieces(decoder, token_ids, pieces)
    expected = expected_logits(model, token_ids)
    assert relative_error(logits, expected) <= 1e-4
    assert max(relative_error(ours, theirs) for ours, theirs in zip(logits, expected, strict=True)) <= 1e-4


def test_bfloat16_stays_close(model_and_folder: tuple[torch.nn.Module, Path]) -> None:
    model, folder = model_and_folder
    token_ids = list(range(10, 60))
    decoder = build_decoder(open_checkpoint(folder), dtype="bfloat16")
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


def test_weight_bytes_count_a_tied_head_once(tmp_path: Path) -> None:
    model = tiny_model("smollm")
    model.save_pretrained(tmp_path)
    decoder = build_decoder(open_checkpoint(tmp_path), dtype="float32", quantization="none")
    assert decoder.weight_bytes == sum(parameter.numel() * 4 for parameter in model.parameters())
