"""Philox4x32-10 against the known-answer vectors published with Random123 (kat_vectors, philox4x32 10)."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.random_uniform import philox4x32, random_uniform

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


def test_uniform_is_the_first_word_of_seed_and_position() -> None:
    assert random_uniform(torch.tensor([0]), torch.tensor([0])).item() == (0x6627E8D5 >> 8) / 2**24


def test_all_64_bits_of_the_seed_count() -> None:
    seeds = torch.tensor([1, 1 + 2**32, 1 - 2**63, -1])
    assert len(set(random_uniform(seeds, torch.full((4,), 9)).tolist())) == 4


def test_looks_uniform_over_positions_and_over_seeds() -> None:
    numbers = torch.arange(20000)
    for values in (
        random_uniform(torch.full_like(numbers, 1234), numbers),
        random_uniform(numbers, torch.full_like(numbers, 17)),
    ):
        assert values.min() >= 0
        assert values.max() < 1
        histogram = torch.histc(values, 20, 0, 1)
        # 1000 expected in each of 20 bins, standard deviation 31; the numbers are fixed, so this cannot flake.
        assert (histogram - 1000).abs().max() < 125
