"""How requests fail: refused at once, or failed later by their own fault or a launch's, and the others go on."""

from __future__ import annotations

import pytest

from runners.execution.executor import StepResult
from runners.execution.simulated import Faults
from runners.messages import OutputError
from runners.scheduling.scheduler_output import PlanKind
from tests.support.scenario import Scenario


def test_an_empty_prompt_is_an_error():
    scenario = Scenario()
    scenario.request("a", [], 5)
    scenario.run()
    assert scenario.end("a") == OutputError("The prompt is empty.", "invalid_request")


def test_the_context_is_checked_with_all_three_numbers():
    scenario = Scenario(max_context=2048)
    scenario.request("a", 8, 2045)
    scenario.request("b", 8, 2040)
    scenario.abort("b", at=30)
    scenario.run()
    error = scenario.end("a")
    assert error.code == "context_length_exceeded"
    assert all(number in error.message for number in ("2048", "8 in the prompt", "2045"))
    assert scenario.tokens("b")


def test_a_prompt_that_can_never_fit_the_pool_fails_with_numbers():
    scenario = Scenario(blocks=4)
    scenario.request("a", 65, 5)
    scenario.request("b", 50, 5)
    scenario.run()
    assert scenario.end("a") == OutputError(
        "65 tokens need 5 KV blocks of 16 tokens, but the quota is 4 blocks.", "context_length_exceeded"
    )
    assert scenario.tokens("b") == scenario.expected("b", 5)


def test_a_quota_lowered_under_a_waiting_prompt_fails_it_with_numbers():
    scenario = Scenario(blocks=20, slots=1)
    scenario.request("a", 20, 10)
    scenario.request("b", 200, 5, at=1)
    scenario.engine.at(0.010, lambda now: scenario.scheduler.set_quota_blocks(10))
    scenario.run()
    assert scenario.end("b").code == "context_length_exceeded"
    assert scenario.tokens("a") == scenario.expected("a", 10)


def test_an_id_in_use_is_refused_and_the_first_goes_on():
    scenario = Scenario()
    scenario.request("a", 20, 20)
    scenario.request("a", 20, 20, at=10)
    scenario.engine.run()
    errors = [output.error for _, output in scenario.outputs if output.error]
    assert [error.code for error in errors] == ["invalid_request"]
    assert len(scenario.tokens("a")) == 20


def test_nan_in_one_row_ends_that_request_alone():
    faults = Faults(token=lambda request_id, position: "NaN logits" if (request_id, position) == ("b", 24) else None)
    scenario = Scenario(faults=faults)
    for name in "abc":
        scenario.request(name, 20, 10)
    scenario.run()
    assert scenario.end("b") == OutputError("NaN logits", "request_failed")
    assert scenario.tokens("b") == scenario.expected("b", 4)
    assert scenario.tokens("a") == scenario.expected("a", 10)
    assert scenario.tokens("c") == scenario.expected("c", 10)


def test_the_kv_of_a_failed_request_serves_nobody():
    faults = Faults(token=lambda request_id, position: "NaN logits" if (request_id, position) == ("a", 50) else None)
    scenario = Scenario(faults=faults, kv={"prefix_cache": True})
    prompt = scenario.request("a", 40, 20)
    scenario.request("b", prompt, 3, at=200)
    scenario.run()
    assert scenario.end("a").message == "NaN logits"
    assert scenario.cached_tokens("b") == 0


def test_the_pieces_of_a_prompt_that_failed_in_its_last_one_serve_nobody():
    faults = Faults(token=lambda request_id, position: "NaN logits" if request_id == "a" else None)
    scenario = Scenario(faults=faults, kv={"prefix_cache": True}, chunk={"tokens": 16})
    prompt = scenario.request("a", 40, 20)
    scenario.request("b", prompt, 3, at=200)
    scenario.run()
    assert scenario.end("a").message == "NaN logits"
    assert scenario.cached_tokens("b") == 0


def test_a_decode_launch_that_raises_is_planned_again_row_by_row_and_the_guilty_one_fails():
    faults = Faults(
        launch=lambda plan: (
            "illegal row" if ("b", 22) in [(r.request_id, r.position) for r in plan.decode_rows] else None
        )
    )
    scenario = Scenario(faults=faults)
    for name in "abcd":
        scenario.request(name, 20, 8)
    scenario.run()
    assert scenario.end("b") == OutputError("illegal row", "request_failed")
    for name in "acd":
        assert scenario.tokens(name) == scenario.expected(name, 8)
    singles = [plan.decode_rows[0].request_id for plan in scenario.plans(PlanKind.DECODE) if len(plan.decode_rows) == 1]
    assert sorted(singles)[:3] == ["a", "c", "d"]
    assert len(scenario.engine.notices) == 1


def test_rows_that_fail_only_together_all_get_their_tokens_and_one_log_line():
    faults = Faults(launch=lambda plan: "too wide" if len(plan.decode_rows) > 1 else None)
    scenario = Scenario(faults=faults)
    for name in "abc":
        scenario.request(name, 20, 6)
    scenario.run()
    for name in "abc":
        assert scenario.tokens(name) == scenario.expected(name, 6)
    assert len(scenario.engine.notices) == 1


def test_a_result_of_another_step_is_refused():
    scenario = Scenario()
    scenario.request("a", 20, 3)
    scenario.engine.run(until=0.001)
    with pytest.raises(ValueError, match="result of step 99"):
        scenario.scheduler.commit(StepResult(99, (1,)), (), 0.01)
