"""How requests end: EOS, stop ids, length, stop strings, aborts, deadlines."""

from __future__ import annotations

import pytest

from runners.kv_cache.sessions import BlockTable
from runners.request import FinishReason, Request, SamplingParams
from runners.scheduling.deadlines import Deadlines
from tests.support.scenario import EOS, Scenario


@pytest.mark.parametrize("depth", [0, 1])
def test_eos_ends_and_counts(depth):
    scenario = Scenario(depth=depth, eos_at={"a": 4})
    scenario.request("a", 20, 10)
    scenario.run()
    assert scenario.tokens("a")[-1] == EOS
    assert len(scenario.tokens("a")) == 4
    assert scenario.end("a") is FinishReason.STOP


def test_eos_as_the_first_token():
    scenario = Scenario(eos_at={"a": 1})
    scenario.request("a", 20, 10)
    scenario.run()
    assert scenario.tokens("a") == [EOS]
    assert scenario.end("a") is FinishReason.STOP


def test_ignore_eos_runs_to_the_length():
    scenario = Scenario(eos_at={"a": 4})
    scenario.request("a", 20, 10, ignore_eos=True)
    scenario.run()
    assert len(scenario.tokens("a")) == 10
    assert scenario.end("a") is FinishReason.LENGTH


def test_stop_token_ids_end_even_when_eos_is_ignored():
    scenario = Scenario(eos_at={"a": 4})
    scenario.request("a", 20, 10, ignore_eos=True, stop_token_ids=(EOS,))
    scenario.run()
    assert len(scenario.tokens("a")) == 4
    assert scenario.end("a") is FinishReason.STOP


def test_min_tokens_come_before_any_stop():
    scenario = Scenario(eos_at={"a": 3})
    scenario.request("a", 20, 6, min_tokens=3)
    scenario.run()
    assert len(scenario.tokens("a")) == 6


def test_eos_as_the_very_last_token_is_a_stop():
    scenario = Scenario(eos_at={"a": 5})
    scenario.request("a", 20, 5)
    scenario.run()
    assert scenario.end("a") is FinishReason.STOP


def test_one_token_needs_no_decode_step():
    scenario = Scenario()
    scenario.request("a", 20, 1)
    scenario.run()
    assert scenario.kinds() == ["chunk"]
    assert scenario.tokens("a") == scenario.expected("a", 1)


# --- max_tokens 0 ---------------------------------------------------------------------------------------------------


def test_no_tokens_and_no_session_end_at_once():
    scenario = Scenario()
    scenario.request("a", 20, 0)
    scenario.run()
    assert scenario.steps == []
    assert scenario.end("a") is FinishReason.LENGTH


def test_no_tokens_with_prompt_logprobs_compute_the_prompt():
    scenario = Scenario(chunk={"tokens": 8})
    prompt = scenario.request("a", 20, 0, prompt_logprobs=0)
    scenario.run()
    assert scenario.end("a") is FinishReason.LENGTH
    assert scenario.tokens("a") == []
    logprobs = scenario.outputs[0][1].prompt_logprobs
    assert logprobs[0] is None
    assert [entry.token_id for entry in logprobs[1:]] == prompt[1:]


def test_prompt_logprobs_come_once_and_are_never_taken_from_the_cache():
    scenario = Scenario(kv={"prefix_cache": True}, chunk={"tokens": 16})
    prompt = scenario.request("a", 50, 2)
    scenario.request("b", prompt, 3, at=50, prompt_logprobs=2)
    scenario.run()
    outputs = [output for _, output in scenario.outputs if output.request_id == "b"]
    assert [entry.token_id for entry in outputs[0].prompt_logprobs[1:]] == prompt[1:]
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert outputs[0].cached_tokens == 0


def test_logprobs_come_with_their_tokens():
    scenario = Scenario()
    scenario.request("a", 20, 3, logprobs=2)
    scenario.request("b", 20, 3)
    scenario.run()
    for _, output in scenario.outputs:
        assert (output.logprobs is not None) == (output.request_id == "a")
    entries = [output.logprobs for _, output in scenario.outputs if output.request_id == "a"]
    assert [[entry.token_id for entry in entry_list] for entry_list in entries] == [[t] for t in scenario.tokens("a")]


# --- finish and abort -----------------------------------------------------------------------------------------------


def test_a_stop_string_ends_without_a_further_word():
    scenario = Scenario()
    scenario.request("a", 20, 50)
    scenario.request("b", 20, 12)
    scenario.finish("a", 3, at=25)
    scenario.run()
    assert scenario.end("a") is None
    assert len(scenario.tokens("a")) < 10
    assert scenario.tokens("b") == scenario.expected("b", 12)


def test_finish_of_an_unknown_or_ended_request_changes_nothing():
    scenario = Scenario()
    scenario.request("a", 20, 2)
    scenario.finish("a", 1, at=200)
    scenario.finish("never", 1, at=1)
    scenario.run()
    assert scenario.end("a") is FinishReason.LENGTH


@pytest.mark.parametrize("at", [1, 7, 15, 16, 21, 25, 33, 60])
def test_an_abort_in_any_state_gives_everything_back_within_one_step(at):
    scenario = Scenario(slots=3, blocks=300, mix={"token_budget": 500}, admission={"cold_window_us": 2000})
    scenario.request("d0", 20, 30)
    scenario.request("d1", 20, 30)
    scenario.request("L", 2000, 10, at=9)  # a cursor over four steps
    scenario.request("w", 20, 10, at=10)  # waits for a slot
    for name in ("d1", "L", "w"):
        scenario.abort(name, at=at)
    scenario.run(until=at + 11)
    assert scenario.scheduler.live.requests.keys() <= {"d0", "L", "w"}
    held = sum(len(request.table.block_ids) for request in scenario.scheduler.live.requests.values())
    assert scenario.cache.pool.num_out == held
    scenario.run()
    assert scenario.cache.pool.num_out == 0
    assert scenario.tokens("d0") == scenario.expected("d0", 30)


def test_nothing_is_sent_after_an_abort():
    scenario = Scenario()
    scenario.request("a", 20, 50)
    scenario.abort("a", at=30)
    scenario.run()
    assert scenario.end("a") is None
    assert scenario.token_times("a")[-1] <= 30


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_running_request():
    scenario = Scenario()
    scenario.request("a", 20, 100, deadline=50)
    scenario.request("b", 20, 30)
    scenario.run()
    assert scenario.end("a").code == "deadline_exceeded"
    last = max(now for now, output in scenario.outputs if output.request_id == "a")
    assert 50 <= last <= 58, "within the step that runs when it passes and the one launched behind it"
    assert scenario.tokens("b") == scenario.expected("b", 30)


def test_a_deadline_ends_a_waiting_request_although_nothing_else_happens():
    scenario = Scenario(admission={"cold_window_us": 90_000, "cold_silence_us": 90_000})
    scenario.request("a", 20, 1, deadline=30)
    scenario.run()
    assert scenario.end("a").code == "deadline_exceeded"
    assert [moment for moment, _ in scenario.outputs] == [30]


def test_a_deadline_has_passed_when_its_moment_has_come():
    deadlines = Deadlines()
    request = Request("a", [1], SamplingParams(max_tokens=1), table=BlockTable(b""), deadline=2.0)
    deadlines.add(request)
    assert deadlines.take_expired(1.9) == []
    assert deadlines.take_expired(2.0) == [request], "else an engine that wakes at it would spin"


def test_a_deadline_that_is_met_is_forgotten():
    scenario = Scenario()
    scenario.request("a", 20, 2, deadline=50)
    scenario.request("b", 20, 2, at=100, deadline=150)
    scenario.run()
    assert scenario.end("a") is FinishReason.LENGTH
    assert scenario.end("b") is FinishReason.LENGTH
