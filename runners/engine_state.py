"""Where the engine stands, and the signs of life by which that is judged."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EnginePhase(enum.StrEnum):
    """Where the engine stands, as `/health` shows it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineState:
    """`since` is seconds of the monotonic clock; `fraction` of the phase's work done is in 0..1 where it is known."""

    phase: EnginePhase
    detail: str = ""
    fraction: float | None = None
    since: float = 0.0


@dataclass(slots=True)
class Vitals:
    """Signs of life of one engine process, by this process's monotonic clock."""

    last_beat: float
    loop_stamp: float
    step_limit_s: float | None = None

    def fault(self, now: float, beat_limit_s: float) -> str | None:
        """Why the engine counts as dead or hung, or None."""
        if now - self.last_beat > beat_limit_s:
            return f"no sign of life for {now - self.last_beat:.1f} s"
        if self.step_limit_s is not None and now - self.loop_stamp > self.step_limit_s:
            return f"a step takes longer than {self.step_limit_s:.0f} s"
        return None
