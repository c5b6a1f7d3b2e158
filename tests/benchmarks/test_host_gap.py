"""What the device's own record says about time between steps."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.host_gap import device_intervals, gaps, summarize


def test_gaps_are_times_in_which_nothing_ran_and_know_what_stands_beside_them() -> None:
    ran = [(0.0, 10.0, False), (4.0, 6.0, True), (11.0, 12.0, False), (15.0, 16.0, True)]
    assert gaps(ran) == [(10.0, 11.0, False), (12.0, 15.0, True)]


def test_idle_time_around_copies_is_told_from_time_inside_a_step() -> None:
    ran, reads = [], []
    for step in range(10):
        at = 100.0 * step
        ran += [(at, at + 40, False), (at + 42, at + 90, False), (at + 91, at + 92, True), (at + 95, at + 96, True)]
        reads.append(at + 92)
    summary = summarize(8, ran, reads)
    assert summary["step_ms"] == 0.1
    assert summary["idle_us"] == 1 + 3 + 4
    assert summary["inside_us"] == 2
    assert summary["idle_share"] == 0.08


def test_a_trace_of_the_profiler_is_read(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "k", "ts": 5, "dur": 2},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 8, "dur": 1},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1, "dur": 1},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 50},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert device_intervals(path) == ([(1.0, 2.0, True), (5.0, 7.0, False), (8.0, 9.0, True)], [9.0])
