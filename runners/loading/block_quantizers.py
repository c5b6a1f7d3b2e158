"""Float weights as Q8_0 and Q4_K blocks, vectorised in torch on any device.

Layout: the block structs of ggml's `ggml-common.h`. Scales: Q8_0 by the largest magnitude; Q4_K by least squares over
several roundings of every sub-block, then 6-bit scales and minima.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows are quantised in pieces of this many elements, which bounds the temporaries to some hundred MB.
CHUNK_ELEMENTS = 1 << 22
_STRETCHES = tuple(0.1 * step for step in range(-8, 9))


def quantize_q8_0(values: Tensor) -> Tensor:
    """float [out, in], in % 32 == 0 → uint8 [out, in/32 × 34]."""
    return _by_rows(values, _q8_0_blocks)


def quantize_q4_k(values: Tensor) -> Tensor:
    """float [out, in], in % 256 == 0 → uint8 [out, in/256 × 144]."""
    return _by_rows(values, _q4_k_blocks)


def _by_rows(values: Tensor, quantize: object) -> Tensor:
    assert callable(quantize)
    rows, columns = values.shape
    step = max(1, CHUNK_ELEMENTS // columns)
    return torch.cat([quantize(values[start : start + step].float()) for start in range(0, rows, step)])


def _bytes(halves: Tensor) -> Tensor:
    """float16 [..., 1] → uint8 [..., 2]."""
    return halves.contiguous().view(torch.uint8)


def _q8_0_blocks(values: Tensor) -> Tensor:
    blocks = values.reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    steps = scale.float()
    quants = torch.where(steps > 0, blocks / steps, 0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((_bytes(scale), quants.view(torch.uint8)), 1).reshape(values.shape[0], -1)


def _q4_k_blocks(values: Tensor) -> Tensor:
    subs = values.reshape(-1, 8, 32)
    scale, minimum = _sub_scales(subs)
    d = (scale.amax(1, keepdim=True) / 63).half()
    d_min = (minimum.amax(1, keepdim=True) / 63).half()
    scale_bits, minimum_bits = (
        torch.where(of.float() > 0, what / of.float(), 0).round().clamp(0, 63)
        for what, of in ((scale, d), (minimum, d_min))
    )
    step = (d.float() * scale_bits)[..., None]
    offset = (d_min.float() * minimum_bits)[..., None]
    quants = torch.where(step > 0, (subs + offset) / step, 0).round().clamp(0, 15).to(torch.uint8)
    pairs = quants.reshape(-1, 4, 2, 32)
    packed = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    blocks = torch.cat((_bytes(d), _bytes(d_min), _six_bits(scale_bits, minimum_bits), packed), 1)
    return blocks.reshape(values.shape[0], -1)


def _sub_scales(subs: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum ([n, 8], both ≥ 0) with value ≈ scale × q − minimum, q in 0..15, of least squared error."""
    low = subs.amin(2, keepdim=True).clamp(max=0)
    span = subs.amax(2, keepdim=True) - low
    best_scale, best_min = span / 15, -low
    best_error = torch.full_like(span, torch.inf)
    mean = subs.mean(2, keepdim=True)
    for stretch in _STRETCHES:
        inverse = torch.where(span > 0, (15 + stretch) / span, 0)
        quants = ((subs - low) * inverse).round().clamp(0, 15)
        # The line through (q, value): slope and intercept; an intercept above zero cannot be stored.
        centred = quants - quants.mean(2, keepdim=True)
        spread = (centred * centred).sum(2, keepdim=True)
        slope = torch.where(spread > 0, (centred * subs).sum(2, keepdim=True) / spread, 0)
        intercept = mean - slope * quants.mean(2, keepdim=True)
        square = (quants * quants).sum(2, keepdim=True)
        through_zero = torch.where(square > 0, (quants * subs).sum(2, keepdim=True) / square, 0)
        slope = torch.where(intercept > 0, through_zero, slope).clamp(min=0)
        intercept = intercept.clamp(max=0)
        error = (slope * quants + intercept - subs).square().sum(2, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, slope, best_scale)
        best_min = torch.where(better, -intercept, best_min)
    return best_scale.squeeze(2), best_min.squeeze(2)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and eight minima of 6 bits [n, 8] → the 12 bytes of a Q4_K block."""
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    return torch.cat(
        (
            s[:, :4] | ((s[:, 4:] >> 4) << 6),
            m[:, :4] | ((m[:, 4:] >> 4) << 6),
            (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4),
        ),
        1,
    )
