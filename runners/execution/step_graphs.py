"""How a step's work reaches the device: call by call, or from a graph captured earlier for the same key."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]
Body = Callable[[], Tensors]

# A graph of the 8B shape takes about 2 MB of device memory beside the shared pool.
MAX_GRAPHS = 1024


class StepGraphs(Protocol):
    """Runs bodies that read only fixed buffers and the device's own state."""

    num_graphs: int

    def run(self, key: Hashable, body: Body, *, may_capture: bool = True) -> Tensors:
        """The result of `body`, valid until the next step; equal keys mean equal work.

        Without `may_capture` a graph is used where there is one, but made by `prepare` only.
        """
        ...

    def prepare(self, key: Hashable, body: Body) -> None:
        """Make sure that the next `run` of the key is as fast as any. Runs the body, which must be harmless."""
        ...

    def uncaptured(self) -> list[Hashable]:
        """Keys that ran once and would be captured at their next run, oldest first."""
        ...

    def close(self) -> None: ...


class EagerSteps:
    """No graphs: every run calls the body."""

    num_graphs = 0

    def run(self, key: Hashable, body: Body, *, may_capture: bool = True) -> Tensors:
        return body()

    def prepare(self, key: Hashable, body: Body) -> None:
        body()

    def uncaptured(self) -> list[Hashable]:
        return []

    def close(self) -> None:
        return


class CapturedSteps:
    """CUDA graphs in one memory pool.

    A key runs eagerly the first time, which compiles kernels and makes what they keep; the second time it is captured
    on a stream of its own, which takes the launching thread but not the device, and replayed from then on. A key
    whose capture fails stays eager.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensors] | None] = {}
        self._seen: dict[Hashable, None] = {}  # in order; captured keys have left
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, key: Hashable, body: Body, *, may_capture: bool = True) -> Tensors:
        entry = self._graphs.get(key)
        if entry is None:
            if key in self._graphs:
                return body()
            if key not in self._seen or not may_capture:
                self._seen[key] = None
                return body()
            entry = self._capture(key, body)
            if entry is None:
                return body()
        graph, result = entry
        graph.replay()
        return result

    def prepare(self, key: Hashable, body: Body) -> None:
        if key in self._graphs:
            return
        if key not in self._seen:
            body()
        self._capture(key, body)

    def uncaptured(self) -> list[Hashable]:
        return list(self._seen)

    def close(self) -> None:
        self._graphs.clear()

    def _capture(self, key: Hashable, body: Body) -> tuple[torch.cuda.CUDAGraph, Tensors] | None:
        self._seen.pop(key, None)
        entry = self._graphs[key] = self._captured(key, body)
        return entry

    def _captured(self, key: Hashable, body: Body) -> tuple[torch.cuda.CUDAGraph, Tensors] | None:
        if self.num_graphs >= MAX_GRAPHS:
            return None
        # A collection could free tensors of another stream in the middle of the capture.
        collecting = gc.isenabled()
        gc.disable()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = body()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            logger.warning("no graph for %s, it stays eager: %s", key, error)
            return None
        finally:
            if collecting:
                gc.enable()
        self.num_graphs += 1
        return graph, result
