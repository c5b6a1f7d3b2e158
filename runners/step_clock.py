"""The engine loop's step times, as the watchdog and the metrics want them."""

from __future__ import annotations

import time

from runners.engine_io import LoopVitals
from runners.loop_profile import LoopProfile
from runners.scheduling.scheduler_output import StepPlan
from runners.telemetry.step_observer import StepObserver


class StepClock:
    """Stamps steps for the watchdog: a step may take `hung_factor` times what the slowest recent one predicts."""

    _DECAY = 0.999

    def __init__(
        self,
        vitals: LoopVitals,
        hung_factor: float,
        hung_min_s: float,
        profile: LoopProfile | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self._vitals = vitals
        self._profile = profile
        self._observer = observer
        self._hung_factor = hung_factor
        self._hung_min_s = hung_min_s
        self._slowest_s = 0.0
        self._slowest_tokens = 1
        self._started: dict[int, tuple[float, StepPlan]] = {}

    def launch(self, plan: StepPlan) -> None:
        now = time.monotonic()
        self._started[plan.step_id] = (now, plan)
        predicted_s = self._slowest_s * max(1.0, plan.num_tokens / self._slowest_tokens)
        self._vitals.loop_stamp = now
        self._vitals.step_limit_s = max(self._hung_min_s, self._hung_factor * predicted_s)

    def complete(self, step_id: int) -> None:
        now = time.monotonic()
        self._vitals.loop_stamp = now
        started = self._started.pop(step_id, None)
        if started is not None:
            launched_at, plan = started
            if self._profile is not None:
                self._profile.step(plan.kind, launched_at, now)
            if self._observer is not None:
                self._observer.step(plan, launched_at, now)
            self._slowest_s *= self._DECAY
            if now - launched_at > self._slowest_s:
                self._slowest_s, self._slowest_tokens = now - launched_at, max(1, plan.num_tokens)

    def land(self, step_id: int) -> None:
        """A flight has come back; how long it took predicts nothing, other steps ran beside it."""
        started = self._started.pop(step_id, None)
        if started is not None and self._observer is not None:
            self._observer.step(started[1], started[0], time.monotonic())

    def idle(self) -> None:
        self._started.clear()
        self._vitals.step_limit_s = None
