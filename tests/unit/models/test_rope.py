from __future__ import annotations

import math

import pytest
import torch

from runners.errors import StartupError
from runners.models.config import RopeScaling
from runners.models.rope import build_rope_table, rope_frequencies

LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)


def test_plain_table() -> None:
    table = build_rope_table(8, 10000.0, None, 5)
    assert table.shape == (5, 8)
    for position in range(5):
        for index in range(4):
            angle = position * 10000.0 ** (-2 * index / 8)
            assert table[position, index].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert table[position, 4 + index].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_linear_scaling_stretches_positions() -> None:
    scaled = build_rope_table(16, 500.0, RopeScaling("linear", factor=4.0), 9)
    plain = build_rope_table(16, 500.0, None, 3)
    torch.testing.assert_close(scaled[::4], plain)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    plain, scaled = rope_frequencies(128, 500000.0, None), rope_frequencies(128, 500000.0, LLAMA3)
    for base, frequency in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / base
        if wavelength < 8192 / 4:
            expected = base
        elif wavelength > 8192:
            expected = base / 8
        else:
            blend = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - blend) * base / 8 + blend * base
        assert frequency == pytest.approx(expected, rel=1e-5)
    assert {1.0, 8.0} < {round(ratio, 4) for ratio in (plain / scaled).tolist()}


def test_factors_divide_each_frequency() -> None:
    factors = (1.0, 2.0, 8.0, 3.5)
    scaled = rope_frequencies(8, 10000.0, RopeScaling("factors", frequency_factors=factors))
    torch.testing.assert_close(scaled * torch.tensor(factors), rope_frequencies(8, 10000.0, None))


def test_factors_of_another_head_size_are_refused() -> None:
    with pytest.raises(StartupError, match="2 frequency factors for head size 8, need 4"):
        rope_frequencies(8, 10000.0, RopeScaling("factors", frequency_factors=(1.0, 2.0)))


def test_unknown_scaling_is_named() -> None:
    with pytest.raises(StartupError, match="'yarn' is not supported"):
        rope_frequencies(8, 10000.0, RopeScaling("yarn"))
