"""The loop with the real scheduler, the real I/O thread and client, and an executor that does what the test says."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from configs.schema import AdmissionSection, Profile
from runners.engine_client import EngineClient
from runners.engine_core import EXIT_DEVICE_LOST, EXIT_LOOP_FAILED, EXIT_STOPPED, EngineCore
from runners.engine_io import EngineIO, LoopVitals
from runners.engine_startup import LoadedModel
from runners.engine_state import EnginePhase
from runners.errors import EngineUnavailableError, ModelNotFoundError, RequestFailedError
from runners.execution.executor import Capabilities, DeviceLostError, Executor, LaunchError, StepResult
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import OutputError, Shutdown
from runners.request import FinishReason, SamplingParams
from runners.request_stream import RequestStream
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, StepPlan
from runners.simulation.recorder import ArrivalRecorder
from runners.simulation.trace import Arrival, read_trace
from runners.step_clock import StepClock
from tests.support.eventually import eventually
from tests.support.scripted_engine import model_info

NUM_BLOCKS = 64


class ScriptedExecutor(Executor):
    """A token is the position it stands at. `on_launch` and `on_collect` may raise."""

    def __init__(self, pipeline_depth: int = 0) -> None:
        self.events: list[tuple[str, int]] = []
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self.on_collect: Callable[[StepPlan], StepResult | None] = lambda plan: None
        self.is_closed = False
        self._depth = pipeline_depth
        self._in_flight: deque[StepPlan] = deque()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(pipeline_depth=self._depth)

    def launch(self, plan: StepPlan) -> None:
        self.on_launch(plan)
        self.events.append(("launch", plan.step_id))
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self._in_flight.popleft()
        self.events.append(("collect", plan.step_id))
        result = self.on_collect(plan)
        if result is not None:
            return result
        tokens = [row.position + 1 for row in plan.decode_rows] + [chunk.end for chunk in plan.chunks if chunk.samples]
        return StepResult(plan.step_id, tuple(tokens))

    def is_ready(self) -> bool:
        return bool(self._in_flight)

    def close(self) -> None:
        self.is_closed = True


class RunningCore:
    """A loop on its own thread, and a client on the test's loop."""

    def __init__(self, folder: Path, executor: ScriptedExecutor, recorder: ArrivalRecorder | None = None) -> None:
        self.executor = executor
        profile = Profile(admission=AdmissionSection(cold_window_us=0, cold_silence_us=0))
        cache = CacheManager(NUM_BLOCKS, 16, prefix_cache=False)
        limits = SchedulerLimits(max_context=256, slots=4)
        self.scheduler = Scheduler(profile, executor.capabilities, cache, limits, check=True)
        self.io = EngineIO(folder / "e.sock", beat_interval_s=0.05)
        loaded = LoadedModel(self.scheduler, executor, model_info(name="m"))
        self.core = EngineCore(self.io, [loaded], recorder=recorder)
        self.exit_status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.client = EngineClient(slots=4, max_queued_requests=100, beat_limit_s=30.0)
        self.io.start()
        self.client.attach(f"ipc://{folder / 'e.sock'}")
        self.client.set_state(EnginePhase.READY)
        self._thread.start()

    def _run(self) -> None:
        self.exit_status = self.core.run()

    async def submit(self, request_id: str, num_prompt_tokens: int = 3, max_tokens: int = 8) -> RequestStream:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return await self.client.submit("m", list(range(num_prompt_tokens)), params, request_id=request_id)

    async def wait_exit(self) -> int | None:
        await asyncio.to_thread(self._thread.join, 10)
        return self.exit_status

    async def close(self) -> None:
        if self._thread.is_alive():
            self.client.send(Shutdown())
        assert await self.wait_exit() is not None
        self.client.detach()
        self.io.stop()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningCore]:
    running = RunningCore(tmp_path, ScriptedExecutor())
    yield running
    await running.close()


async def read(stream: RequestStream) -> tuple[list[int], FinishReason | None]:
    ids: list[int] = []
    reason = None
    async for chunk in stream:
        ids += chunk.token_ids
        reason = chunk.finish_reason
    return ids, reason


async def test_many_requests_each_get_their_own_tokens_in_order(running: RunningCore) -> None:
    lengths = [3 + 5 * index for index in range(12)]  # three times as many as there are slots
    streams = [await running.submit(str(length), length, 20) for length in lengths]
    results = await asyncio.wait_for(asyncio.gather(*map(read, streams)), 20)
    for length, result in zip(lengths, results, strict=True):
        assert result == (list(range(length, length + 20)), FinishReason.LENGTH)
    await eventually(lambda: running.client.stats.generation_tokens == 12 * 20)
    await eventually(lambda: running.client.stats.free_blocks == NUM_BLOCKS and running.client.stats.running == 0)


async def test_shutdown_ends_the_loop(running: RunningCore) -> None:
    running.client.send(Shutdown())
    assert await running.wait_exit() == EXIT_STOPPED


async def test_an_unknown_model_is_that_requests_error(running: RunningCore) -> None:
    stream = await running.client.submit("other", [1], SamplingParams(max_tokens=1), request_id="a")
    with pytest.raises(ModelNotFoundError):
        await asyncio.wait_for(anext(stream), 10)
    assert (await read(await running.submit("b"))) == (list(range(3, 11)), FinishReason.LENGTH)


async def test_a_launch_that_fails_for_one_request_costs_only_it(running: RunningCore) -> None:
    def refuse(plan: StepPlan) -> None:
        if any(item.request_id == "bad" for item in (*plan.decode_rows, *plan.chunks)):
            raise LaunchError("no kernel for this one")

    running.executor.on_launch = refuse
    streams = {name: await running.submit(name) for name in ("a", "bad", "c")}
    results = await asyncio.wait_for(
        asyncio.gather(*(read(stream) for stream in streams.values()), return_exceptions=True), 20
    )
    assert results[0] == results[2] == (list(range(3, 11)), FinishReason.LENGTH)
    assert isinstance(results[1], RequestFailedError)
    assert "no kernel for this one" in results[1].message


async def test_a_launch_that_fails_only_together_costs_nobody(running: RunningCore) -> None:
    def refuse(plan: StepPlan) -> None:
        if len(plan.sampling_request_ids) > 1:
            raise LaunchError("too wide")

    running.executor.on_launch = refuse
    streams = [await running.submit(name) for name in "abc"]
    results = await asyncio.wait_for(asyncio.gather(*map(read, streams)), 20)
    assert results == [(list(range(3, 11)), FinishReason.LENGTH)] * 3


async def test_a_failure_in_a_result_is_that_requests_alone(running: RunningCore) -> None:
    def spoil(plan: StepPlan) -> StepResult | None:
        ids = plan.sampling_request_ids
        if "nan" not in ids or plan.kind is not PlanKind.DECODE:
            return None
        tokens = tuple(row.position + 1 for row in plan.decode_rows)
        return StepResult(plan.step_id, tokens, failures={"nan": OutputError("NaN logits", "nan_logits")})

    running.executor.on_collect = spoil
    nan, other = await running.submit("nan"), await running.submit("other")
    results = await asyncio.wait_for(asyncio.gather(read(nan), read(other), return_exceptions=True), 20)
    assert isinstance(results[0], RequestFailedError)
    assert results[0].code == "nan_logits"
    assert results[1] == (list(range(3, 11)), FinishReason.LENGTH)


@pytest.mark.parametrize("where", ["on_launch", "on_collect"])
async def test_a_lost_device_ends_every_request_and_the_process(running: RunningCore, where: str) -> None:
    all_are_there = threading.Event()  # else the device is lost, and the loop gone, before the last request arrives

    def lose(plan: StepPlan) -> None:
        all_are_there.wait(10)
        if any(row.position > 20 for row in plan.decode_rows):
            raise DeviceLostError("illegal address")

    setattr(running.executor, where, lose)
    streams = [await running.submit(name, max_tokens=200) for name in "abcdef"]
    await eventually(lambda: len(running.io._routes) == len(streams))
    all_are_there.set()
    results = await asyncio.wait_for(asyncio.gather(*map(read, streams), return_exceptions=True), 20)
    assert [type(result) for result in results] == [EngineUnavailableError] * 6
    assert "illegal address" in str(results[0])
    assert await running.wait_exit() == EXIT_DEVICE_LOST


async def test_a_bug_in_the_loop_ends_every_request_and_the_process(running: RunningCore) -> None:
    def fail(plan: StepPlan) -> None:
        if plan.decode_rows:
            raise ZeroDivisionError

    running.executor.on_launch = fail
    stream = await running.submit("a", max_tokens=200)
    with pytest.raises(EngineUnavailableError, match="ZeroDivisionError"):
        await asyncio.wait_for(read(stream), 10)
    assert await running.wait_exit() == EXIT_LOOP_FAILED


async def test_abort_and_finish_free_everything(running: RunningCore) -> None:
    gate = threading.Event()
    running.executor.on_launch = lambda plan: gate.wait(0.01) and None
    aborted, finished = await running.submit("a", 40, 200), await running.submit("b", 40, 200)
    waiting = [await running.submit(f"w{index}", 40, 200) for index in range(6)]
    await asyncio.wait_for(anext(aborted), 10)
    await asyncio.wait_for(anext(finished), 10)
    aborted.abort()
    finished.finish(1)
    for stream in waiting:
        stream.abort()
    await eventually(lambda: running.client.stats.running == 0 and running.client.stats.free_blocks == NUM_BLOCKS)
    assert running.client.stats.waiting == 0


async def test_with_a_pipeline_the_next_step_is_launched_before_the_last_is_read(tmp_path: Path) -> None:
    executor = ScriptedExecutor(pipeline_depth=1)
    running = RunningCore(tmp_path, executor)
    try:
        result = await asyncio.wait_for(read(await running.submit("a", 3, 10)), 10)
        assert result == (list(range(3, 13)), FinishReason.LENGTH)
    finally:
        await running.close()
    launched = [step for event, step in executor.events if event == "launch"]
    for step, following in itertools.pairwise(launched):
        assert executor.events.index(("launch", following)) < executor.events.index(("collect", step))


async def test_idle_has_no_step_limit_and_a_step_has_one(running: RunningCore) -> None:
    await asyncio.wait_for(read(await running.submit("a")), 10)
    await eventually(lambda: running.client.vitals is not None and running.client.vitals.step_limit_s is None)
    release = threading.Event()
    running.executor.on_launch = lambda plan: release.wait(10) and None
    stream = await running.submit("b")
    await eventually(lambda: running.client.vitals is not None and running.client.vitals.step_limit_s is not None)
    vitals = running.client.vitals
    assert vitals is not None
    assert vitals.step_limit_s == 30.0
    stamp, beat = vitals.loop_stamp, vitals.last_beat
    await eventually(lambda: vitals.last_beat > beat)
    assert vitals.loop_stamp == stamp  # beats go on, the loop does not
    release.set()
    await asyncio.wait_for(read(stream), 10)


def test_the_step_limit_follows_the_slowest_step_and_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("runners.step_clock.time.monotonic", lambda: now[0])
    vitals = LoopVitals()
    clock = StepClock(vitals, hung_factor=20.0, hung_min_s=1.0)

    def plan(step_id: int, num_rows: int) -> StepPlan:
        return StepPlan(step_id, PlanKind.DECODE, tuple(DecodeRow(str(row), row, 1) for row in range(num_rows)))

    clock.launch(plan(1, 10))
    assert vitals.step_limit_s == 1.0
    now[0] += 0.5
    clock.complete(1)
    assert vitals.loop_stamp == 100.5
    clock.launch(plan(2, 10))
    assert vitals.step_limit_s == pytest.approx(10.0)
    clock.complete(2)
    clock.launch(plan(3, 40))
    assert vitals.step_limit_s == pytest.approx(40.0, rel=0.01)
    clock.idle()
    assert vitals.step_limit_s is None


async def test_arrivals_are_recorded_as_a_trace(tmp_path):
    recorder = ArrivalRecorder(tmp_path / "arrivals.jsonl")
    running = RunningCore(tmp_path, ScriptedExecutor(), recorder)
    for number in range(2):
        stream = await running.submit(f"r{number}", num_prompt_tokens=3 + number, max_tokens=4)
        async for _ in stream:
            pass
    await running.close()
    recorder.close()
    first, second = read_trace(tmp_path / "arrivals.jsonl")
    assert first == Arrival(0.0, 3, 4)
    assert (second.prompt_tokens, second.output_tokens) == (4, 4)
    assert second.at_s > 0


async def test_bursts_larger_than_the_slots_go_on_when_all_end_in_one_step(tmp_path: Path) -> None:
    """A step ahead, the loop learns only from the last commit that slots are free: it must not sleep on that."""
    running = RunningCore(tmp_path, ScriptedExecutor(pipeline_depth=1))
    try:
        for burst in range(3):
            streams = [await running.submit(f"{burst}-{index}") for index in range(12)]
            results = await asyncio.wait_for(asyncio.gather(*map(read, streams)), 20)
            assert results == [(list(range(3, 11)), FinishReason.LENGTH)] * 12
    finally:
        await running.close()
