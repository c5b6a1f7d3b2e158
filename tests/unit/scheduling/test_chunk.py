"""Prompts in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest

from runners.execution.simulated import Faults
from tests.support.scenario import Scenario


def test_a_prompt_goes_in_pieces_and_its_tokens_equal_one_shot():
    chunked = Scenario(chunk={"tokens": 128}, mix={"mode": "off"})
    chunked.request("a", 300, 3)
    chunked.run()
    assert chunked.log() == [
        "0-6 chunk | a:0+128",
        "6-12 chunk | a:128+128",
        "12-18 chunk | a:256+44*",
        "18-22 decode a",
        "22-26 decode a",
    ]
    whole = Scenario(mix={"mode": "off"})
    whole.request("a", 300, 3)
    whole.run()
    assert whole.log()[0] == "0-6 chunk | a:0+300*"
    assert chunked.tokens("a") == whole.tokens("a")


def test_decode_steps_run_between_the_pieces():
    scenario = Scenario(chunk={"tokens": 100}, mix={"mode": "off"})
    scenario.request("d", 20, 9)
    scenario.request("a", 250, 1, at=7)
    scenario.run()
    assert scenario.log()[2:8] == [
        "10-14 decode d",
        "14-20 chunk | a:0+100",
        "20-24 decode d",
        "24-30 chunk | a:100+100",
        "30-34 decode d",
        "34-40 chunk | a:200+50*",
    ]
    times = scenario.token_times("d")
    assert max(later - earlier for earlier, later in pairwise(times)) == 10  # a piece and a step


def test_pieces_also_bound_what_a_cursor_takes_of_a_mixed_step():
    scenario = Scenario(chunk={"tokens": 100})
    scenario.request("d", 20, 9)
    scenario.request("a", 250, 1, at=7)
    scenario.run()
    assert [line for line in scenario.log() if "mixed" in line] == [
        "14-24 mixed d | a:0+100",
        "24-34 mixed d | a:100+100",
        "34-44 mixed d | a:200+50*",
    ]


@pytest.mark.parametrize("mode", ["off", "merge"])
def test_a_piece_that_fails_falls_back_to_the_rest_in_one(mode):
    faults = Faults(launch=lambda plan: "no kernel" if plan.chunks and plan.chunks[0].end == 200 else None)
    scenario = Scenario(chunk={"tokens": 100}, mix={"mode": mode}, faults=faults)
    scenario.request("a", 350, 2)
    scenario.run()
    assert [line for line in scenario.log() if "chunk" in line] == ["0-6 chunk | a:0+100", "6-12 chunk | a:100+250*"]
    assert scenario.tokens("a") == scenario.expected("a", 2)
    assert scenario.engine.notices == [
        "step 2 (chunk) could not be launched: no kernel; the rest of the prompt goes in one piece"
    ]


def test_without_pieces_a_prompt_is_bounded_by_the_workspace_only():
    scenario = Scenario(wave={"max_rows": 500}, mix={"mode": "off"})
    scenario.request("a", 1200, 1)
    scenario.run()
    assert scenario.log() == ["0-6 chunk | a:0+500", "6-12 chunk | a:500+500", "12-18 chunk | a:1000+200*"]
