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


def first_rows(params, end, start=0):
    """The parameters of rows start to end."""
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return SamplingTensors(*(getattr(params, name)[start:end] for name in names))


def draw(logits, params):
    """The tokens of the kernels under test."""
    from kernels.triton_ops.sample import sample

    return sample(logits, logits.argmax(dim=-1), params).tolist()


def expected(logits, params):
    return reference.sample(logits, logits.argmax(dim=-1), params).tolist()


@pytest.mark.parametrize(("vocab", "seed"), [(50, 0), (50, 1), (9000, 2), (9001, 3)])
def test_sample_equals_reference(triton_device, vocab, seed):
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
    assert draw(logits, params) == expected(logits, params)


@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (50, 1.0), (50, 0.9), (0, 0.3)])
def test_a_whole_batch_over_a_large_vocabulary(top_k, top_p):
    """One instruction for a logarithm errs by 2^-22: of 256 rows one may draw another token than the reference."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    logits = random_tensor(256, 128256, dtype=torch.float32, device=device, scale=3)
    params = sampling_tensors(device, [0.7] * 256, [top_k] * 256, [top_p] * 256, [0.0] * 256)
    tokens = draw(logits, params)
    differing = sum(token != other for token, other in zip(tokens, expected(logits, params), strict=True))
    assert differing <= 1
    for row in (0, 100, 255):
        assert draw(logits[row : row + 1], first_rows(params, row + 1, row)) == tokens[row : row + 1]


def test_equals_of_the_threshold_are_kept(triton_device):
    logits = torch.full((12, 40), -5.0, device=triton_device)
    logits[:, 10:20] = 1.0
    params = sampling_tensors(triton_device, [1.0] * 12, [3] * 12, [0.2] * 12, [0.0] * 12)
    tokens = draw(logits, params)
    assert tokens == expected(logits, params)
    assert set(tokens) <= set(range(10, 20))
    assert len(set(tokens)) > 3


def test_a_flat_distribution_takes_many_rounds(triton_device):
    """Nucleus and top-k far smaller than the vocabulary: most rows are drawn by the program that does the rest."""
    logits = random_tensor(6, 2100, dtype=torch.float32, device=triton_device, scale=0.01)
    for top_k, top_p in ((0, 0.01), (40, 0.2)):
        params = sampling_tensors(triton_device, [1.0] * 6, [top_k] * 6, [top_p] * 6, [0.0] * 6)
        assert draw(logits, params) == expected(logits, params)


def test_a_row_of_nan_draws_a_token_of_the_vocabulary(triton_device):
    logits = random_tensor(3, 3000, dtype=torch.float32, device=triton_device)
    logits[1] = float("nan")
    logits[2, 7] = float("nan")
    params = sampling_tensors(triton_device, [1.0] * 3, [5] * 3, [0.9] * 3, [0.1] * 3)
    tokens = draw(logits, params)
    assert all(0 <= token < 3000 for token in tokens)
    assert tokens[0] == expected(logits[:1], first_rows(params, 1))[0]


def test_a_banned_token_is_never_drawn(triton_device):
    logits = torch.full((64, 3000), float("-inf"), device=triton_device)
    logits[:, 2990:] = 0.0
    params = sampling_tensors(triton_device, [1.0] * 64, [0] * 64, [1.0] * 64, [0.0] * 64)
    tokens = draw(logits, params)
    assert tokens == expected(logits, params)
    assert min(tokens) >= 2990


def test_a_row_does_not_depend_on_its_neighbours(triton_device):
    logits = random_tensor(3, 300, dtype=torch.float32, device=triton_device)
    together = sampling_tensors(triton_device, [0.8] * 3, [0, 50, 0], [0.9, 0.95, 1.0], [0.0] * 3)
    tokens = draw(logits, together)
    for row in range(3):
        assert draw(logits[row : row + 1], first_rows(together, row + 1, row)) == tokens[row : row + 1]


def test_frequencies_follow_the_distribution(triton_device):
    """Chi-square over 2,000 draws of 4 tokens: below 16.3 (p = 0.001, 3 degrees of freedom)."""
    draws = 2000 if triton_device.type == "cuda" else 150
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1], device=triton_device)
    logits = probabilities.log().expand(draws, 4).contiguous()
    params = sampling_tensors(triton_device, [1.0] * draws, [0] * draws, [1.0] * draws, [0.0] * draws)
    counts = torch.bincount(torch.tensor(draw(logits, params)), minlength=4).to(triton_device)
    expected = probabilities * draws
    assert ((counts - expected).square() / expected).sum().item() < 16.3
