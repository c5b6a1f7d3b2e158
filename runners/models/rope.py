"""Tables of rotary cosines and sines, with the scalings that the supported families use."""

from __future__ import annotations

import math

import torch

from runners.errors import StartupError
from runners.models.config import RopeScaling

SCALING_KINDS = ("linear", "llama3", "factors")


def build_rope_table(
    head_dim: int, theta: float, scaling: RopeScaling | None, max_positions: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[max_positions, head_dim] float32: head_dim / 2 cosines of position · frequency, then as many sines.

    Frequencies and angles are float32 products, like those of the published implementations: at position 10,000 an
    angle's own rounding (6e-4) would show as a difference.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(head_dim, theta, scaling))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """[head_dim / 2] float32: theta ** (-2 i / head_dim), scaled. StartupError names a scaling that is not known."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        if len(scaling.frequency_factors) != head_dim // 2:
            count = len(scaling.frequency_factors)
            raise StartupError(f"rope: {count} frequency factors for head size {head_dim}, need {head_dim // 2}")
        return frequencies / torch.tensor(scaling.frequency_factors, dtype=torch.float32)
    if scaling.kind == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    raise StartupError(f"rope scaling {scaling.kind!r} is not supported; supported: {', '.join(SCALING_KINDS)}")


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths divided by `factor`, short ones kept, a linear blend between.

    Source: the `rope_scaling` of the Llama 3.1 model release (rope_type "llama3").
    """
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    is_long = wavelengths > scaling.original_max_context / low
    is_short = wavelengths < scaling.original_max_context / high
    return torch.where(is_long, frequencies / scaling.factor, torch.where(is_short, frequencies, blended))
