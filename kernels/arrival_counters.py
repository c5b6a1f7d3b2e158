"""Counters by which the programs of a kernel find out who is last: that one merges what the others left.

One array serves every kernel of a stream, since each leaves zeros behind. Work on a second stream needs its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

_stream_name = ""


def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """Zeroed int32 [count] of the current stream name, the same tensor at every call."""
    return _counters(device, count, _stream_name)


@contextlib.contextmanager
def separate_counters(stream_name: str) -> Iterator[None]:
    """Within the block kernels are launched on another stream and take that stream's counters."""
    global _stream_name
    before, _stream_name = _stream_name, stream_name
    try:
        yield
    finally:
        _stream_name = before


@functools.cache
def _counters(device: torch.device, count: int, stream_name: str) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
