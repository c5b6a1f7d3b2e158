"""The executor without a device: times, tokens, faults."""

from __future__ import annotations

import time

import pytest

from runners.execution.cost_model import CostModel, StepCost
from runners.execution.executor import DeviceLostError, LaunchError
from runners.execution.simulated import Faults, RealTimeClock, SimulatedExecutor, VirtualClock, simulated_token
from runners.request import SamplingParams
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, PrefillChunk, SlotInit, StepPlan

COSTS = CostModel({PlanKind.DECODE: StepCost(0.004), PlanKind.WAVE: StepCost(0.010)}, overlap_slowdown=1.5)


def init(slot: int, prompt: int = 5, **params: int) -> SlotInit:
    sampling = SamplingParams(max_tokens=9, **params)
    return SlotInit(slot, f"r{slot}", sampling, tuple(range(prompt)), prompt)


def prefill(step_id: int, slot: int, kind: PlanKind = PlanKind.WAVE, **params: int) -> StepPlan:
    start = init(slot, **params)
    return StepPlan(
        step_id,
        kind,
        chunks=(PrefillChunk(f"r{slot}", slot, 0, start.token_ids, True),),
        slot_inits=(start,),
        flight_id=step_id if kind is PlanKind.OVERLAP_PREFILL else None,
    )


def decode(step_id: int, *rows: tuple[int, int]) -> StepPlan:
    decode_rows = tuple(DecodeRow(f"r{slot}", slot, position) for slot, position in rows)
    return StepPlan(step_id, PlanKind.DECODE, decode_rows, width=len(rows))


def test_steps_run_one_after_another_and_collect_waits():
    clock = VirtualClock(100.0)
    executor = SimulatedExecutor(COSTS, clock)
    executor.launch(prefill(1, 0))
    assert executor.last_launch == (100.0, pytest.approx(100.010))
    executor.launch(decode(2, (0, 5)))
    assert executor.last_launch == (pytest.approx(100.010), pytest.approx(100.014))
    assert not executor.is_ready()
    assert clock.now() == 100.0, "launching takes no time"
    assert executor.collect().step_id == 1
    assert clock.now() == pytest.approx(100.010)
    assert executor.collect().step_id == 2
    assert executor.next_completion() is None


def test_an_idle_device_starts_at_once():
    clock = VirtualClock()
    executor = SimulatedExecutor(COSTS, clock)
    executor.launch(prefill(1, 0))
    executor.collect()
    clock.wait_until(5.0)
    executor.launch(decode(2, (0, 5)))
    assert executor.last_launch == (5.0, pytest.approx(5.004))


def test_tokens_depend_on_request_and_position_alone():
    executor = SimulatedExecutor(COSTS, VirtualClock(), vocab_size=500)
    executor.launch(prefill(1, 0))
    executor.launch(prefill(2, 1))
    executor.launch(decode(3, (1, 5), (0, 5)))
    first = executor.collect().token_ids
    executor.collect()
    assert first == (simulated_token("r0", 5, 500),)
    assert executor.collect().token_ids == (simulated_token("r1", 6, 500), simulated_token("r0", 6, 500))
    assert all(0 <= simulated_token("x", position, 500) < 500 for position in range(1000))


def test_a_flight_runs_beside_steps_and_both_slow_down():
    clock = VirtualClock()
    executor = SimulatedExecutor(COSTS, clock)
    executor.launch(prefill(1, 0))
    executor.launch(prefill(2, 1, PlanKind.OVERLAP_PREFILL))
    assert executor.last_launch == (pytest.approx(0.010), pytest.approx(0.025)), "after the step launched before it"
    executor.launch(decode(3, (0, 5)))
    assert executor.last_launch == (pytest.approx(0.010), pytest.approx(0.016))
    executor.collect()
    executor.collect()
    assert executor.completed_flights() == ()
    clock.wait_until(executor.next_completion())
    ((flight_id, result),) = executor.completed_flights()
    assert flight_id == 2
    assert result.token_ids == (simulated_token("r1", 5, 32000),)
    assert executor.completed_flights() == ()


def test_logprobs_for_those_who_ask():
    executor = SimulatedExecutor(COSTS, VirtualClock())
    executor.launch(prefill(1, 0, logprobs=2, prompt_logprobs=1))
    executor.launch(prefill(2, 1))
    asked, silent = executor.collect(), executor.collect()
    assert asked.logprobs["r0"].token_id == asked.token_ids[0]
    assert len(asked.logprobs["r0"].top_ids) == 2
    assert [entry.token_id for entry in asked.prompt_logprobs["r0"]] == [1, 2, 3, 4]
    assert silent.logprobs == {}
    assert silent.prompt_logprobs == {}


def test_scripted_faults():
    faults = Faults(
        launch=lambda plan: "full" if plan.step_id == 2 else None,
        token=lambda request_id, position: "NaN" if position == 6 else None,
        lost_at_step=4,
    )
    executor = SimulatedExecutor(COSTS, VirtualClock(), faults=faults)
    executor.launch(prefill(1, 0))
    with pytest.raises(LaunchError, match="full"):
        executor.launch(prefill(2, 1))
    executor.launch(decode(3, (0, 5)))
    assert executor.collect().failures == {}
    assert executor.collect().failures["r0"].message == "NaN"
    executor.launch(decode(4, (0, 6)))
    with pytest.raises(DeviceLostError):
        executor.collect()


def test_in_real_time_a_step_takes_its_time():
    executor = SimulatedExecutor(CostModel.constant(0.02), RealTimeClock())
    started = time.monotonic()
    executor.launch(prefill(1, 0))
    assert not executor.is_ready()
    executor.collect()
    assert time.monotonic() - started >= 0.02, "never earlier than modelled"


def test_close_forgets_everything():
    executor = SimulatedExecutor(COSTS, VirtualClock())
    executor.launch(prefill(1, 0))
    executor.close()
    assert not executor.is_ready()
    assert executor.next_completion() is None
