"""When arrivals join: hold, caps, cold burst."""

from __future__ import annotations

import pytest

from runners.messages import OutputError
from runners.scheduling.scheduler_output import PlanKind
from tests.support.scenario import Scenario


def decoders(scenario: Scenario, count: int, max_tokens: int = 40) -> list[str]:
    """Short requests that are decoding from 8 ms on."""
    names = [f"d{number}" for number in range(count)]
    for name in names:
        scenario.request(name, 20, max_tokens)
    return names


# --- hold -----------------------------------------------------------------------------------------------------------


def test_a_drip_is_held_for_max_hold_steps_while_others_decode():
    scenario = Scenario(admission={"min_batch": 8, "max_hold_steps": 2})
    decoders(scenario, 8)
    for number in range(6):  # one arrival a decode step (4 ms)
        scenario.request(f"n{number}", 20, 2, at=17 + 4 * number)
    scenario.run()
    log = scenario.log()
    # n0 arrives at 17. It is seen when a step ends, at 20: held for the steps launched at 20 and 24, admitted at 28.
    assert log[4:9] == [
        "20-24 decode d0,d1,d2,d3,d4,d5,d6,d7",
        "24-28 decode d0,d1,d2,d3,d4,d5,d6,d7",
        "28-32 decode d0,d1,d2,d3,d4,d5,d6,d7",
        "32-40 wave | n0:0+20* n1:0+20* n2:0+20*",
        "40-44 decode d0,d1,d2,d3,d4,d5,d6,d7,n0,n1,n2",
    ]
    assert [scenario.first_token(f"n{number}") for number in range(3)] == [40, 40, 40]


def test_min_batch_waiting_end_the_hold_at_once():
    scenario = Scenario(admission={"min_batch": 3, "max_hold_steps": 100})
    decoders(scenario, 2)
    scenario.request("n0", 20, 2, at=11)
    scenario.request("n1", 20, 2, at=15)
    scenario.request("n2", 20, 2, at=19)
    scenario.run()
    waves = scenario.plans(PlanKind.WAVE)
    assert [chunk.request_id for chunk in waves[1].chunks] == ["n0", "n1", "n2"]
    assert scenario.first_token("n0") == 32  # third arrival seen at 20, the step launched before it ends at 24


def test_an_idle_decode_set_admits_at_once():
    scenario = Scenario(admission={"min_batch": 8, "max_hold_steps": 100})
    scenario.request("a", 20, 1)
    scenario.request("b", 20, 1, at=30)
    scenario.run()
    assert scenario.log() == ["0-6 chunk | a:0+20*", "30-36 chunk | b:0+20*"]


def test_the_hold_ends_when_the_decode_set_becomes_idle():
    scenario = Scenario(admission={"min_batch": 8, "max_hold_steps": 100})
    scenario.request("a", 20, 3)  # its last decode step is launched at 6 and runs until 14
    scenario.request("b", 20, 1, at=7)
    scenario.run()
    assert scenario.log() == ["0-6 chunk | a:0+20*", "6-10 decode a", "10-14 decode a", "14-20 chunk | b:0+20*"]


def test_with_no_hold_an_arrival_joins_with_the_next_step():
    scenario = Scenario(admission={"max_hold_steps": 0})
    decoders(scenario, 2)
    scenario.request("n0", 20, 2, at=17)
    scenario.run()
    assert scenario.first_token("n0") == 30  # seen at 20, after the step that runs until 24


# --- caps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lacks", "first"), [((), 64), (("wave",), 8)])
def test_max_batch_auto_is_64_where_waves_work_else_8(lacks, first):
    scenario = Scenario(slots=128, lacks=lacks)
    for number in range(70):
        scenario.request(f"r{number}", 20, 4)
    scenario.run()
    before_decode = []
    for plan in scenario.plans():
        if plan.kind is PlanKind.DECODE:
            break
        before_decode += [chunk.request_id for chunk in plan.chunks]
    assert before_decode == [f"r{number}" for number in range(first)]


def test_long_prompts_are_capped_by_admission():
    scenario = Scenario(mix={"mode": "off"}, admission={"max_long_prompts": 2})
    for number in range(5):
        scenario.request(f"L{number}", 100, 3)
    scenario.run()
    assert scenario.kinds()[:5] == ["chunk", "chunk", "decode", "chunk", "chunk"]


def test_a_prompt_of_the_wave_limit_is_not_long():
    scenario = Scenario(mix={"mode": "off"}, admission={"max_long_prompts": 1})
    for number in range(3):
        scenario.request(f"r{number}", 64, 1)
    scenario.run()
    assert scenario.kinds() == ["wave"]


def test_admission_stops_at_the_slots():
    scenario = Scenario(slots=3)
    for number in range(5):
        scenario.request(f"r{number}", 20, 2)
    scenario.run()
    assert scenario.log() == [
        "0-8 wave | r0:0+20* r1:0+20* r2:0+20*",
        "8-12 decode r0,r1,r2",
        "12-20 wave | r3:0+20* r4:0+20*",
        "20-24 decode r3,r4",
    ]


def test_a_full_queue_refuses():
    scenario = Scenario(slots=1, admission={"max_queued_requests": 2})
    scenario.request("a", 20, 10)
    for number in range(3):
        scenario.request(f"w{number}", 20, 1, at=7)
    scenario.run()
    error = scenario.end("w2")
    assert isinstance(error, OutputError)
    assert error.code == "rate_limit_exceeded"
    assert scenario.tokens("w1") == scenario.expected("w1", 1)


def test_free_slots_do_not_count_as_queue():
    scenario = Scenario(slots=2, admission={"max_queued_requests": 1})
    for number in range(4):
        scenario.request(f"r{number}", 20, 1)
    scenario.run()
    assert [scenario.tokens(f"r{number}") for number in range(3)] == [scenario.expected(f"r{n}", 1) for n in range(3)]
    error = scenario.end("r3")
    assert isinstance(error, OutputError)
    assert error.code == "rate_limit_exceeded"


def test_a_full_queue_lets_the_other_choices_of_a_prompt_in():
    scenario = Scenario(slots=1, admission={"max_queued_requests": 1})
    scenario.request("a", 20, 10)
    scenario.request("w0", 20, 1, at=7)
    scenario.request("a-1", 20, 1, at=8, message={"follows": True})
    scenario.request("w1", 20, 1, at=9)
    scenario.run()
    assert scenario.tokens("a-1") == scenario.expected("a-1", 1)
    assert isinstance(scenario.end("w1"), OutputError)


# --- cold burst -----------------------------------------------------------------------------------------------------


def test_a_burst_within_the_silence_becomes_one_wave():
    scenario = Scenario(admission={"cold_window_us": 4000, "cold_silence_us": 800})
    for number in range(4):
        scenario.request(f"r{number}", 20, 1, at=10 + 0.5 * number)
    scenario.run()
    assert scenario.kinds() == ["wave"]
    assert scenario.steps[0].start == pytest.approx(0.0115 + 0.0008)


def test_a_lone_request_waits_for_the_silence_and_no_longer():
    scenario = Scenario(admission={"cold_window_us": 4000, "cold_silence_us": 800})
    scenario.request("a", 20, 1, at=10)
    scenario.run()
    assert scenario.steps[0].start == pytest.approx(0.0108)


def test_who_keeps_coming_alone_stops_waiting_until_company_comes():
    scenario = Scenario(admission={"cold_window_us": 4000, "cold_silence_us": 800})
    for number in range(5):
        scenario.request(f"a{number}", 20, 1, at=10 + 20 * number)
    scenario.request("b", 20, 1, at=90.5)
    scenario.request("c", 20, 1, at=130)
    scenario.run()
    assert scenario.log() == [
        "10.8-16.8 chunk | a0:0+20*",
        "30.8-36.8 chunk | a1:0+20*",
        "50-56 chunk | a2:0+20*",
        "70-76 chunk | a3:0+20*",
        "90-96 chunk | a4:0+20*",
        "96.8-102.8 chunk | b:0+20*",  # was half a millisecond behind: from now on a start waits again
        "130.8-136.8 chunk | c:0+20*",
    ]


def test_a_drip_cannot_hold_the_start_beyond_the_window():
    scenario = Scenario(admission={"cold_window_us": 4000, "cold_silence_us": 800})
    for number in range(20):
        scenario.request(f"r{number}", 20, 1, at=10 + 0.5 * number)
    scenario.run()
    assert scenario.steps[0].start == pytest.approx(0.014)
    assert len(scenario.steps[0].plan.chunks) == 9  # arrivals at 10, 10.5, … 14


def test_a_full_batch_starts_at_once():
    scenario = Scenario(admission={"cold_window_us": 4000, "cold_silence_us": 800, "max_batch": 3})
    for number in range(3):
        scenario.request(f"r{number}", 20, 1, at=10 + 0.1 * number)
    scenario.run()
    assert scenario.steps[0].start == pytest.approx(0.0102)


def test_a_busy_engine_does_not_wait():
    scenario = Scenario(admission={"cold_window_us": 4000, "cold_silence_us": 800})
    scenario.request("a", 20, 20)
    scenario.request("b", 20, 1, at=20)
    scenario.run()
    starts = [trace.start for trace in scenario.steps]
    ends = [trace.end for trace in scenario.steps]
    assert starts[1:] == pytest.approx(ends[:-1]), "the device never pauses"


def test_a_burst_whose_only_request_is_aborted_leaves_nothing_to_wait_for():
    scenario = Scenario(admission={"cold_window_us": 4000, "cold_silence_us": 800})
    scenario.request("a", 20, 1, at=10)
    scenario.abort("a", at=10.2)
    scenario.request("b", 20, 1, at=20)
    scenario.run()
    assert scenario.steps[0].start == pytest.approx(0.0208)
