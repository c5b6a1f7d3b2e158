"""The CPU sampler draws the reference's tokens."""

from __future__ import annotations

import pytest
import torch

from kernels import ops, reference
from kernels.cpu_ops.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")

NUM_ROWS = 60


def params_of(temperature: float, top_k: int, top_p: float, min_p: float) -> ops.SamplingTensors:
    return ops.SamplingTensors(
        temperature=torch.full((NUM_ROWS,), temperature),
        top_k=torch.full((NUM_ROWS,), top_k, dtype=torch.int32),
        top_p=torch.full((NUM_ROWS,), top_p),
        min_p=torch.full((NUM_ROWS,), min_p),
        seeds=torch.randint(-(2**62), 2**62, (NUM_ROWS,)),
        positions=torch.randint(0, 4000, (NUM_ROWS,)),
    )


@pytest.mark.parametrize("vocab", [1, 17, 64, 300, 5003])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.3, 40, 1.0, 0.0),
        (0.8, 50, 0.9, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.0, 20, 0.5, 0.01),
        (1.0, 1, 1.0, 0.0),
        (3.0, 0, 0.05, 0.0),
        (1.0, 10_000, 0.9, 0.0),
    ],
)
def test_against_the_reference(vocab: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(NUM_ROWS, vocab + 5)[:, :vocab] * 3
    best = logits.argmax(-1)
    params = params_of(temperature, top_k, top_p, min_p)
    assert ops.sample(logits, best, params).tolist() == reference.sample(logits, best, params).tolist()


def test_equals_of_the_threshold_are_kept() -> None:
    logits = torch.full((NUM_ROWS, 200), -3.0)
    logits[:, 100:110] = 1.0
    for top_k, top_p in ((3, 1.0), (0, 0.2), (3, 0.2)):
        tokens = ops.sample(logits, logits.argmax(-1), params_of(1.0, top_k, top_p, 0.0)).tolist()
        assert set(tokens) <= set(range(100, 110))
        assert len(set(tokens)) > 5


def test_rows_without_a_usable_logit_end_with_some_token() -> None:
    logits = torch.zeros(NUM_ROWS, 70)
    logits[:20] = float("nan")
    logits[20:30, 5] = float("nan")
    logits[30:40] = float("-inf")
    logits[40:50, 3] = float("inf")
    for top_k, top_p in ((0, 1.0), (5, 0.5), (5, 1.0), (0, 0.5)):
        tokens = ops.sample(logits, ops.argmax(logits), params_of(1.0, top_k, top_p, 0.1))
        assert ((tokens >= 0) & (tokens < 70)).all()
