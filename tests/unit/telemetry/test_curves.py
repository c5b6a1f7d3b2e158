"""Points of the page's curves, from counters at given times."""

from __future__ import annotations

import pytest

from runners.messages import EngineStats
from runners.request_metrics import RequestMetrics
from runners.telemetry.curves import POINTS, WINDOW_S, Curves, quantile

BOUNDS = (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([4, 0, 0, 0], 0.5, 0.5),
        ([0, 4, 0, 0], 0.5, 1.5),
        ([2, 2, 0, 0], 0.5, 1.0),
        ([0, 0, 10, 0], 1.0, 4.0),
        ([1, 0, 0, 99], 0.5, 4.0),
        ([99, 0, 0, 1], 0.99, 1.0),
    ],
)
def test_quantile(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile(BOUNDS, counts, share) == expected


def test_rates_and_quantiles_of_a_second() -> None:
    metrics = RequestMetrics()
    curves = Curves(metrics)
    curves.sample(EngineStats(), 10.0, 1000.0)
    times = metrics.begin("a", "m", 100, 10.0)
    metrics.tokens(times, 1, 10.05)  # TTFT 50 ms
    for place in range(1, 11):
        metrics.tokens(times, 2, 10.05 + place * 0.0055)  # ITL 5.5 ms, two tokens each
    stats = EngineStats(prompt_tokens=100, cached_tokens=64, running=1, waiting=2, free_blocks=30, total_blocks=40)
    point = curves.sample(stats, 12.0, 1002.0)
    assert (point.at, point.running, point.waiting, point.used_blocks) == (1002.0, 1, 2, 10)
    assert (point.output_rate, point.prompt_rate, point.cached_rate) == (10.5, 50.0, 32.0)
    assert point.ttft_p50 is not None
    assert 40 < point.ttft_p50 < 60
    assert point.itl_p50 is not None
    assert 5 < point.itl_p50 <= 6


def test_latencies_are_of_the_last_seconds_only() -> None:
    metrics = RequestMetrics()
    curves = Curves(metrics)
    metrics.tokens(metrics.begin("a", "m", 1, 0.0), 1, 0.3)
    seen = [curves.sample(EngineStats(), float(second), float(second)).ttft_p50 for second in range(1, WINDOW_S + 3)]
    assert all(value is not None for value in seen[:WINDOW_S])
    assert seen[WINDOW_S:] == [None, None]


def test_an_engine_that_starts_again_makes_no_negative_rate() -> None:
    curves = Curves(RequestMetrics())
    curves.sample(EngineStats(prompt_tokens=1000, cached_tokens=500), 1.0, 1.0)
    point = curves.sample(EngineStats(prompt_tokens=10), 2.0, 2.0)
    assert (point.prompt_rate, point.cached_rate) == (0.0, 0.0)


def test_the_oldest_points_go() -> None:
    curves = Curves(RequestMetrics())
    for second in range(POINTS + 10):
        curves.sample(EngineStats(), float(second), float(second))
    assert len(curves.points) == POINTS
    assert curves.points[0].at == 10.0
