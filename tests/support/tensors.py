"""Random tensors and error measures for kernel tests."""

from __future__ import annotations

import torch


def random_tensor(
    *shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64; NaN where either holds one."""
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-30)).item()


def tolerance(dtype: torch.dtype) -> float:
    """Relative error that one rounding of the result explains, with float32 sums inside."""
    return {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


# Triton's interpreter multiplies bfloat16 matrices as if they were integers: there float16 stands in for it.
HALF_DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
