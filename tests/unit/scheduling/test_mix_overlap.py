"""A long prompt on a second stream."""

from __future__ import annotations

import pytest

from runners.execution.simulated import Faults
from runners.scheduling.scheduler_output import PlanKind, PrefillChunk
from tests.support.scenario import Scenario


def overlap(**options) -> Scenario:
    return Scenario(mix={"mode": "overlap"}, **options)


def chunks_of(scenario: Scenario, request_id: str) -> list[PrefillChunk]:
    return [chunk for plan in scenario.plans() for chunk in plan.chunks if chunk.request_id == request_id]


def test_decode_steps_go_on_under_the_flight():
    scenario = overlap()
    scenario.request("d", 20, 12)
    scenario.request("L", 2000, 3, at=7)
    scenario.run()
    assert scenario.log()[2:10] == [
        "10-14 decode d",
        "14-32 overlap_prefill | L:0+2000*",
        "14-18 decode d",
        "18-22 decode d",
        "22-26 decode d",
        "26-30 decode d",
        "30-34 decode d",
        "34-38 decode d",  # launched at 30, before the flight was seen to have landed at 34
    ]
    assert scenario.log()[10] == "38-42 decode d,L"
    assert scenario.first_token("L") == 34


def test_the_prompt_is_computed_as_in_a_solo_run():
    beside = overlap()
    beside.request("d", 20, 12)
    prompt = beside.request("L", 2000, 3, at=7)
    beside.run()
    solo = overlap()
    solo.request("L", prompt, 3)
    solo.run()

    def pieces(scenario: Scenario) -> list[tuple[int, tuple[int, ...], bool]]:
        return [(chunk.start, chunk.token_ids, chunk.samples) for chunk in chunks_of(scenario, "L")]

    assert pieces(beside) == pieces(solo)
    assert solo.kinds()[0] == "chunk", "with no live row it runs on the main stream"
    assert beside.tokens("L") == solo.tokens("L")


def test_admissions_wait_for_the_flight():
    scenario = overlap()
    scenario.request("d", 20, 20)
    scenario.request("L", 2000, 3, at=7)
    scenario.request("s", 20, 2, at=15)
    scenario.run()
    wave = next(trace for trace in scenario.steps if any(chunk.request_id == "s" for chunk in trace.plan.chunks))
    assert wave.start == pytest.approx(0.038), "the landing was seen at 34, under the step that ends at 38"


def test_one_flight_at_a_time():
    scenario = overlap()
    scenario.request("d", 20, 30)
    scenario.request("L0", 2000, 2, at=7)
    scenario.request("L1", 2000, 2, at=7)
    scenario.run()
    flights = [trace for trace in scenario.steps if trace.plan.kind is PlanKind.OVERLAP_PREFILL]
    assert [trace.plan.chunks[0].request_id for trace in flights] == ["L0", "L1"]
    assert flights[0].end <= flights[1].start


def test_with_no_live_rows_left_the_loop_waits_for_the_flight_itself():
    scenario = overlap()
    scenario.request("d", 20, 4)
    scenario.request("L", 2000, 2, at=5)
    scenario.run()
    assert scenario.log() == [
        "0-6 chunk | d:0+20*",
        "6-10 decode d",
        "10-28 overlap_prefill | L:0+2000*",
        "10-14 decode d",
        "14-18 decode d",
        "28-32 decode L",
    ]
    assert scenario.first_token("L") == 28


def test_a_request_aborted_in_flight_keeps_slot_and_blocks_until_it_has_landed():
    scenario = overlap(slots=2, blocks=200)
    scenario.request("d", 20, 20)
    scenario.request("L", 2000, 2, at=7)
    scenario.abort("L", at=20)
    scenario.run(until=30)
    assert scenario.cache.num_available < 200 - 120
    assert scenario.scheduler.live.slots.num_free == 0
    assert "L" not in scenario.scheduler.live.requests
    scenario.run()
    assert scenario.cache.num_available == 200
    assert scenario.tokens("L") == []


def test_falls_back_to_merge_without_a_second_stream():
    scenario = overlap(lacks=("overlap",))
    scenario.request("d", 20, 10)
    scenario.request("L", 2000, 2, at=7)
    scenario.run()
    assert "14-24 mixed d | L:0+2000*" in scenario.log()
    assert [notice.split(";")[1] for notice in scenario.engine.notices] == [" merge is used"]


def test_a_flight_that_cannot_be_launched_is_computed_on_the_main_stream():
    faults = Faults(launch=lambda plan: "no stream" if plan.kind is PlanKind.OVERLAP_PREFILL else None)
    scenario = overlap(faults=faults)
    scenario.request("d", 20, 10)
    scenario.request("L", 2000, 2, at=7)
    scenario.run()
    assert "14-20 chunk | L:0+2000*" in scenario.log()
    assert scenario.tokens("L") == scenario.expected("L", 2)
    assert scenario.tokens("d") == scenario.expected("d", 10)


def test_a_failure_inside_the_flight_is_its_requests_alone():
    faults = Faults(token=lambda request_id, position: "NaN" if request_id == "L" else None)
    scenario = overlap(faults=faults, blocks=200)
    scenario.request("d", 20, 12)
    scenario.request("L", 2000, 2, at=7)
    scenario.run()
    assert scenario.end("L").message == "NaN"
    assert scenario.tokens("d") == scenario.expected("d", 12)
    assert scenario.cache.num_available == 200
