"""Packed prompts, sub-waves, single prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runners.execution.simulated import Faults
from runners.scheduling.scheduler_output import PlanKind
from runners.scheduling.wave import WavePolicy
from tests.support.scenario import Scenario


def wave_sizes(scenario: Scenario) -> list[int]:
    return [len(plan.chunks) for plan in scenario.plans(PlanKind.WAVE)]


def test_64_prompts_of_23_tokens_become_two_sub_waves_with_no_decode_between():
    scenario = Scenario()
    for number in range(64):
        scenario.request(f"r{number}", 23, 3)
    scenario.run()
    assert scenario.kinds() == ["wave", "wave", "decode", "decode"]
    assert wave_sizes(scenario) == [32, 32]
    assert [trace.plan.num_tokens for trace in scenario.steps[:2]] == [736, 736]
    assert {scenario.first_token(f"r{number}") for number in range(32)} == {8}
    assert {scenario.first_token(f"r{number}") for number in range(32, 64)} == {16}
    assert [len(plan.decode_rows) for plan in scenario.plans(PlanKind.DECODE)] == [64, 64]


def test_the_prompts_of_an_admission_are_launched_without_waiting_for_one_another():
    scenario = Scenario(wave={"sub_wave": 2}, mix={"mode": "off"})
    for number in range(4):
        scenario.request(f"r{number}", 20, 1)
    scenario.request("L", 200, 1)
    scenario.run()
    assert scenario.log() == ["0-8 wave | r0:0+20* r1:0+20*", "8-16 wave | r2:0+20* r3:0+20*", "16-22 chunk | L:0+200*"]


def test_varlen_packs_mixed_lengths():
    scenario = Scenario()
    for number, length in enumerate((5, 64, 17)):
        scenario.request(f"r{number}", length, 1)
    scenario.run()
    assert scenario.log() == ["0-8 wave | r0:0+5* r1:0+64* r2:0+17*"]


def test_same_length_groups_and_a_length_that_occurs_once_skips_the_wave():
    scenario = Scenario(wave={"grouping": "same_length"})
    for number, length in enumerate((5, 17, 5, 9, 17)):
        scenario.request(f"r{number}", length, 1)
    scenario.run()
    assert scenario.log() == [
        "0-8 wave | r0:0+5* r2:0+5*",
        "8-16 wave | r1:0+17* r4:0+17*",
        "16-22 chunk | r3:0+9*",
    ]


def test_max_rows_caps_the_tokens_of_a_pass():
    scenario = Scenario(wave={"max_rows": 50})
    for number in range(5):
        scenario.request(f"r{number}", 20, 1)
    scenario.run()
    assert wave_sizes(scenario) == [2, 2]
    assert scenario.kinds() == ["wave", "wave", "chunk"]


def test_switched_off_every_prompt_prefills_alone():
    scenario = Scenario(wave={"enabled": False})
    for number in range(3):
        scenario.request(f"r{number}", 20, 1)
    scenario.run()
    assert scenario.kinds() == ["chunk"] * 3
    assert scenario.engine.notices == []


def test_an_executor_that_cannot_pack_gets_single_prompts_and_one_log_line():
    scenario = Scenario(lacks=("wave",))
    for number in range(3):
        scenario.request(f"r{number}", 20, 1)
    scenario.run()
    assert scenario.kinds() == ["chunk"] * 3
    assert len(scenario.engine.notices) == 1
    assert "wave.enabled" in scenario.engine.notices[0]


def test_a_failed_wave_falls_back_to_single_prompts():
    faults = Faults(launch=lambda plan: "out of scratch" if plan.kind is PlanKind.WAVE else None)
    scenario = Scenario(faults=faults)
    for number in range(3):
        scenario.request(f"r{number}", 20, 2)
    scenario.run()
    assert scenario.log()[:3] == ["0-6 chunk | r0:0+20*", "6-12 chunk | r1:0+20*", "12-18 chunk | r2:0+20*"]
    assert all(scenario.tokens(f"r{number}") == scenario.expected(f"r{number}", 2) for number in range(3))
    assert scenario.engine.notices == [
        "step 1 (wave) could not be launched: out of scratch; its prompts are computed one by one"
    ]


def test_a_single_short_prompt_is_one_chunk_from_start_to_end():
    scenario = Scenario()
    scenario.request("a", 23, 1)
    scenario.run()
    assert scenario.log() == ["0-6 chunk | a:0+23*"]


@given(
    lengths=st.lists(st.integers(1, 90), max_size=80),
    policy=st.builds(
        WavePolicy,
        enabled=st.booleans(),
        grouping=st.sampled_from(["varlen", "same_length"]),
        max_prompt_tokens=st.integers(1, 80),
        max_rows=st.integers(1, 200),
        sub_wave=st.integers(1, 40),
    ),
)
def test_grouping_covers_every_prompt_once_within_the_limits(lengths, policy):
    groups = policy.group(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, key=lambda size: size == 1), "waves first, then single prompts"
    for group in groups:
        if len(group) > 1:
            assert policy.enabled
            assert len(group) <= policy.sub_wave
            assert sum(lengths[index] for index in group) <= policy.max_rows
            assert all(lengths[index] <= policy.max_prompt_tokens for index in group)
            assert policy.grouping == "varlen" or len({lengths[index] for index in group}) == 1


def test_a_pass_may_hold_exactly_max_rows_and_prompts_alone_come_last():
    assert WavePolicy(True, "varlen", 64, 40, 32).group([20, 20, 20]) == [[0, 1], [2]]
    assert WavePolicy(True, "same_length", 64, 40, 32).group([5, 7, 7]) == [[1, 2], [0]]
