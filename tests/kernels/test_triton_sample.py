"""Sampling on the device draws the reference's tokens."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.sampling import SamplingTensors
from tests.support.tensors import random_tensor


def sampling_tensors(device, temperature, top_k, top_p, min_p, seed=0):
    rows = len(temperature)
    generator = torch.Generator().manual_seed(seed)
    return SamplingTensors(
        temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
        min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator).to(device),
        positions=torch.randint(0, 4000, (rows,), generator=generator).to(device),
        any_top_k=any(top_k),
        any_top_p=any(value < 1 for value in top_p),
        any_min_p=any(min_p),
    )


@pytest.mark.parametrize(("vocab", "seed"), [(50, 0), (50, 1), (9000, 2)])
def test_sample_equals_reference(triton_device, vocab, seed):
    from kernels.triton_ops.sample import sample

    # greedy; plain; top-k; nucleus; min-p; all at once; a filter that keeps one token
    params = sampling_tensors(
        triton_device,
        temperature=[0.0, 1.0, 0.7, 0.7, 1.3, 0.9, 1.0],
        top_k=[0, 0, 5, 0, 0, 40, 1],
        top_p=[1.0, 1.0, 1.0, 0.9, 1.0, 0.8, 0.5],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.0],
        seed=seed,
    )
    logits = random_tensor(7, vocab, dtype=torch.float32, device=triton_device, seed=seed, scale=2)
    assert sample(logits, params).tolist() == reference.sample(logits, params).tolist()


def test_equals_of_the_threshold_are_kept(triton_device):
    from kernels.triton_ops.sample import sample

    logits = torch.full((12, 40), -5.0, device=triton_device)
    logits[:, 10:20] = 1.0
    params = sampling_tensors(triton_device, [1.0] * 12, [3] * 12, [0.2] * 12, [0.0] * 12)
    tokens = sample(logits, params)
    assert tokens.tolist() == reference.sample(logits, params).tolist()
    assert set(tokens.tolist()) <= set(range(10, 20))
    assert len(set(tokens.tolist())) > 3


def test_a_row_does_not_depend_on_its_neighbours(triton_device):
    from kernels.triton_ops.sample import sample

    logits = random_tensor(3, 300, dtype=torch.float32, device=triton_device)
    together = sampling_tensors(triton_device, [0.8] * 3, [0, 50, 0], [0.9, 0.95, 1.0], [0.0] * 3)
    tokens = sample(logits, together)
    for row in range(3):
        alone = SamplingTensors(
            *(getattr(together, name)[row : row + 1] for name in ("temperature", "top_k", "top_p", "min_p")),
            seeds=together.seeds[row : row + 1],
            positions=together.positions[row : row + 1],
        )
        assert sample(logits[row : row + 1], alone).item() == tokens[row].item()


def test_frequencies_follow_the_distribution(triton_device):
    """Chi-square over 2,000 draws of 4 tokens: below 16.3 (p = 0.001, 3 degrees of freedom)."""
    from kernels.triton_ops.sample import sample

    draws = 2000 if triton_device.type == "cuda" else 150
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1], device=triton_device)
    logits = probabilities.log().expand(draws, 4).contiguous()
    params = sampling_tensors(triton_device, [1.0] * draws, [0] * draws, [1.0] * draws, [0.0] * draws)
    counts = torch.bincount(sample(logits, params), minlength=4)
    expected = probabilities * draws
    assert ((counts - expected).square() / expected).sum().item() < 16.3
