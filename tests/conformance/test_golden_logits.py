"""Real models against golden values: log-probabilities and greedy continuations.

The `float32` values are transformers' on the dequantised weights. The float32 path agrees within 0.01 and in every id
whose margin is over 0.02; the default CPU path (quantised blocks) within a mean of 0.05, ids where the margin is over
0.5. llama.cpp rounds activations, so it only sees that we are not far off: a mean under 0.2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runners.loading.checkpoint import open_checkpoint
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from tests.support.forward import logits_in_pieces

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {"smollm2_path": "smollm2-135m-instruct-q4_1.json", "gemma3_path": "gemma3-270m-q4_k_m.json"}


@dataclass(frozen=True)
class Tolerance:
    """Bounds on the mean and the largest log-probability difference, and the margin above which ids must agree."""

    mean: float
    largest: float
    margin: float


FLOAT32 = Tolerance(mean=0.01, largest=0.01, margin=0.02)
DEFAULT_CPU = Tolerance(mean=0.05, largest=0.5, margin=0.5)
LLAMA_CPP = Tolerance(mean=0.2, largest=1.0, margin=0.5)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.model) for name in FILES])
def model(request: pytest.FixtureRequest) -> tuple[Path, list[dict[str, Any]]]:
    golden = json.loads((GOLDEN / FILES[request.param]).read_text())
    return request.getfixturevalue(request.param), golden["prompts"]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_log_probabilities_and_greedy_ids(model: tuple[Path, list[dict[str, Any]]], quantization: str) -> None:
    path, prompts = model
    decoder = build_decoder(open_checkpoint(path), dtype="float32", quantization=quantization, max_context=1024)
    own = FLOAT32 if quantization == "none" else DEFAULT_CPU
    differences: dict[str, list[float]] = {"float32": [], "llama_cpp": []}
    for prompt in prompts:
        logprobs = torch.log_softmax(logits_in_pieces(decoder, prompt["ids"], [len(prompt["ids"])]), dim=-1)
        for source, found in differences.items():
            found += _differences(logprobs, prompt[source]["top10_logprobs_per_position"])
        _check_greedy(decoder, prompt, "float32", own.margin)
        _check_greedy(decoder, prompt, "llama_cpp", LLAMA_CPP.margin)
    for source, tolerance in (("float32", own), ("llama_cpp", LLAMA_CPP)):
        found = torch.tensor(differences[source])
        assert found.mean() < tolerance.mean, source
        assert found.max() < tolerance.largest, source


def _differences(logprobs: torch.Tensor, golden: list[list[list[float]]]) -> list[float]:
    return [
        abs(float(logprobs[position, int(token_id)]) - value)
        for position, entries in enumerate(golden)
        for token_id, value in entries
    ]


def _check_greedy(decoder: Decoder, prompt: dict[str, Any], source: str, margin: float) -> None:
    """Feed the golden continuation and compare each choice, so that one near-tie does not end the comparison."""
    ids, margins = prompt[source]["greedy"], prompt[source]["greedy_margin"]
    sequence = [*prompt["ids"], *ids[:-1]]
    pieces = [len(prompt["ids"])] + [1] * (len(ids) - 1)
    chosen = logits_in_pieces(decoder, sequence, pieces)[len(prompt["ids"]) - 1 :].argmax(dim=-1).tolist()
    wrong = [
        (index, chosen[index], ids[index], margins[index])
        for index in range(len(ids))
        if chosen[index] != ids[index] and margins[index] > margin
    ]
    assert not wrong, f"{source}: (index, chosen, golden, margin) {wrong}"
