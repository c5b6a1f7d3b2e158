"""A `Stepper` whose executor is the cuda one, on a GPU or in its form for a CPU."""

from __future__ import annotations

from typing import Any

from runners.execution.cuda_executor import CudaExecutor
from runners.execution.device_streams import CudaStreams, HostStreams
from runners.execution.step_graphs import CapturedSteps, EagerSteps, StepGraphs
from runners.models.decoder import Decoder
from tests.support.stepping import Stepper


class CudaStepper(Stepper):
    """`graphs` None: what the decoder's device has."""

    executor: Any

    def __init__(
        self, decoder: Decoder, *, graphs: StepGraphs | None = None, batch_invariant: bool = False, **settings: Any
    ) -> None:
        self.graphs = graphs
        self.batch_invariant = batch_invariant
        super().__init__(decoder, **settings)

    def make_executor(self, decoder: Decoder, **settings: Any) -> CudaExecutor:
        device = decoder.device
        on_gpu = device.type == "cuda"
        streams = CudaStreams(device) if on_gpu else HostStreams(device)
        graphs = self.graphs or (CapturedSteps(device) if on_gpu else EagerSteps())
        return CudaExecutor(decoder, self.cache, streams, graphs, batch_invariant=self.batch_invariant, **settings)
