"""The recorder beside a running engine: what it writes, and that it never takes the engine down."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from runners.errors import StartupError
from runners.messages import AddRequest, RequestOutput, pack_ids
from runners.request import FinishReason, SamplingParams
from runners.simulation.recorder import ArrivalRecorder, open_recorder
from runners.simulation.trace import Arrival, read_trace


def ask(
    recorder: ArrivalRecorder, request_id: str, *, at_s: float, prompt: int, output: int, session_id: str | None = None
) -> None:
    params = SamplingParams(max_tokens=output)
    message = AddRequest(request_id, "m", pack_ids(range(prompt)), params, arrival_time=at_s, session_id=session_id)
    recorder.arrived(msgspec.structs.replace(message, append_to_session=session_id is not None))
    recorder.published([RequestOutput(request_id, pack_ids(range(output)), FinishReason.LENGTH)])


def test_counts_and_times_are_written(tmp_path: Path) -> None:
    recorder = ArrivalRecorder(tmp_path / "arrivals.jsonl")
    ask(recorder, "a", at_s=100.0, prompt=7, output=3)
    ask(recorder, "b", at_s=100.5, prompt=2, output=1)
    recorder.close()
    assert read_trace(tmp_path / "arrivals.jsonl") == [Arrival(0.0, 7, 3), Arrival(0.5, 2, 1)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_the_recording_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    recorder = ArrivalRecorder(Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            ask(recorder, f"r{number}", at_s=1.0, prompt=4, output=2)
            recorder.flush()
        recorder.close()
    assert [record.message for record in caplog.records] == [
        "arrivals are no longer recorded: /dev/full: No space left on device"
    ]


def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"telemetry\.arrivals_file: .*missing/a\.jsonl: No such file"):
        open_recorder(str(tmp_path / "missing" / "a.jsonl"), 60.0)


def test_a_session_is_forgotten_when_the_engine_forgets_it(tmp_path: Path) -> None:
    now = 0.0
    recorder = ArrivalRecorder(tmp_path / "arrivals.jsonl", 10.0, lambda: now)
    for now, session_id in ((0.0, "a"), (1.0, "b"), (9.0, "a"), (12.0, "c"), (13.0, "b"), (14.0, "a")):
        ask(recorder, f"r{now}", at_s=now, prompt=5, output=2, session_id=session_id)
    recorder.close()
    prompts = [arrival.prompt_tokens for arrival in read_trace(tmp_path / "arrivals.jsonl")]
    assert prompts == [5, 5, 7 + 5, 5, 5, 14 + 5]
