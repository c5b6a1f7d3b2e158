"""Streams, fences and staging buffers of a GPU, and the same of a CPU, where everything is done when a call returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Fence(Protocol):
    """A point in a stream."""

    def is_passed(self) -> bool: ...
    def wait(self) -> None: ...


class DeviceStreams(Protocol):
    """Where an executor's work is queued: the main stream, and one for overlapped prefills ("flights")."""

    device: torch.device

    def on_main(self) -> AbstractContextManager[None]: ...
    def on_flight(self) -> AbstractContextManager[None]:
        """Queue on the flight stream, after everything that is on the main one."""
        ...

    def upload(self, words: NDArray[np.int32], target: torch.Tensor | None = None) -> torch.Tensor:
        """Copy int32 words to the device without waiting, to the front of `target` or into a new tensor."""
        ...

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """A host copy of `source` that is complete once a fence recorded after this call is passed."""
        ...

    def fence(self) -> Fence: ...
    def check(self) -> None:
        """Raises torch.AcceleratorError when the device is lost."""
        ...


class _PassedFence:
    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        return


class HostStreams:
    """No streams: work is done in the order of the calls."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def on_main(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    on_flight = on_main

    def upload(self, words: NDArray[np.int32], target: torch.Tensor | None = None) -> torch.Tensor:
        source = torch.from_numpy(words)
        if target is None:
            return source.to(self.device, copy=True)
        target[: len(words)] = source
        return target

    def download(self, source: torch.Tensor) -> torch.Tensor:
        return source.to("cpu", copy=True)

    def fence(self) -> Fence:
        return _PassedFence()

    def check(self) -> None:
        return


class _EventFence:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class CudaStreams:
    """Two streams of one GPU. Staging buffers are pinned; torch's host allocator keeps them until copies are done."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.main = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._flight = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # Weights and pool were written on whatever stream loaded them.
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def on_main(self) -> Iterator[None]:
        with torch.cuda.stream(self.main):
            yield

    @contextlib.contextmanager
    def on_flight(self) -> Iterator[None]:
        self._flight.wait_stream(self.main)
        with torch.cuda.stream(self._flight):
            yield

    def upload(self, words: NDArray[np.int32], target: torch.Tensor | None = None) -> torch.Tensor:
        staged = torch.empty(len(words), dtype=torch.int32, pin_memory=True)
        staged.numpy()[:] = words
        if target is None:
            target = torch.empty(len(words), dtype=torch.int32, device=self.device)
        target[: len(words)].copy_(staged, non_blocking=True)
        return target

    def download(self, source: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        copy.copy_(source, non_blocking=True)
        return copy

    def fence(self) -> Fence:
        return _EventFence()

    def check(self) -> None:
        self.main.query()
