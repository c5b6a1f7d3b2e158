"""The curves of the page: one point a second of what clients experience and how full the engine is.

Taken once a second in the HTTP process whether anybody looks or not, from counters that exist anyway: so whoever opens
the page sees the last minutes. It costs some ten microseconds a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from runners.histogram import JointHistogram
from runners.messages import EngineStats

if TYPE_CHECKING:
    from runners.request_metrics import RequestMetrics

POINTS = 300
WINDOW_S = 5
"""Quantiles are over so many seconds: in one there are often too few first tokens for a curve."""


class CurvePoint(msgspec.Struct, frozen=True):
    """`at` is Unix time; latencies in ms, None where nothing came in the window; rates in tokens a second."""

    at: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    output_rate: float
    prompt_rate: float
    cached_rate: float
    running: int
    waiting: int
    used_blocks: int


class Curves:
    """Call `sample` once a second; `points` are the last of them, oldest first."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self.points: deque[CurvePoint] = deque(maxlen=POINTS)
        self._metrics = metrics
        self._ttft = _Window(metrics.time_to_first_token)
        self._itl = _Window(metrics.inter_token_latency)
        self._last_time: float | None = None
        self._last_output = metrics.num_tokens
        self._last_prompt = 0
        self._last_cached = 0

    def sample(self, stats: EngineStats, monotonic_time: float, unix_time: float) -> CurvePoint:
        """The point of the second that has just passed."""
        elapsed_s = 1.0 if self._last_time is None else max(1e-3, monotonic_time - self._last_time)
        self._last_time = monotonic_time
        output, prompt, cached = self._metrics.num_tokens, stats.prompt_tokens, stats.cached_tokens
        # Counters of the engine begin again with its process.
        new_prompt = max(0, prompt - self._last_prompt)
        new_cached = max(0, cached - self._last_cached)
        self._ttft.advance()
        self._itl.advance()
        point = CurvePoint(
            at=round(unix_time, 3),
            ttft_p50=self._ttft.quantile_ms(0.5),
            ttft_p99=self._ttft.quantile_ms(0.99),
            itl_p50=self._itl.quantile_ms(0.5),
            itl_p99=self._itl.quantile_ms(0.99),
            output_rate=round((output - self._last_output) / elapsed_s, 2),
            prompt_rate=round(new_prompt / elapsed_s, 2),
            cached_rate=round(new_cached / elapsed_s, 2),
            running=stats.running,
            waiting=stats.waiting,
            used_blocks=stats.total_blocks - stats.free_blocks,
        )
        self._last_output, self._last_prompt, self._last_cached = output, prompt, cached
        self.points.append(point)
        return point


class _Window:
    """What a histogram counted in the last `WINDOW_S` samples."""

    def __init__(self, histogram: JointHistogram) -> None:
        self._histogram = histogram
        self._states = deque([list(histogram.counts)], maxlen=WINDOW_S + 1)

    def advance(self) -> None:
        self._states.append(list(self._histogram.counts))

    def quantile_ms(self, share: float) -> float | None:
        oldest, newest = self._states[0], self._states[-1]
        counts = [new - old for new, old in zip(newest, oldest, strict=True)]
        value = quantile(self._histogram.bounds, counts, share)
        return None if value is None else round(1000 * value, 3)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The quantile of values that were counted by upper bound, straight lines within a bucket; None without values.

    Above the last bound nothing is known but that: the last bound it is.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank = share * total
    below = 0
    for place, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = bounds[place - 1] if place else 0.0
            return low + (bounds[place] - low) * (rank - below) / count
        below += count
    return bounds[-1]
