"""The engine loop under a virtual clock: the real scheduler, a simulated device, no waiting.

The loop is the one of `runners.engine_loop` with messages taken from a timetable. Scheduling itself takes no virtual
time: on a device that runs one step ahead it happens under a running step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from runners.execution.executor import LaunchError
from runners.execution.simulated import Clock, SimulatedExecutor
from runners.messages import AddRequest, OutputError, RequestOutput
from runners.scheduling.scheduler import Scheduler
from runners.scheduling.scheduler_output import StepPlan


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One launch and when the device ran it [seconds of the virtual clock]."""

    plan: StepPlan
    start: float
    end: float


class VirtualEngine:
    """Feeds a timetable of messages to a scheduler and carries its plans out.

    `on_step` and `on_output` see every launch and every output with its time, in order.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        clock: Clock,
        *,
        on_step: Callable[[StepTrace], None] | None = None,
        on_output: Callable[[float, RequestOutput], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.notices: list[str] = []
        self._on_step = on_step
        self._on_output = on_output
        self._depth = executor.capabilities.pipeline_depth
        self._timetable: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_entries = 0

    def at(self, moment: float, action: Callable[[float], None]) -> None:
        """Call `action(now)` once the clock has reached `moment`; entries of one moment in the order they were made."""
        self._num_entries += 1
        heapq.heappush(self._timetable, (moment, self._num_entries, action))

    def submit(self, message: AddRequest, moment: float | None = None) -> None:
        """The request arrives at `moment`, by default at its `arrival_time`."""
        moment = message.arrival_time if moment is None else moment
        self.at(moment, lambda now: self.scheduler.add_request(message, now))

    def run(self, until: float | None = None) -> None:
        """Until nothing is left to do, or the clock has reached `until`."""
        while until is None or self.clock.now() < until:
            if not self._turn():
                return

    def _turn(self) -> bool:
        """One turn of the loop; False when nothing is in flight, nothing waits and nothing will arrive."""
        scheduler, executor, clock = self.scheduler, self.executor, self.clock
        now = clock.now()
        while self._timetable and self._timetable[0][0] <= now:
            heapq.heappop(self._timetable)[2](now)
        plan = scheduler.schedule(now)
        if isinstance(plan, StepPlan):
            self._launch(plan, now)
            if scheduler.num_uncommitted > self._depth:
                self._commit()
        elif scheduler.num_uncommitted > 0:
            self._commit()
        else:
            moments = [plan.until, executor.next_completion(), self._timetable[0][0] if self._timetable else None]
            moment = min((moment for moment in moments if moment is not None), default=None)
            if moment is None:
                self._publish()
                return False
            clock.wait_until(moment)
        if scheduler.num_flights > 0:
            scheduler.commit(None, executor.completed_flights(), clock.now())
        self._publish()
        return True

    def _launch(self, plan: StepPlan, now: float) -> None:
        try:
            self.executor.launch(plan)
        except LaunchError as error:
            self.scheduler.launch_failed(plan, OutputError(str(error), "request_failed"), now)
        else:
            if self._on_step is not None:
                self._on_step(StepTrace(plan, *self.executor.last_launch))

    def _commit(self) -> None:
        result = self.executor.collect()
        self.scheduler.commit(result, self.executor.completed_flights(), self.clock.now())

    def _publish(self) -> None:
        outputs = self.scheduler.take_outputs()
        if self._on_output is not None:
            now = self.clock.now()
            for output in outputs:
                self._on_output(now, output)
        self.notices += self.scheduler.take_notices()
