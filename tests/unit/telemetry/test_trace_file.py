"""The trace file: its events, that it is valid at any moment, and that it stays within its size."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from configs.operation import TelemetrySection
from runners.errors import StartupError
from runners.messages import EngineStats, RequestOutput, pack_ids
from runners.request import FinishReason
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, PrefillChunk, StepPlan
from runners.telemetry.step_observer import StepBatch
from runners.telemetry.trace_file import TraceFile, older_path, open_trace
from tests.support.server import eventually
from tests.support.trace_format import Event, check_format


def prefill(step_id: int, request_id: str, slot: int, tokens: int, **fields: Any) -> StepPlan:
    chunk = PrefillChunk(request_id, slot, 0, tuple(range(tokens)), samples=True)
    return StepPlan(step_id, fields.pop("kind", PlanKind.WAVE), chunks=(chunk,), **fields)


def decode(step_id: int, *rows: tuple[str, int]) -> StepPlan:
    decode_rows = tuple(DecodeRow(request_id, slot, 10 + step_id) for request_id, slot in rows)
    return StepPlan(step_id, PlanKind.DECODE, decode_rows=decode_rows, width=len(rows))


def batch(time: float, *steps: tuple[StepPlan, float, float], **fields: Any) -> StepBatch:
    values: dict[str, Any] = {"phases": [], "emissions": [], "slots": [], "cached_blocks": 3, "model": "m"}
    stats = EngineStats(waiting=2, running=5, free_blocks=60, total_blocks=100)
    return StepBatch(time=time, stats=stats, steps=list(steps), **(values | fields))


def written(path: Path, *batches: StepBatch, **options: Any) -> list[Event]:
    trace = TraceFile(path, options.pop("max_bytes", 1 << 20), **options)
    for item in batches:
        trace.put(item)
    trace.close()
    return json.loads(path.read_text())


def slices(events: list[Event], name: str) -> list[tuple[float, float, Event]]:
    return [(e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X" and e["name"] == name]


def test_steps_slots_counters_and_phases(tmp_path: Path) -> None:
    events = written(
        tmp_path / "trace.json",
        batch(
            1.1,
            (prefill(1, "a", 0, 7), 1.0, 1.01),
            (decode(2, ("a", 0)), 1.01, 1.02),
            (decode(3, ("a", 0)), 1.02, 1.03),
            phases=[("schedule", 1.0, 1.001), ("collect", 1.001, 1.01), ("receive", 1.01, 1.0100005)],
        ),
    )
    check_format(events)
    assert slices(events, "wave") == [
        (1_000_000.0, 10_000.0, {"step": 1, "tokens": 7, "decode rows": 0, "prompts": 1, "width": 0})
    ]
    assert [args["step"] for _, _, args in slices(events, "decode") if "step" in args] == [2, 3]
    assert slices(events, "prefill") == [(1_000_000.0, 10_000.0, {"request": "a", "from": 0, "tokens": 7})]
    spans = [found for found in slices(events, "decode") if "request" in found[2]]
    assert spans == [(1_010_000.0, 20_000.0, {"request": "a", "tokens": 2})], "steps of one request are one slice"
    assert [args for _, _, args in slices(events, "admit")] == [{"phase": "schedule"}], "an empty look is left out"
    assert slices(events, "sync") == [(1_001_000.0, 9_000.0, {"phase": "collect"})]
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert counters == {
        "KV blocks": {"in use": 40, "cached": 3},
        "requests": {"running": 5, "waiting": 2},
        "width": {"rows": 1},
    }


def test_a_slot_that_is_left_out_of_a_step_pauses(tmp_path: Path) -> None:
    events = written(
        tmp_path / "trace.json",
        batch(2.0, (decode(1, ("a", 0), ("b", 1)), 1.0, 1.1), (prefill(2, "c", 2, 9), 1.1, 1.4)),
        batch(3.0, (decode(3, ("a", 0), ("d", 1)), 1.4, 1.5)),
    )
    check_format(events)
    spans = sorted((args["request"], ts, dur) for ts, dur, args in slices(events, "decode") if "request" in args)
    assert spans == [
        ("a", 1_000_000.0, 100_000.0),
        ("a", 1_400_000.0, 100_000.0),
        ("b", 1_000_000.0, 100_000.0),
        ("d", 1_400_000.0, 100_000.0),
    ]


def test_flights_run_beside_steps(tmp_path: Path) -> None:
    flights = [
        prefill(number, f"f{number}", number, 50, kind=PlanKind.OVERLAP_PREFILL, flight_id=number) for number in (1, 2)
    ]
    events = written(
        tmp_path / "trace.json",
        batch(2.0, (decode(3, ("a", 0)), 1.0, 1.1), (flights[0], 1.0, 1.3), (flights[1], 1.05, 1.4)),
        batch(3.0, (decode(4, ("a", 0)), 1.1, 1.2)),
    )
    check_format(events)
    assert len(slices(events, "overlap_prefill")) == 2
    assert [args for _, _, args in slices(events, "decode") if "request" in args] == [{"request": "a", "tokens": 2}]


def test_models_have_tracks_of_their_own(tmp_path: Path) -> None:
    events = written(
        tmp_path / "trace.json",
        batch(2.0, (decode(1, ("a", 0)), 1.0, 1.2), model="one"),
        batch(2.1, (decode(1, ("b", 0)), 1.1, 1.3), model="two"),
    )
    check_format(events)
    groups = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert groups == {"wavelane", "engine one", "slots one", "engine two", "slots two"}


def test_emissions(tmp_path: Path) -> None:
    outputs = [
        RequestOutput("a", pack_ids([5]), finish_reason=FinishReason.STOP),
        RequestOutput("refused", finish_reason=FinishReason.LENGTH),
    ]
    step = (decode(1, ("a", 3)), 1.0, 1.1)
    events = written(tmp_path / "trace.json", batch(2.0, step, emissions=[(1.15, outputs)]))
    check_format(events)
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert instant["args"] == {"request": "a", "tokens": 1, "finish reason": "stop"}
    assert instant["ts"] == 1_150_000.0


def test_it_is_valid_but_for_its_bracket_after_every_batch(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path, 1 << 20)
    json.loads(path.read_text() + "]")
    for number in range(1, 4):
        trace.put(batch(1.0 + number, (decode(number, ("a", 0)), number, number + 0.5)))
        eventually(lambda number=number: f'"step":{number},' in path.read_text())
        check_format(json.loads(path.read_text() + "]"))
    trace.close()
    check_format(json.loads(path.read_text()))


def test_its_size_is_bounded_and_the_end_is_kept(tmp_path: Path) -> None:
    path, max_bytes = tmp_path / "trace.json", 20_000
    batches = [batch(n + 1.0, (decode(n, *((f"r{s}", s) for s in range(8))), n + 0.1, n + 0.9)) for n in range(1, 190)]
    events = written(path, *batches, max_bytes=max_bytes)
    older = json.loads(older_path(path).read_text())
    check_format(events)
    check_format(older)
    one_batch = 3000
    assert path.stat().st_size + older_path(path).stat().st_size < max_bytes + 2 * one_batch
    steps = [args["step"] for part in (older, events) for _, _, args in slices(part, "decode") if "step" in args]
    assert steps == list(range(steps[0], 190)), "nothing is missing between the two"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["trace.json", "trace.older.json"]


def test_the_trace_of_an_engine_that_crashed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[\n{}")
    written(path, batch(1.0))
    assert older_path(path).read_text() == "[\n{}"


def test_a_file_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"telemetry\.perfetto_file: .*: No such file or directory"):
        open_trace(TelemetrySection(perfetto_file=str(tmp_path / "missing" / "trace.json")))
    assert open_trace(TelemetrySection()) is None


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    os.mkfifo(path)
    with pytest.raises(StartupError, match=r"telemetry\.perfetto_file: .*: not a regular file"):
        open_trace(TelemetrySection(perfetto_file=str(path)))
    assert path.is_fifo()
    assert not older_path(path).exists()


def test_a_full_disk_ends_the_trace_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = TraceFile(tmp_path / "trace.json", 1 << 20)
    trace._file = io.BufferedWriter(io.FileIO("/dev/full", "wb"))
    for number in range(1, 4):
        trace.put(batch(float(number), (decode(number, ("a", 0)), number, number + 0.5)))
    trace.close()
    assert [record.message for record in caplog.records] == [
        f"the trace is no longer written: {tmp_path / 'trace.json'}: No space left on device"
    ]
