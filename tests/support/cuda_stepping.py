"""A `Stepper` whose executor is the cuda one, on a GPU or in its form for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
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
        self,
        decoder: Decoder,
        *,
        slots: int = 32,
        blocks: int = 400,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        grammars: Any = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        super().__init__(decoder, slots=slots, blocks=blocks, eos_token_ids=eos_token_ids, seed=seed, grammars=grammars)
        device = decoder.device
        on_gpu = device.type == "cuda"
        if graphs is None:
            graphs = CapturedSteps(device) if on_gpu else EagerSteps()
        self.executor = CudaExecutor(
            decoder,
            self.cache,
            CudaStreams(device) if on_gpu else HostStreams(device),
            graphs,
            slots=slots,
            max_context=decoder.max_context,
            eos_token_ids=eos_token_ids,
            grammars=grammars,
        )
