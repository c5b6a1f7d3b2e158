"""Gated activations, embedding rows, argmax, penalties, bias."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from tests.support.tensors import random_tensor, relative_error, tolerance

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "features"), [(1, 1536), (3, 200)])
def test_gated_activation(triton_device, rows, features, activation, dtype):
    from kernels.triton_ops.gated_activation import gated_activation

    gate_up = random_tensor(rows, 2 * features, dtype=dtype, device=triton_device, scale=2)
    expected = reference.gated_activation(gate_up, activation)
    assert relative_error(gated_activation(gate_up, activation), expected) < tolerance(dtype)


@pytest.mark.parametrize("scale", [1.0, 24.0])
def test_embedding(triton_device, scale):
    from kernels.triton_ops.embedding import embedding

    weight = random_tensor(50, 1200, dtype=torch.bfloat16, device=triton_device)
    ids = torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=triton_device)
    actual = embedding(ids, weight, scale)
    # The interpreter rounds bfloat16 toward zero.
    assert relative_error(actual, reference.embedding(ids, weight, scale)) < tolerance(torch.bfloat16)


def test_argmax_lowest_id_wins(triton_device):
    from kernels.triton_ops.argmax import argmax

    logits = random_tensor(4, 9000, dtype=torch.float32, device=triton_device)
    logits[1, 8999] = logits[1, 17] = 50.0
    logits[2, 4095] = logits[2, 4096] = 50.0
    logits[3] = -1.0
    for _ in range(2):  # the second call finds the counters as the first left them
        assert argmax(logits).tolist() == [logits[0].argmax().item(), 17, 4095, 0]


def test_argmax_finds_nan(triton_device):
    from kernels.triton_ops.argmax import argmax

    logits = random_tensor(1, 5000, dtype=torch.float32, device=triton_device)
    logits[0, 4321] = float("nan")
    assert argmax(logits).tolist() == [4321]


def test_apply_penalties(triton_device):
    from kernels.triton_ops.apply_penalties import apply_penalties

    vocab, slots = 3000, 5
    logits = random_tensor(3, vocab, dtype=torch.float32, device=triton_device)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 3, (slots, vocab), generator=generator, dtype=torch.int32).to(triton_device)
    in_prompt = (torch.randint(0, 2, (slots, vocab), generator=generator) > 0).to(triton_device)
    arguments = (
        logits,
        counts,
        in_prompt,
        torch.tensor([4, 0, 2], device=triton_device),
        torch.tensor([0.5, 0.0, 0.0], device=triton_device),
        torch.tensor([0.25, 0.0, 1.0], device=triton_device),
        torch.tensor([1.3, 1.0, 0.8], device=triton_device),
    )
    penalised = apply_penalties(*arguments)
    assert torch.equal(penalised[1], logits[1])
    torch.testing.assert_close(penalised, reference.apply_penalties(*arguments), rtol=1e-6, atol=1e-6)


def test_add_logit_bias(triton_device):
    from kernels.triton_ops.add_logit_bias import add_logit_bias

    logits = random_tensor(3, 700, dtype=torch.float32, device=triton_device)
    rows = torch.tensor([0, 2, 2, 2], device=triton_device)
    tokens = torch.tensor([699, 1, 1, 5], device=triton_device)
    bias = torch.tensor([1.0, 2.0, 3.0, float("-inf")], device=triton_device)
    biased = add_logit_bias(logits, rows, tokens, bias)
    torch.testing.assert_close(biased, reference.add_logit_bias(logits, rows, tokens, bias))
    assert biased[2, 5] == float("-inf")
