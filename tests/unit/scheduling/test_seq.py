"""The sequential path, entry and exit."""

from __future__ import annotations

from runners.execution.simulated import Faults
from runners.scheduling.scheduler_output import PlanKind
from tests.support.scenario import Scenario


def sequential(**options) -> Scenario:
    return Scenario(seq={"enabled": True}, **options)


def positions(scenario: Scenario, request_id: str) -> list[int]:
    return [row.position for plan in scenario.plans() for row in plan.decode_rows if row.request_id == request_id]


def test_a_lone_request_decodes_on_the_sequential_path():
    scenario = sequential()
    scenario.request("a", 20, 4)
    scenario.run()
    assert scenario.log() == ["0-6 chunk | a:0+20*", "6-9 sequential a", "9-12 sequential a", "12-15 sequential a"]


def test_a_second_arrival_takes_over_without_a_lost_or_repeated_token():
    scenario = sequential(admission={"max_hold_steps": 1})
    scenario.request("a", 20, 12)
    scenario.request("b", 20, 3, at=13)
    scenario.run()
    assert scenario.log() == [
        "0-6 chunk | a:0+20*",
        "6-9 sequential a",
        "9-12 sequential a",
        "12-15 sequential a",
        "15-18 sequential a",
        "18-22 decode a",  # b waits: the batch path at once, held for one step
        "22-28 chunk | b:0+20*",
        "28-32 decode a,b",
        "32-36 decode a,b",
        "36-40 decode a",  # launched before b's last token was read
        "40-43 sequential a",
        "43-46 sequential a",
        "46-49 sequential a",
    ]
    assert positions(scenario, "a") == list(range(20, 31))
    assert scenario.tokens("a") == scenario.expected("a", 12)
    assert scenario.tokens("b") == scenario.expected("b", 3)


def test_entered_when_all_others_have_ended():
    scenario = sequential()
    scenario.request("a", 20, 8)
    scenario.request("b", 20, 3)
    scenario.run()
    assert scenario.kinds() == ["wave", "decode", "decode", "decode", *["sequential"] * 4]
    assert positions(scenario, "a") == list(range(20, 27))


def test_not_while_a_prompt_is_being_computed():
    scenario = sequential(mix={"token_budget": 1000})
    scenario.request("a", 20, 9)
    scenario.request("L", 2500, 1, at=7)
    scenario.run()
    assert scenario.kinds() == ["chunk", *["sequential"] * 2, *["mixed"] * 3, "decode", *["sequential"] * 2]


def test_switched_off_the_batch_path_serves_one_row():
    scenario = Scenario(seq={"enabled": False})
    scenario.request("a", 20, 3)
    scenario.run()
    assert scenario.kinds() == ["chunk", "decode", "decode"]


def test_without_the_capability_one_log_line():
    scenario = sequential(lacks=("seq",))
    scenario.request("a", 20, 3)
    scenario.run()
    assert scenario.kinds() == ["chunk", "decode", "decode"]
    assert [notice.split(":")[0] for notice in scenario.engine.notices] == ["seq.enabled"]


def test_a_launch_that_fails_switches_it_off():
    faults = Faults(launch=lambda plan: "capture failed" if plan.kind is PlanKind.SEQUENTIAL else None)
    scenario = sequential(faults=faults)
    scenario.request("a", 20, 4)
    scenario.run()
    assert scenario.kinds() == ["chunk", "decode", "decode", "decode"]
    assert scenario.tokens("a") == scenario.expected("a", 4)
    assert len(scenario.engine.notices) == 1
