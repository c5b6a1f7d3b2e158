"""Pieces of long prompts beside the decode rows; alone, the one-shot path."""

from __future__ import annotations

from itertools import pairwise

from runners.execution.simulated import Faults
from runners.messages import OutputError
from runners.scheduling.scheduler_output import PlanKind
from tests.support.scenario import Scenario


def test_8_prompts_of_2000_while_8_decode():
    scenario = Scenario(mix={"mode": "merge", "token_budget": 2048})
    decoders = [f"d{number}" for number in range(8)]
    for name in decoders:
        scenario.request(name, 23, 20)
    for number in range(8):
        scenario.request(f"L{number}", 2000, 30, at=9)
    scenario.run()
    mixed = [trace for trace in scenario.steps if trace.plan.kind is PlanKind.MIXED]
    assert len(mixed) == 8
    for number, trace in enumerate(mixed):
        rows = [row.request_id for row in trace.plan.decode_rows]
        assert rows == decoders + [f"L{earlier}" for earlier in range(number)], "every live row, those done included"
        assert [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in trace.plan.chunks] == [
            (f"L{number}", 0, 2000)
        ]
    # Wave 0–8, two decode steps until 16, then a mixed step of 10 ms each: first tokens as a staircase.
    assert [scenario.first_token(f"L{number}") for number in range(8)] == [26, 36, 46, 56, 66, 76, 86, 96]
    for name in decoders:
        times = scenario.token_times(name)
        assert max(later - earlier for earlier, later in pairwise(times)) == 10
        assert scenario.tokens(name) == scenario.expected(name, 20)


def test_cursors_sit_on_the_highest_free_slots_and_decoders_on_the_lowest():
    scenario = Scenario(slots=6)
    scenario.request("d0", 20, 30)
    scenario.request("d1", 20, 30)
    scenario.request("L0", 200, 2, at=9)
    scenario.request("L1", 200, 2, at=9)
    scenario.request("d2", 20, 2, at=9)
    scenario.run()
    slots = {init.request_id: init.slot for plan in scenario.plans() for init in plan.slot_inits}
    assert slots == {"d0": 0, "d1": 1, "d2": 2, "L0": 5, "L1": 4}


def test_a_prompt_over_the_budget_takes_several_steps_and_shares_the_last():
    scenario = Scenario(mix={"token_budget": 1000})
    scenario.request("d", 20, 30)
    scenario.request("L0", 1100, 2, at=7)
    scenario.request("L1", 300, 2, at=7)
    scenario.request("L2", 1000, 2, at=7)
    scenario.run()
    assert [line for line in scenario.log() if "mixed" in line] == [
        "14-24 mixed d | L0:0+1000",
        "24-34 mixed d | L0:1000+100* L1:0+300*",
        "34-44 mixed d,L0,L1 | L2:0+1000*",
    ]


def test_cursors_fill_a_step_with_its_rows_up_to_half_the_budget():
    scenario = Scenario(mix={"token_budget": 1000})
    scenario.request("d", 20, 30)
    for number, length in enumerate((200, 70, 400, 600, 100, 510, 90)):
        scenario.request(f"L{number}", length, 1, at=7)
    scenario.run()
    assert [line for line in scenario.log() if "mixed" in line] == [
        "14-24 mixed d | L0:0+200* L1:0+70* L2:0+229",
        "24-34 mixed d | L2:229+171* L3:0+328",
        "34-44 mixed d | L3:328+272* L4:0+100*",  # 127 of 510 left: a sliver
        "44-54 mixed d | L5:0+510*",
        "54-64 mixed d | L6:0+90*",
    ]


def test_short_prompts_still_come_as_a_wave():
    scenario = Scenario()
    scenario.request("d", 20, 30)
    scenario.request("L", 100, 1, at=7)
    scenario.request("s0", 64, 1, at=7)
    scenario.request("s1", 64, 1, at=7)
    scenario.run()
    assert scenario.log()[3:5] == ["14-22 wave | s0:0+64* s1:0+64*", "22-32 mixed d | L:0+100*"]


def test_min_prompt_tokens_moves_the_border():
    scenario = Scenario(mix={"min_prompt_tokens": 10})
    scenario.request("d", 20, 30)
    scenario.request("s0", 20, 1, at=7)
    scenario.request("s1", 20, 1, at=7)
    scenario.run()
    assert scenario.log()[:4] == [
        "0-6 chunk | d:0+20*",
        "6-10 decode d",
        "10-14 decode d",
        "14-24 mixed d | s0:0+20* s1:0+20*",
    ]


def test_with_nothing_to_run_beside_short_prompts_wave_whatever_the_border():
    scenario = Scenario(mix={"min_prompt_tokens": 10})
    for number in range(3):
        scenario.request(f"r{number}", 20, 1)
    scenario.run()
    assert scenario.kinds() == ["wave"]


# --- alone ----------------------------------------------------------------------------------------------------------


def test_with_no_decoders_a_fresh_cursor_takes_the_one_shot_path():
    scenario = Scenario(mix={"token_budget": 1000})
    scenario.request("L0", 3000, 4)
    scenario.request("L1", 900, 4)
    scenario.run()
    assert scenario.log()[:3] == [
        "0-6 chunk | L0:0+3000*",  # beyond the budget: it stalls nobody
        "6-16 mixed L0 | L1:0+900*",
        "16-20 decode L0,L1",
    ]


def test_a_cursor_begun_beside_decoders_goes_on_in_pieces_when_they_end():
    scenario = Scenario(mix={"token_budget": 1000})
    scenario.request("d", 20, 3)
    scenario.request("L0", 2500, 1, at=1)
    scenario.request("L1", 700, 1, at=1)
    scenario.run()
    assert scenario.log() == [
        "0-6 chunk | d:0+20*",
        "6-10 decode d",
        "10-20 mixed d | L0:0+1000",
        "20-26 chunk | L0:1000+1000",
        "26-32 chunk | L0:2000+500*",
        "32-38 chunk | L1:0+700*",
    ]


# --- fallbacks ------------------------------------------------------------------------------------------------------


def test_without_mixed_steps_prompts_prefill_alone_with_one_log_line():
    scenario = Scenario(lacks=("mix", "overlap"))
    scenario.request("d", 20, 30)
    scenario.request("L", 2000, 2, at=7)
    scenario.run()
    assert scenario.log()[3] == "14-20 chunk | L:0+2000*"
    assert [notice.split(":")[0] for notice in scenario.engine.notices] == ["mix.mode merge"]


def test_a_failed_mixed_step_costs_the_decode_rows_nothing_and_its_cursor_goes_alone():
    faults = Faults(launch=lambda plan: "no kernel" if plan.kind is PlanKind.MIXED else None)
    scenario = Scenario(faults=faults)
    scenario.request("d", 20, 10)
    scenario.request("L", 2000, 3, at=7)
    scenario.run()
    assert scenario.log()[2:5] == ["10-14 decode d", "14-20 chunk | L:0+2000*", "20-24 decode d,L"]
    assert scenario.tokens("d") == scenario.expected("d", 10)
    assert scenario.tokens("L") == scenario.expected("L", 3)


def test_a_cursor_that_fails_alone_too_ends_with_its_own_error():
    faults = Faults(launch=lambda plan: "bad prompt" if any(c.request_id == "L0" for c in plan.chunks) else None)
    scenario = Scenario(faults=faults, mix={"token_budget": 4096})
    scenario.request("d", 20, 10)
    scenario.request("L0", 2000, 3, at=7)
    scenario.request("L1", 2000, 3, at=7)
    scenario.run()
    assert scenario.end("L0") == OutputError("bad prompt", "request_failed")
    assert scenario.tokens("d") == scenario.expected("d", 10)
    assert scenario.tokens("L1") == scenario.expected("L1", 3)


def test_a_row_that_grew_in_a_mixed_step_that_failed_still_gets_its_block():
    failed = []

    def fault(plan):
        if plan.kind is PlanKind.MIXED and any(append.start == 2 for append in plan.block_appends) and not failed:
            failed.append(plan.step_id)
            return "out of memory"
        return None

    mix = {"mode": "merge", "token_budget": 2, "min_prompt_tokens": 4}
    scenario = Scenario(faults=Faults(launch=fault), mix=mix)
    scenario.request("row", 20, 40)
    scenario.request("long", 64, 3, at=7)
    scenario.run()
    assert failed, "the row's third block was in a mixed step"
    assert scenario.tokens("row") == scenario.expected("row", 40)
    assert scenario.tokens("long") == scenario.expected("long", 3)
