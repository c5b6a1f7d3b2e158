"""Traces: files, generators, halves, and what a running server records."""

from __future__ import annotations

import json
import statistics

import pytest

from runners.errors import StartupError
from runners.messages import AddRequest, OutputError, RequestOutput, pack_ids
from runners.request import FinishReason, SamplingParams
from runners.simulation.named_traces import NAMED_TRACES
from runners.simulation.recorder import ArrivalRecorder
from runners.simulation.trace import Arrival, Lengths, burst, poisson, read_trace, split
from tests.support.traces import write_trace


def test_a_written_trace_reads_as_it_was(tmp_path):
    arrivals = [Arrival(0.0, 10, 5), Arrival(0.5, 20, 1, "chat", 2, "team")]
    write_trace(tmp_path / "t.jsonl", arrivals)
    assert read_trace(tmp_path / "t.jsonl") == arrivals


def test_arrivals_are_sorted_by_time(tmp_path):
    write_trace(tmp_path / "t.jsonl", [Arrival(2.0, 10, 5), Arrival(1.0, 10, 5)])
    assert [arrival.at_s for arrival in read_trace(tmp_path / "t.jsonl")] == [1.0, 2.0]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"at_s": 1}',
        '{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}',
        '{"at_s": 0, "prompt_tokens": 0, "output_tokens": 1}',
        '{"at_s": 0, "prompt_tokens": 1.5, "output_tokens": 1}',
        '{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1, "text": "secret"}',
        '{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 1}',
        '{"at_s": 1e400, "prompt_tokens": 1, "output_tokens": 1}',
        '{"at_s": 0, "prompt_tokens": 1000000000000, "output_tokens": 1}',
        '{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1, "session": ["a"]}',
        '{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1, "key": {}}',
    ],
)
def test_a_line_that_is_no_arrival_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n\n' + line)
    with pytest.raises(StartupError, match=r"t\.jsonl:3: no arrival"):
        read_trace(path)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"t\.jsonl: .*utf-8"):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StartupError, match="nowhere"):
        read_trace(tmp_path / "nowhere.jsonl")


def test_generators_repeat_and_keep_to_their_ranges():
    arrivals = poisson(50.0, 2000, Lengths(20, 2000), Lengths(16, 16), seed=4)
    assert arrivals == poisson(50.0, 2000, Lengths(20, 2000), Lengths(16, 16), seed=4)
    assert arrivals != poisson(50.0, 2000, Lengths(20, 2000), Lengths(16, 16), seed=5)
    assert 2000 / arrivals[-1].at_s == pytest.approx(50, rel=0.1)
    prompts = [arrival.prompt_tokens for arrival in arrivals]
    assert min(prompts) >= 20
    assert max(prompts) <= 2000
    assert statistics.median(prompts) == pytest.approx(200, rel=0.15), "the middle of the logarithmic scale"
    assert {arrival.output_tokens for arrival in arrivals} == {16}
    assert {arrival.at_s for arrival in burst(5, Lengths(1, 9), Lengths(1, 9))} == {0.0}


@pytest.mark.parametrize("text", ["", "0", "9-3", "a-b", "-4"])
def test_a_range_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        Lengths.parse(text)


def test_halves_share_nothing_and_the_second_starts_from_zero():
    arrivals = poisson(10.0, 101, Lengths(5, 5), Lengths(5, 5))
    first, second = split(arrivals)
    assert (len(first), len(second)) == (50, 51)
    assert second[0].at_s == 0.0
    assert second[-1].at_s == pytest.approx(arrivals[-1].at_s - arrivals[50].at_s)


@pytest.mark.parametrize("name", NAMED_TRACES)
def test_named_traces_are_the_same_every_time_and_in_order(name):
    arrivals = NAMED_TRACES[name]()
    assert arrivals == NAMED_TRACES[name]()
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)


# --- recording ------------------------------------------------------------------------------------------------------


def message(request_id: str, at: float, prompt: int, **fields: object) -> AddRequest:
    return AddRequest(request_id, "m", pack_ids(range(prompt)), SamplingParams(max_tokens=9), at, **fields)


def output(request_id: str, tokens: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id, pack_ids(range(tokens)), reason)


def test_a_recorded_trace_has_counts_and_times_and_no_names(tmp_path):
    path = tmp_path / "arrivals.jsonl"
    recorder = ArrivalRecorder(path)
    recorder.arrived(message("a", 100.0, 7))
    recorder.arrived(message("b", 100.5, 9, priority=1, key_id="secret key", session_id="secret chat"))
    recorder.published([output("a", 1), output("b", 2)])
    recorder.published([output("a", 3, FinishReason.STOP), output("b", 1, FinishReason.LENGTH)])
    recorder.close()
    text = path.read_text()
    assert "secret" not in text
    first, second = read_trace(path)
    assert first == Arrival(0.0, 7, 4)
    assert (second.at_s, second.prompt_tokens, second.output_tokens, second.priority) == (0.5, 9, 3, 1)
    assert second.session
    assert second.key


def test_turns_that_append_count_the_whole_conversation(tmp_path):
    recorder = ArrivalRecorder(tmp_path / "a.jsonl")
    for turn in range(3):
        recorder.arrived(message(f"t{turn}", 10.0 + turn, 5, session_id="s", append_to_session=turn > 0))
        recorder.published([output(f"t{turn}", 4, FinishReason.STOP)])
    recorder.close()
    assert [arrival.prompt_tokens for arrival in read_trace(tmp_path / "a.jsonl")] == [5, 14, 23]


def test_ended_requests_count_what_they_got_and_refused_ones_are_left_out(tmp_path):
    recorder = ArrivalRecorder(tmp_path / "a.jsonl")
    for request_id in ("aborted", "refused", "unread"):
        recorder.arrived(message(request_id, 1.0, 5))
    recorder.published([output("aborted", 2), RequestOutput("refused", error=OutputError("no", "rate_limit_exceeded"))])
    recorder.ended("aborted")
    recorder.ended("unread")
    recorder.ended("never seen")
    recorder.close()
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["output_tokens"] for line in lines] == [2]
