"""Compile kernels without a GPU: for tests of other targets, and to fill Triton's cache before a server starts."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels.triton_ops
from kernels.triton_ops.launch import EARLY_START, LATE_START, NO_OVERLAP


class OfflineDriver:
    """Stands in for the CUDA driver: Triton asks it for the target and the current device only."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[list[Any]]:
    """Within the block every launch, on CPU tensors, compiles for `capability` (80, 89, 90) and does not run.

    Yields the list that compiled kernels are added to. The process cannot launch kernels afterwards.
    """
    driver.set_active(OfflineDriver(capability))
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    def dependent_launch(tensor: Any, late: bool = False) -> dict[str, Any]:
        if capability < 90:
            return {"PDL": NO_OVERLAP}
        return {"PDL": LATE_START if late else EARLY_START, "launch_pdl": True}

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", compile_launch))
        for module in pkgutil.iter_modules(kernels.triton_ops.__path__, "kernels.triton_ops."):
            loaded = importlib.import_module(module.name)
            if hasattr(loaded, "dependent_launch"):
                patches.enter_context(mock.patch.object(loaded, "dependent_launch", dependent_launch))
        yield compiled
