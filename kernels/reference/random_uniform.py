"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3").

A row's number depends on (seed, position) alone: key = seed (low word, high word), counter = (position low, position
high, 0, 0), and u = (first output word >> 8) · 2⁻²⁴, uniform on [0, 1) and exact in float32.
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Ten rounds over 32-bit words held in int64 tensors of any one shape."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], x0)
        high1, low1 = _multiply(MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & _WORD, (k1 + KEY_INCREMENTS[1]) & _WORD
    return x0, x1, x2, x3


def random_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """seeds, positions [n] int64 (bits of unsigned 64-bit numbers) → u [n] float32 in [0, 1)."""
    zero = torch.zeros_like(positions)
    counter = (positions & _WORD, (positions >> 32) & _WORD, zero, zero)
    word = philox4x32(counter, (seeds & _WORD, (seeds >> 32) & _WORD))[0]
    return (word >> 8).to(torch.float32) * 2.0**-24


def _multiply(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of factor · word. The int64 product wraps modulo 2⁶⁴, which keeps all 64 bits right."""
    product = word * factor
    return (product >> 32) & _WORD, product & _WORD
