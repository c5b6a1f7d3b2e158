"""The loop thread's half: which steps ran when, gathered for the page and the trace file.

Nothing is gathered while nobody looks. What a step's plan says is read off the loop thread (`StepBatch.report`): a
plan never changes, so the loop thread only keeps it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runners.loop_profile import LoopProfile
from runners.messages import EngineStats, RequestOutput, SlotFacts, StepRecord, StepsReport
from runners.request import RequestStatus
from runners.scheduling.scheduler_output import StepPlan

if TYPE_CHECKING:
    from runners.scheduling.scheduler import Scheduler

FLUSH_INTERVAL_S = 0.05
MAX_STEPS = 256
"""Steps of one batch; those between two flushes that are more are counted, not kept."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The steps since the batch before, and the state at `time` (monotonic clock, as all times here [s]).

    `steps` are (plan, start, end); `phases` (phase of the loop, start, end) and `emissions` (time, outputs) are there
    for a trace file only.
    """

    model: str
    time: float
    stats: EngineStats
    slots: list[SlotFacts]
    cached_blocks: int
    steps: list[tuple[StepPlan, float, float]]
    phases: list[tuple[str, float, float]]
    emissions: list[tuple[float, list[RequestOutput]]]
    skipped: int = 0

    def report(self) -> StepsReport:
        """The message for the page."""
        records = [record_of(*step) for step in self.steps]
        return StepsReport(self.model, self.time, self.stats, self.slots, self.cached_blocks, records, self.skipped)


def record_of(plan: StepPlan, start: float, end: float) -> StepRecord:
    """A step without ids and tokens: slots and counts only."""
    decode_slots = 0
    for row in plan.decode_rows:
        decode_slots |= 1 << row.slot
    chunks = [(chunk.slot, len(chunk.token_ids)) for chunk in plan.chunks]
    return StepRecord(plan.step_id, plan.kind, start, end, plan.num_tokens, plan.width, f"{decode_slots:x}", chunks)


class Trace(Protocol):
    """What a trace file is to the loop thread; `wants_emissions`: it also notes when outputs left."""

    @property
    def wants_emissions(self) -> bool: ...
    def put(self, batch: StepBatch) -> None: ...


class StepObserver:
    """Belongs to the loop thread. `is_watched` is asked once a step; `publish` gets a batch now and then while it is
    true, and `trace` always, where a trace file is written."""

    def __init__(
        self,
        model: str,
        scheduler: Scheduler,
        is_watched: Callable[[], bool],
        publish: Callable[[StepBatch], None],
        trace: Trace | None = None,
        profile: LoopProfile | None = None,
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._is_watched = is_watched
        self._publish = publish
        self._trace = trace
        self._emits = trace is not None and trace.wants_emissions
        self._steps: list[tuple[StepPlan, float, float]] = []
        self._phases: list[tuple[str, float, float]] = []
        self._emissions: list[tuple[float, list[RequestOutput]]] = []
        self._skipped = 0
        self._last_end = 0.0
        if profile is not None:
            self.take_phases(profile)
        self.next_flush = math.inf
        """When `flush` is due; never while nobody looks."""

    def take_phases(self, profile: LoopProfile) -> None:
        """The loop's phases go into the trace file, where one is written, with this model's steps."""
        if self._trace is not None:
            profile.keep_spans(self._phases)

    def step(self, plan: StepPlan, launched_at: float, now: float) -> None:
        """A step ended. With one step launched ahead, it began when the one before it ended; a flight runs beside."""
        start = launched_at
        if plan.flight_id is None:
            start = max(launched_at, self._last_end)
            self._last_end = now
        if self._trace is None and not self._is_watched():
            return
        if len(self._steps) < MAX_STEPS:
            self._steps.append((plan, start, now))
        else:
            self._skipped += 1
        if self.next_flush == math.inf:
            self.next_flush = now + FLUSH_INTERVAL_S

    def published(self, outputs: list[RequestOutput]) -> None:
        """Outputs have left the engine."""
        if self._emits and outputs:
            self._emissions.append((time.monotonic(), outputs))

    def flush_rest(self) -> None:
        """The loop is about to sleep: what has gathered is not to wait for its end."""
        if self.next_flush != math.inf:
            self.flush(time.monotonic())

    def flush(self, now: float) -> None:
        """Hand over what has gathered."""
        cache = self._scheduler.cache
        batch = StepBatch(
            self._model,
            now,
            self._scheduler.stats(),
            slot_facts(self._scheduler),
            cache.prefix.num_idle,
            self._steps,
            self._phases[:],
            self._emissions,
            self._skipped,
        )
        self.next_flush = math.inf
        self._steps, self._emissions, self._skipped = [], [], 0
        self._phases.clear()
        if self._trace is not None:
            self._trace.put(batch)
        if self._is_watched():
            self._publish(batch)


def slot_facts(scheduler: Scheduler) -> list[SlotFacts]:
    """Who sits in which slot, as counts."""
    return [
        SlotFacts(
            request.slot,
            request.status is RequestStatus.RUNNING,
            request.num_prompt_tokens,
            min(request.num_computed, request.num_prompt_tokens),
            request.num_generated,
            request.length_limit - request.num_prompt_tokens,
        )
        for request in scheduler.live.requests.values()
        if request.slot is not None
    ]
