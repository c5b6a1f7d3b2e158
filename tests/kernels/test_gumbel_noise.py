"""Noise of tokens: Philox4x32-10 against the known answers published with Random123 (kat_vectors), and Gumbel's law."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.reference.gumbel_noise import gumbel_noise, noise_of_words, philox4x32

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_a_token_has_the_noise_of_its_word() -> None:
    words = torch.tensor(KNOWN_ANSWERS[0][2])
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), 6)
    assert torch.equal(noise[0, :4], noise_of_words(words))
    longer = gumbel_noise(torch.tensor([0]), torch.tensor([0]), 1001)
    assert torch.equal(longer[:, :6], noise)


def test_all_64_bits_of_seed_and_position_count() -> None:
    numbers = torch.tensor([1, 1 + 2**32, 1 - 2**63, -1])
    fixed = torch.full((4,), 9)
    assert len({tuple(row) for row in gumbel_noise(numbers, fixed, 4).tolist()}) == 4
    assert len({tuple(row) for row in gumbel_noise(fixed, numbers, 4).tolist()}) == 4


def test_noise_of_every_word_is_finite_and_falls_with_the_word() -> None:
    words = torch.tensor([0, 1, 2, 1000, 2**26 - 1, 2**26, 2**26 + 1, 2**31, 2**32 - 1])
    noise = noise_of_words(words)
    assert noise.isfinite().all()
    assert (noise[1:] <= noise[:-1]).all()
    exact = [-math.log(-math.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24))) for word in words.tolist()]
    torch.testing.assert_close(noise, torch.tensor(exact), rtol=2e-6, atol=2e-6)


def test_follows_the_distribution_over_tokens_positions_and_seeds() -> None:
    numbers, fixed = torch.arange(5000), torch.full((5000,), 17)
    for noise in (
        gumbel_noise(fixed, numbers, 4),
        gumbel_noise(numbers, fixed, 4),
        gumbel_noise(fixed, fixed, 20000)[0],
    ):
        uniform = torch.exp(-torch.exp(-noise.flatten()[:20000]))
        histogram = torch.histc(uniform, 20, 0, 1)
        # 1000 expected in each of 20 bins, standard deviation 31; the numbers are fixed, so this cannot flake.
        assert (histogram - 1000).abs().max() < 125
