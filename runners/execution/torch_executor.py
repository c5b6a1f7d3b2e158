"""The eager executor for any device: the default on a CPU, and the oracle that others are tested against."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from runners.execution.executor import Capabilities, DeviceLostError, Executor, LaunchError, StepResult
from runners.execution.model_runner import ModelRunner
from runners.grammar.compiler import GrammarCompiler
from runners.kv_cache.device_cache import DeviceCache
from runners.models.decoder import Decoder
from runners.scheduling.scheduler_output import PlanKind, StepPlan


class TorchExecutor(Executor):
    """Runs every plan at once, within `launch`; overlap prefills too, which then wait in `completed_flights`.

    `max_context` bounds a sequence [tokens]; `eos_token_ids` are what `min_tokens` holds back. After a LaunchError
    nothing of the plan counts: a new plan carries its slot inits, block appends and copies again. Without `grammars`
    a request with a grammar fails.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: DeviceCache,
        *,
        slots: int,
        max_context: int,
        eos_token_ids: Sequence[int] = (),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._runner: ModelRunner | None = ModelRunner(decoder, cache, slots, max_context, eos_token_ids, grammars)
        self._results: deque[StepResult] = deque()
        self._flights: list[tuple[int, StepResult]] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(wave=True, mix=True, overlap=True, seq=True, pipeline_depth=0, embed=True)

    def launch(self, plan: StepPlan) -> None:
        """Run the plan. LaunchError when it failed (it may be planned again), DeviceLostError when the GPU is gone."""
        if self._runner is None:
            raise LaunchError("the executor is closed")
        try:
            result = self._runner.execute(plan)
        except LaunchError:
            raise
        except torch.AcceleratorError as error:
            raise DeviceLostError(str(error)) from error
        except Exception as error:
            # Eager steps change nothing that running them again would not change alike (see ModelRunner.execute).
            raise LaunchError(f"{type(error).__name__}: {error}") from error
        if plan.kind is PlanKind.OVERLAP_PREFILL and plan.flight_id is not None:
            self._flights.append((plan.flight_id, result))
        else:
            self._results.append(result)

    def collect(self) -> StepResult:
        """The oldest result. RuntimeError when no step is in flight."""
        if not self._results:
            raise RuntimeError("collect: no step in flight")
        return self._results.popleft()

    def is_ready(self) -> bool:
        return bool(self._results)

    def completed_flights(self) -> tuple[tuple[int, StepResult], ...]:
        flights, self._flights = tuple(self._flights), []
        return flights

    def close(self) -> None:
        self._runner = None
