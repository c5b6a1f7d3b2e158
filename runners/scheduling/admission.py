"""When waiting requests may join, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

_US = 1e-6
# After so many cold starts in a row at which nobody followed within the silence, the next one does not wait.
_STARTS_ALONE = 2


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Resolved `admission` section: `max_batch` is a number here."""

    min_batch: int
    max_hold_steps: int
    max_batch: int
    max_long_prompts: int
    cold_window_us: int
    cold_silence_us: int


class AdmissionPolicy:
    """Cold-burst coalescing and hold.

    Cold: an engine with nothing to do waits a moment after a first arrival, since the rest of a burst is usually less
    than a millisecond behind and one wave beats two; where nobody followed the last times, it does not wait. Hold:
    admitting each arrival by itself would stall the decode rows once per arrival, so while requests decode, arrivals
    gather for a few steps.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self._cold_since: float | None = None
        self._last_arrival = 0.0
        self._last_sent = float("-inf")
        self._num_alone = 0  # cold starts since company last came within the silence
        self._held_steps = 0

    def arrived(self, now: float, sent: float, *, engine_idle: bool) -> None:
        """A request came in that had been sent at `sent`; `engine_idle` when there was none before it.

        The engine may have been busy with a launch meanwhile: `sent` tells whether it followed the one before closely.
        """
        if engine_idle:
            self._cold_since = now
        if sent - self._last_sent <= self.limits.cold_silence_us * _US:
            self._num_alone = 0
        elif engine_idle:
            self._num_alone += 1
        self._last_arrival, self._last_sent = now, sent

    def cold_until(self, now: float, num_waiting: int) -> float | None:
        """Until when to wait for the rest of a burst; None when there is no reason to (any longer)."""
        if self._cold_since is None:
            return None
        until = min(
            self._cold_since + self.limits.cold_window_us * _US, self._last_arrival + self.limits.cold_silence_us * _US
        )
        is_usually_alone = self._num_alone > _STARTS_ALONE
        if now < until and 0 < num_waiting < self.limits.max_batch and not is_usually_alone:
            return until
        self._cold_since = None
        return None

    def may_admit(self, num_waiting: int, num_decoding: int) -> bool:
        """Asked once a step while requests wait; a no counts as one step held."""
        limits = self.limits
        if num_decoding == 0 or num_waiting >= limits.min_batch or self._held_steps >= limits.max_hold_steps:
            return True
        self._held_steps += 1
        return False

    def reset_hold(self) -> None:
        """The gathered requests were admitted, or none waits: the next arrival starts a new hold."""
        self._held_steps = 0
