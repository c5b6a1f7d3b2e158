"""Stable slots, dense rows, width, compaction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.kv_cache.sessions import BlockTable
from runners.request import Request, SamplingParams
from runners.scheduling.rows import DecodeBatch
from runners.scheduling.scheduler_output import PlanKind
from runners.scheduling.slots import SlotMap
from runners.scheduling.width import decode_width
from tests.support.scenario import Scenario


def row_ids(plan) -> list[str]:
    return [row.request_id for row in plan.decode_rows]


def test_a_request_that_ends_in_row_0_with_5_live_costs_one_move_and_leaves_width_4():
    scenario = Scenario(depth=0)
    for number, max_tokens in enumerate((3, 9, 9, 9, 9)):
        scenario.request(f"r{number}", 20, max_tokens)
    scenario.run()
    plans = scenario.plans(PlanKind.DECODE)
    assert [row_ids(plan) for plan in plans[1:3]] == [["r0", "r1", "r2", "r3", "r4"], ["r4", "r1", "r2", "r3"]]
    assert [plan.width for plan in plans[1:3]] == [5, 4]
    assert scenario.scheduler.live.rows.num_moves == 1
    slots = {row.request_id: row.slot for plan in plans for row in plan.decode_rows}
    assert slots == {f"r{number}": number for number in range(5)}, "its slot does not move"


def test_an_end_known_ahead_wastes_no_row():
    scenario = Scenario(depth=1)
    scenario.request("a", 20, 3)
    scenario.request("b", 20, 6)
    scenario.run()
    rows = [row_ids(plan) for plan in scenario.plans(PlanKind.DECODE)]
    assert rows == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"]]


def test_only_an_eos_wastes_a_row_and_its_token_is_dropped():
    scenario = Scenario(depth=1, eos_at={"a": 3})
    scenario.request("a", 20, 10)
    scenario.request("b", 20, 6)
    scenario.run()
    rows = [row_ids(plan) for plan in scenario.plans(PlanKind.DECODE)]
    assert rows == [["a", "b"], ["a", "b"], ["a", "b"], ["b"], ["b"]]
    assert scenario.tokens("a") == scenario.expected("a", 3)


def test_without_a_pipeline_an_eos_wastes_nothing():
    scenario = Scenario(depth=0, eos_at={"a": 3})
    scenario.request("a", 20, 10)
    scenario.run()
    assert scenario.kinds() == ["chunk", "decode", "decode"]


def test_a_cursors_slot_is_never_taken_by_a_row():
    scenario = Scenario(slots=4, mix={"token_budget": 500})
    for number, max_tokens in enumerate((4, 30, 4)):
        scenario.request(f"d{number}", 20, max_tokens)
    scenario.request("L", 2000, 3, at=9)
    scenario.request("n", 20, 3, at=22)
    scenario.run()
    cursor_slots = {chunk.slot for plan in scenario.plans() for chunk in plan.chunks if chunk.request_id == "L"}
    assert cursor_slots == {3}
    mixed = [plan for plan in scenario.plans(PlanKind.MIXED) if plan.chunks[0].request_id == "L"]
    assert len(mixed) >= 2
    assert all(row.slot != 3 for plan in mixed for row in plan.decode_rows)


@pytest.mark.parametrize(("rows", "width"), [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 12), (12, 12)])
def test_pow2_width_rounds_up_to_at_most_the_slots(rows, width):
    assert decode_width("pow2", rows, 12) == width
    assert decode_width("exact", rows, 12) == rows


def test_pow2_width_in_plans():
    scenario = Scenario(decode={"width": "pow2"})
    for number in range(3):
        scenario.request(f"r{number}", 20, 3)
    scenario.run()
    assert {plan.width for plan in scenario.plans(PlanKind.DECODE)} == {4}


# --- the structures by themselves -----------------------------------------------------------------------------------


@given(st.integers(1, 40), st.lists(st.sampled_from(["low", "high", "release"]), max_size=80), st.randoms())
def test_slot_map_hands_out_the_lowest_and_the_highest(num_slots, actions, random):
    slots = SlotMap(num_slots)
    free = set(range(num_slots))
    for action in actions:
        if action == "release":
            taken = sorted(set(range(num_slots)) - free)
            if taken:
                slot = random.choice(taken)
                slots.release(slot)
                free.add(slot)
        else:
            expected = (min(free) if action == "low" else max(free)) if free else None
            assert (slots.take_lowest() if action == "low" else slots.take_highest()) == expected
            free.discard(expected)
        assert slots.num_free == len(free)


def test_slot_map_refuses_what_is_not_taken():
    slots = SlotMap(2)
    for slot in (0, 2, -1):
        with pytest.raises(ValueError, match="not taken"):
            slots.release(slot)


@given(st.lists(st.one_of(st.just("join"), st.just("compact"), st.integers(0, 30)), max_size=80))
def test_rows_stay_dense_with_at_most_one_move_for_each_that_leaves(actions):
    batch = DecodeBatch()
    inside: list[Request] = []
    joined = left = 0
    for action in actions:
        if action == "join":
            request = Request(f"r{joined}", [1], SamplingParams(max_tokens=1), table=BlockTable(b""))
            batch.join(request)
            inside.append(request)
            joined += 1
        elif action == "compact":
            before = {request.request_id: request.row for request in inside}
            moves = batch.num_moves
            rows = batch.compact()
            assert [request.row for request in rows] == list(range(len(inside)))
            moved = [request for request in inside if before[request.request_id] != request.row]
            assert len(moved) == batch.num_moves - moves
            assert all(request.row < before[request.request_id] for request in moved), "rows only move down"
        elif inside:
            request = inside.pop(action % len(inside))
            batch.discard(request)
            batch.discard(request)  # a second time changes nothing
            left += 1
        assert len(batch) == len(inside)
        assert {request.request_id for request in batch} == {request.request_id for request in inside}
        assert len({request.row for request in inside}) == len(inside)
    assert batch.num_moves <= left


def test_who_joins_takes_the_lowest_hole():
    batch = DecodeBatch()
    requests = [Request(f"r{n}", [1], SamplingParams(max_tokens=1), table=BlockTable(b"")) for n in range(5)]
    for request in requests[:4]:
        batch.join(request)
    batch.discard(requests[0])
    batch.discard(requests[2])
    batch.join(requests[4])
    assert requests[4].row == 0
    assert batch.compact() == [requests[4], requests[1], requests[3]]
    assert batch.num_moves == 1
