"""Greedy choice on the CPU."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import require_library


def accepts(logits: torch.Tensor) -> bool:
    return logits.dtype == torch.float32 and logits.dim() == 2 and logits.stride(1) == 1 and logits.shape[1] > 0


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits [n, V] float32 → [n] int64: the lowest index of the largest value, the first NaN where there is one."""
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    _argmax(logits.data_ptr(), rows, vocab, logits.stride(0), ids.data_ptr())
    return ids


_argmax = require_library().wl_argmax
