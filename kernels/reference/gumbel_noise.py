"""Counter-based Gumbel noise from Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3").

The noise of a token depends on (seed, position, token id) alone: key = seed (low word, high word), counter = (position
low, position high, id / 4, 0), word id % 4 of the output. With v = (word + 1/2) · 2⁻³² uniform on (0, 1), the noise is
−log E of the exponential variable E = −log(1 − v). E is small where noise is large, and v keeps all 32 bits there.
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

# Below this v, −log(1 − v) is summed as a series: float32 has no 1 − v close enough to 1.
SERIES_LIMIT = 1 / 64
# The largest v below 1 in float32: a word near 2³² must not give an infinite E.
LARGEST_UNIFORM = 1 - 2.0**-24

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Ten rounds over 32-bit words held in int64 tensors of shapes that broadcast."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], x0)
        high1, low1 = _multiply(MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & _WORD, (k1 + KEY_INCREMENTS[1]) & _WORD
    return x0, x1, x2, x3


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """seeds, positions [n] int64 (bits of unsigned 64-bit numbers) → [n, vocab_size] float32, finite."""
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    quads = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    zero = torch.zeros_like(quads)
    counter = (positions & _WORD, (positions >> 32) & _WORD, quads, zero)
    words = philox4x32(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    return noise_of_words(torch.stack(words, dim=2).flatten(1)[:, :vocab_size])


def noise_of_words(words: torch.Tensor) -> torch.Tensor:
    """Gumbel noise float32 of uniform 32-bit words held in int64."""
    v = (words.to(torch.float32) + 0.5) * 2.0**-32
    v = v.clamp(max=LARGEST_UNIFORM)
    series = v + v * v * (1 / 2 + v * (1 / 3 + v / 4))
    return -torch.where(v < SERIES_LIMIT, series, -(1 - v).log()).log()


def _multiply(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of factor · word. The int64 product wraps modulo 2⁶⁴, which keeps all 64 bits right."""
    product = word * factor
    return (product >> 32) & _WORD, product & _WORD
