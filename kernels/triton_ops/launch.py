"""Programmatic dependent launch, shared by every kernel of this package.

A kernel launched this way may start while the one before it still drains: it reads what it may, and calls
`wait_for_inputs` before anything else. The wait is also where it lets the next kernel start, so once a kernel runs, all
but its direct predecessor have completed: before the wait it may read weights and whatever an earlier kernel than
the last one wrote. Every kernel must wait, even one with nothing to read.
Needs compute capability 9.0; elsewhere the call compiles to nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Block until the kernels before have completed and their writes are visible; then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_lines(ptrs):
    """Ask L2 for the 128-byte lines that hold `ptrs`. Not for the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@functools.cache
def capability(device_index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device_index)


@functools.cache
def num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def dependent_launch(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments that launch a kernel on the device of `tensor` dependently where the device can."""
    if tensor.is_cuda and capability(tensor.device.index) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """Zeroed int32 [count], for programs that merge partial results: the last to arrive merges and puts zero back.

    One array a device and size: kernels that use it must not run on two streams at once.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)
