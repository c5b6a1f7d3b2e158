"""Programmatic dependent launch, shared by every kernel of this package.

A kernel launched this way may start while the one before it still drains. It calls `start_next` first, so that the next
one may start as soon as all its programs have; reads weights; and calls `wait_for_inputs` before it touches anything
that a kernel writes. Every kernel must wait, even one with nothing to read.

A kernel launched with `late` lets the next one start only after its own wait. Then all but the direct predecessor of
that next kernel have completed when it starts, and it may read what those wrote before its wait.
Needs compute capability 9.0; elsewhere both calls compile to nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.arrival_counters import arrival_counters as arrival_counters

NO_OVERLAP, LATE_START, EARLY_START = 0, 1, 2


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start (2: EARLY_START)."""
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Block until the kernels before have completed, their writes visible (1: LATE_START lets the next start here)."""
    if PDL > 0:
        gdc_wait()
    if PDL == 1:
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


def dependent_launch(tensor: torch.Tensor, late: bool = False) -> dict[str, Any]:
    """Keyword arguments that launch a kernel on the device of `tensor` dependently where the device can."""
    if tensor.is_cuda and capability(tensor.device.index) >= (9, 0):
        return {"PDL": LATE_START if late else EARLY_START, "launch_pdl": True}
    return {"PDL": NO_OVERLAP}
