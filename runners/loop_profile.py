"""Where the engine loop's time goes: by kind of step, and by phase of its turns."""

from __future__ import annotations

import time

from runners.histogram import Histogram
from runners.messages import LoopTimes, StepTimes

STEP_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


class LoopProfile:
    """One thread's. `mark(phase)` gives the time since the mark before it to a phase.

    The phases' sums become visible every `phase_steps` steps, so that a scrape never sees half a turn; 0: they are
    not taken at all.
    """

    def __init__(self, phase_steps: int) -> None:
        self._phase_steps = phase_steps
        self._is_on = phase_steps > 0
        self._steps: dict[str, Histogram] = {}
        self._num_steps = 0
        self._phases: dict[str, float] = {}
        self._visible_phases: dict[str, float] = {}
        self._last_mark = time.perf_counter()
        self._last_end = 0.0
        self._spans: list[tuple[str, float, float]] | None = None

    def keep_spans(self, spans: list[tuple[str, float, float]]) -> None:
        """From now on every phase is appended to `spans` as (phase, start, end), too."""
        self._is_on = True
        self._spans = spans

    def mark(self, phase: str) -> None:
        if self._is_on:
            now = time.perf_counter()
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last_mark
            if self._spans is not None:
                self._spans.append((phase, self._last_mark, now))
            self._last_mark = now

    def step(self, kind: str, launched_at: float, now: float) -> None:
        """A step ended. With one step launched ahead, it began when the one before it ended."""
        histogram = self._steps.get(kind)
        if histogram is None:
            histogram = self._steps[kind] = Histogram(STEP_BOUNDS_S)
        histogram.observe(now - max(launched_at, self._last_end))
        self._last_end = now
        self._num_steps += 1
        if self._phase_steps and self._num_steps % self._phase_steps == 0:
            self._visible_phases = dict(self._phases)

    def snapshot(self) -> LoopTimes:
        steps = {kind: StepTimes(list(h.counts), h.total) for kind, h in self._steps.items()}
        return LoopTimes(steps, self._visible_phases)
