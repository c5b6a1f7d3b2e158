"""When blocks run out the youngest gives way, and resumes with equal output."""

from __future__ import annotations

import pytest

from runners.execution.simulated import Faults
from runners.messages import OutputError
from runners.request import FinishReason, RequestStatus
from tests.support.scenario import Scenario


def test_the_youngest_is_preempted_and_resumes_with_equal_output():
    scenario = Scenario(blocks=8)  # 128 tokens
    for number in range(3):
        scenario.request(f"r{number}", 20, 40)
    scenario.run()
    assert scenario.scheduler.stats().preemptions > 0
    for number in range(3):
        assert scenario.tokens(f"r{number}") == scenario.expected(f"r{number}", 40)
    firsts = [line for line in scenario.log() if "| r0" in line or "r0:" in line]
    assert len(firsts) == 1, "the oldest is never computed twice"


def test_a_token_on_its_way_to_a_preempted_request_is_appended():
    scenario = Scenario(blocks=6, depth=1)
    scenario.request("old", 30, 40)
    scenario.request("young", 30, 30)
    scenario.run()
    assert scenario.scheduler.stats().preemptions >= 1
    resumed = [
        chunk for plan in scenario.plans() for chunk in plan.chunks if chunk.request_id == "young" and chunk.start == 0
    ]
    assert len(resumed) == 2
    again = resumed[1].token_ids
    known_when_preempted = [
        row.position for plan in scenario.plans() for row in plan.decode_rows if row.request_id == "young"
    ]
    # Every decode row launched before the preemption yielded a token that is part of the recomputed prompt.
    rows_before = [position for position in known_when_preempted if position + 2 <= len(again)]
    assert len(again) == 30 + 1 + len(rows_before)
    assert scenario.tokens("young") == scenario.expected("young", 30)
    assert scenario.tokens("old") == scenario.expected("old", 40)


@pytest.mark.parametrize("depth", [0, 1])
def test_eos_on_its_way_to_a_preempted_request_ends_it(depth):
    for eos in range(1, 24):
        scenario = Scenario(blocks=6, depth=depth, eos_at={"young": eos})
        scenario.request("old", 30, 40)
        scenario.request("young", 30, 30)
        scenario.run()
        assert scenario.tokens("young") == scenario.expected("young", eos)
        assert scenario.end("young") is FinishReason.STOP


def test_the_least_urgent_class_gives_way_first_even_when_it_is_older():
    scenario = Scenario(blocks=8)
    scenario.request("batch", 20, 40, message={"priority": 5})
    scenario.request("chat0", 20, 40, at=1)
    scenario.request("chat1", 20, 40, at=1)
    scenario.run()
    computed = [chunk.request_id for plan in scenario.plans() for chunk in plan.chunks]
    assert computed.count("chat0") == 1
    assert computed.count("batch") > 1
    for name in ("batch", "chat0", "chat1"):
        assert scenario.tokens(name) == scenario.expected(name, 40)


def test_a_request_alone_that_outgrows_the_pool_fails_with_numbers():
    scenario = Scenario(blocks=3)
    scenario.request("a", 20, 100)
    scenario.request("b", 20, 5, at=1)
    scenario.run()
    error = scenario.end("a")
    assert error.code == "kv_cache_exhausted"
    assert "3 of 3 blocks of 16 tokens" in error.message
    assert scenario.tokens("b") == scenario.expected("b", 5)


def test_what_was_computed_is_found_in_the_prefix_cache_again():
    scenario = Scenario(blocks=7, kv={"prefix_cache": True})
    for number in range(2):
        scenario.request(f"r{number}", 20, 40)
    scenario.run()
    resumed = [chunk for plan in scenario.plans() for chunk in plan.chunks if chunk.start > 0]
    assert [(chunk.request_id, chunk.start) for chunk in resumed] == [("r1", 32)], "it goes on behind its cached blocks"
    for number in range(2):
        assert scenario.tokens(f"r{number}") == scenario.expected(f"r{number}", 40)


def test_a_quota_lowered_while_running_preempts_until_it_holds():
    scenario = Scenario(blocks=40)
    for number in range(4):
        scenario.request(f"r{number}", 30, 60)
    scenario.engine.at(0.030, lambda now: scenario.scheduler.set_quota_blocks(7))
    scenario.engine.at(0.150, lambda now: scenario.seen.append(scenario.cache.pool.num_out))  # type: ignore[attr-defined]
    scenario.seen = []  # type: ignore[attr-defined]
    scenario.run()
    assert scenario.seen[0] <= 7  # type: ignore[attr-defined]
    for number in range(4):
        assert scenario.tokens(f"r{number}") == scenario.expected(f"r{number}", 60)


def test_a_long_prompt_that_waits_for_blocks_is_not_passed_by_short_ones():
    scenario = Scenario(blocks=20)
    scenario.request("d", 20, 60)
    scenario.request("L", 250, 2, at=7)
    scenario.request("e", 20, 120, at=7)
    for number in range(20):
        scenario.request(f"s{number}", 20, 20, at=12 + number)
    scenario.run()
    order = [chunk.request_id for plan in scenario.plans() for chunk in plan.chunks]
    assert order.index("L") < order.index("s0")
    assert scenario.tokens("L") == scenario.expected("L", 2)


def test_nobody_is_admitted_into_the_blocks_that_a_row_will_need_next():
    scenario = Scenario(blocks=4)
    scenario.request("row", 20, 30)
    scenario.request("late", 20, 12, at=20)  # its two blocks are there, but none beyond them
    scenario.run()
    assert scenario.scheduler.stats().preemptions == 0
    assert scenario.tokens("row") == scenario.expected("row", 30)
    assert scenario.tokens("late") == scenario.expected("late", 12)


def test_a_preempted_request_is_not_admitted_while_a_token_is_on_its_way_to_it():
    def fault(plan):
        return "no" if not plan.decode_rows and any(chunk.request_id == "long" for chunk in plan.chunks) else None

    mix = {"mode": "merge", "token_budget": 1, "min_prompt_tokens": 4}
    scenario = Scenario(blocks=5, depth=1, faults=Faults(launch=fault), mix=mix)
    scenario.request("row", 20, 40)
    scenario.request("long", 32, 3, at=7)  # fails as soon as the row has been preempted for it: its blocks are free
    scenario.run()
    assert isinstance(scenario.end("long"), OutputError)
    assert scenario.scheduler.stats().preemptions == 1
    assert scenario.tokens("row") == scenario.expected("row", 40)


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_a_preempted_request_may_end_while_it_waits_or_is_computed_again(end):
    ended_waiting = 0
    for at in range(100, 700, 20):
        scenario = Scenario(blocks=6, depth=1, kv={"prefix_cache": True}, chunk={"tokens": 16})
        scenario.request("old", 30, 40)
        scenario.request("young", 30, 30)

        def end_it(now, scenario=scenario):
            nonlocal ended_waiting
            request = scenario.scheduler.live.requests.get("young")
            if request is not None and scenario.scheduler.live.num_preemptions:
                ended_waiting += request.status is RequestStatus.WAITING
            if end == "abort":
                scenario.scheduler.abort("young", now)
            else:
                scenario.scheduler.finish("young", 3, now)

        scenario.engine.at(at / 1000, end_it)
        scenario.run()
        assert scenario.tokens("old") == scenario.expected("old", 40)
        assert scenario.cache.num_available == 6
    assert ended_waiting
