"""Sampling on the CPU, a row a thread."""

from __future__ import annotations

import torch

from kernels.cpu_ops.library import require_library
from kernels.sampling import SamplingTensors


def accepts(logits: torch.Tensor, best_ids: torch.Tensor, params: SamplingTensors) -> bool:
    return logits.dtype == torch.float32 and logits.dim() == 2 and logits.stride(1) == 1


def sample(logits: torch.Tensor, best_ids: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """logits [n, V] float32, best_ids [n] int64, their argmax → [n] int64."""
    rows, vocab = logits.shape
    columns = (params.temperature, params.top_k, params.top_p, params.min_p, params.seeds, params.positions)
    dense = [column.contiguous() for column in (best_ids, *columns)]
    out = torch.empty(rows, dtype=torch.int64)
    pointers = [column.data_ptr() for column in dense]
    _sample(logits.data_ptr(), rows, vocab, logits.stride(0), *pointers, out.data_ptr())
    return out


_sample = require_library().wl_sample
