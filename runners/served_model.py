"""One model in the engine's loop: its scheduler and executor, and everything else that there is one of a model."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from runners.engine_io import EngineIO
from runners.engine_startup import LoadedModel
from runners.execution.executor import LaunchError, StepResult
from runners.grammar.gate import GrammarGate
from runners.loop_profile import LoopProfile
from runners.messages import AddRequest, OutputError, RequestOutput
from runners.scheduling.scheduler_output import StepPlan, Wait
from runners.step_clock import StepClock
from runners.telemetry.step_observer import StepObserver
from runners.telemetry.trace_file import TraceFile

logger = logging.getLogger("runners.engine_core")


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What the models of one loop have in common."""

    io: EngineIO
    profile: LoopProfile
    trace: TraceFile | None
    hung_factor: float
    hung_min_s: float


class ServedModel:
    """Belongs to the loop thread. `draining_until` is set once the model is to be unloaded."""

    def __init__(self, loaded: LoadedModel, parts: LoopParts) -> None:
        self.loaded = loaded
        self.name = loaded.name
        self.info = loaded.info
        self.scheduler = loaded.scheduler
        self.executor = loaded.executor
        self.depth = loaded.executor.capabilities.pipeline_depth
        self.gate = GrammarGate(loaded.grammars, parts.io.inbox.put)
        self.observer = StepObserver(
            self.name, loaded.scheduler, lambda: parts.io.is_watched, parts.io.publish_steps, parts.trace
        )
        self.clock = StepClock(parts.io.vitals, parts.hung_factor, parts.hung_min_s, parts.profile, self.observer)
        self.draining_until: float | None = None
        self.on_drained: Callable[[], None] = lambda: None
        self.had_work = False
        self._mark = parts.profile.mark
        self._launch_times: deque[float] = deque()

    @property
    def oldest_launch(self) -> float:
        """When its oldest uncommitted step was launched [seconds of the monotonic clock]."""
        return self._launch_times[0]

    @property
    def is_behind(self) -> bool:
        """More steps are under way than may be when the next one is scheduled."""
        return self.scheduler.num_uncommitted > self.depth

    def schedule(self, now: float) -> StepPlan | Wait:
        plan = self.scheduler.schedule(now)
        live = self.scheduler.live
        if not (live.waiting or live.cursors):
            for budget in self.scheduler.cache.budgets:
                budget.withdraw(self.scheduler.cache)
        return plan

    def launch(self, plan: StepPlan) -> None:
        self.clock.launch(plan)
        launched_at = time.monotonic()
        try:
            self.executor.launch(plan)
        except LaunchError as error:
            logger.warning("%s: step %d could not be launched: %s", self.name, plan.step_id, error)
            self.scheduler.launch_failed(plan, OutputError(str(error), "request_failed"), time.monotonic())
            return
        if plan.flight_id is None:
            self._launch_times.append(launched_at)

    def commit_step(self) -> float:
        """Wait for the oldest step and commit it; returns when it was launched."""
        result = self.executor.collect()
        self._mark("collect")
        self.clock.complete(result.step_id)
        self.scheduler.commit(result, self._completed_flights(), time.monotonic())
        return self._launch_times.popleft()

    def commit_flights(self) -> None:
        self.scheduler.commit(None, self._completed_flights(), time.monotonic())

    def _completed_flights(self) -> tuple[tuple[int, StepResult], ...]:
        flights = self.executor.completed_flights()
        for _, result in flights:
            self.clock.land(result.step_id)
        return flights

    # --- the end --------------------------------------------------------------------------------------------------

    def refusal(self, message: AddRequest) -> RequestOutput:
        """A request that came when the model was on its way out."""
        error = OutputError(f"The model {message.model!r} is being unloaded.", "model_not_found")
        return RequestOutput(message.request_id, error=error)

    def end_requests(self, error: OutputError, now: float) -> int:
        """Every request that has not ended ends now, with this error. Returns how many."""
        live = self.scheduler.live
        requests = list(live.requests.values())
        for request in requests:
            live.fail(request, error, now)
        return len(requests)
