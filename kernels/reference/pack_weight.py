"""The form of a weight that the plain torch ops run: as it is."""

from __future__ import annotations

from kernels.weights import LinearWeight


def pack_weight(weight: LinearWeight, quantization: str = "none") -> LinearWeight:
    """The weight itself. ValueError on any quantisation: plain torch has none."""
    if quantization != "none":
        raise ValueError(f"quantization {quantization!r} is not available on this device")
    return weight
