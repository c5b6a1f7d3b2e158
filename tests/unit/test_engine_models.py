"""Several models in the engine's loop: turns, shared blocks, quota and unloading while requests run."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runners.errors import EngineUnavailableError, InvalidRequestError, ModelNotFoundError
from runners.execution.executor import Capabilities, Executor, StepResult
from runners.messages import SetQuota, UnloadModel
from runners.request import FinishReason
from runners.scheduling.scheduler_output import StepPlan
from tests.support.eventually import eventually
from tests.support.running_models import RunningModels, read

NUM_BLOCKS = 40


class SlowExecutor(Executor):
    """A step takes `step_s`; a token is the position it stands at, plus `offset`."""

    def __init__(self, offset: int, depth: int = 0) -> None:
        self.step_s = 0.0
        self.num_steps = 0
        self.is_closed = False
        self._offset = offset
        self._depth = depth
        self._in_flight: deque[StepPlan] = deque()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(pipeline_depth=self._depth)

    def launch(self, plan: StepPlan) -> None:
        time.sleep(self.step_s)
        self.num_steps += 1
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self._in_flight.popleft()
        ends = [row.position + 1 for row in plan.decode_rows] + [chunk.end for chunk in plan.chunks if chunk.samples]
        return StepResult(plan.step_id, tuple(end + self._offset for end in ends))

    def is_ready(self) -> bool:
        return bool(self._in_flight)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(params=[(0, 0), (1, 0), (1, 1)], ids=["blocking", "one-ahead", "ahead"])
async def running(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RunningModels]:
    executors = [SlowExecutor(1000 * index, depth) for index, depth in enumerate(request.param)]
    running = RunningModels(tmp_path, executors, NUM_BLOCKS)
    yield running
    await running.close()
    running.check_pool()


def expected(model: str, num_prompt: int, max_tokens: int) -> tuple[list[int], FinishReason]:
    start = num_prompt + 1000 * int(model)
    return list(range(start, start + max_tokens)), FinishReason.LENGTH


async def at_rest(running: RunningModels) -> None:
    await eventually(lambda: running.client.stats.running == 0 and running.client.stats.waiting == 0)
    await eventually(lambda: all(cache.num_used == 0 for cache in running.caches()))


async def test_each_request_gets_the_tokens_of_its_model(running: RunningModels) -> None:
    """Far more than fit: models wait for each other's blocks, and everyone ends."""
    cases = [(str(index % 2), 20 + 7 * index, 60 + index) for index in range(16)]
    streams = [
        await running.submit(model, f"r{index}", range(100 * index, 100 * index + length), count)
        for index, (model, length, count) in enumerate(cases)
    ]
    results = await asyncio.wait_for(asyncio.gather(*map(read, streams)), 30)
    assert results == [expected(*case) for case in cases]
    await at_rest(running)
    running.check_pool()
    assert running.client.model_stats.keys() == {"0", "1"}
    await eventually(lambda: running.client.stats.generation_tokens == sum(count for _, _, count in cases))


async def test_a_request_that_needs_nearly_all_blocks_is_served_beside_a_busy_model(running: RunningModels) -> None:
    is_over = False

    async def busy(number: int) -> int:
        turn = 0
        while not is_over:
            turn += 1
            stream = await running.submit(
                "0", f"busy-{number}-{turn}", range(1000 * number + turn, 1000 * number + turn + 60), 40
            )
            assert len((await read(stream))[0]) == 40
        return turn

    clients = [asyncio.create_task(busy(number)) for number in range(8)]
    await eventually(lambda: running.client.stats.running >= 4)
    large = await running.submit("1", "large", range(200), 40)
    assert await asyncio.wait_for(read(large), 30) == expected("1", 200, 40)
    is_over = True
    assert min(await asyncio.wait_for(asyncio.gather(*clients), 30)) > 0
    await at_rest(running)


async def test_a_quota_lowered_below_use_costs_nobody_a_token(running: RunningModels) -> None:
    for model in running.models:
        model.executor.step_s = 0.001  # type: ignore[attr-defined]
    streams = {
        model: [
            await running.submit(model, f"{model}-{index}", range(50 * index, 50 * index + 30), 90)
            for index in range(4)
        ]
        for model in ("0", "1")
    }
    firsts = [await asyncio.wait_for(anext(stream), 10) for stream in (*streams["0"], *streams["1"])]
    cache = running.caches()[1]
    await running.client.admin.ask(lambda query_id: SetQuota(query_id, "1", 8))
    assert running.client.model_stats["1"].total_blocks == 8
    results = await asyncio.wait_for(asyncio.gather(*map(read, (*streams["0"], *streams["1"]))), 30)
    for first, (ids, reason), model in zip(firsts, results, ["0"] * 4 + ["1"] * 4, strict=True):
        assert (first.token_ids + ids, reason) == expected(model, 30, 90)
    await at_rest(running)
    await eventually(lambda: running.client.model_stats["1"].preemptions > 0)
    assert running.models[0].scheduler.stats().preemptions == 0
    assert cache.pool.num_out <= 8
    running.check_pool()
    with pytest.raises(InvalidRequestError, match="quota"):
        await running.client.admin.ask(lambda query_id: SetQuota(query_id, "1", NUM_BLOCKS + 1))
    await running.client.admin.ask(lambda query_id: SetQuota(query_id, "1", None))
    assert running.client.model_stats["1"].total_blocks == NUM_BLOCKS


async def test_requests_in_flight_end_whole_before_a_model_is_unloaded(running: RunningModels) -> None:
    running.models[1].executor.step_s = 0.002  # type: ignore[attr-defined]
    before = [await running.submit(model, f"before-{model}", range(40), 50) for model in ("0", "1")]
    waiting = [await running.submit("1", f"waiting-{index}", range(30 + index), 20) for index in range(6)]
    await asyncio.wait_for(anext(before[1]), 10)
    unloading = asyncio.create_task(
        running.client.admin.ask(lambda query_id: UnloadModel(query_id, "1", time.monotonic() + 60))
    )
    await eventually(lambda: [len(models) for models in running.announced] == [1])
    with pytest.raises(ModelNotFoundError, match="unloaded"):
        await asyncio.wait_for(read(await running.submit("1", "late", range(5), 5)), 10)
    assert await asyncio.wait_for(read(before[0]), 10) == expected("0", 40, 50)
    assert (await asyncio.wait_for(read(before[1]), 10))[1] is FinishReason.LENGTH
    for index, stream in enumerate(waiting):
        assert await asyncio.wait_for(read(stream), 10) == expected("1", 30 + index, 20)
    await asyncio.wait_for(unloading, 10)
    assert running.client.model_stats.keys() == {"0"}
    assert running.caches()[1].pool.num_out == 0
    with pytest.raises(ModelNotFoundError):
        await asyncio.wait_for(read(await running.submit("1", "later", range(5), 5)), 10)
    assert await read(await running.submit("0", "other", range(100, 110), 5)) == expected("0", 10, 5)
    with pytest.raises(ModelNotFoundError):
        await running.client.admin.ask(lambda query_id: UnloadModel(query_id, "1", 0.0))


async def test_at_the_deadline_what_is_left_ends_with_an_error(running: RunningModels) -> None:
    running.models[1].executor.step_s = 0.005  # type: ignore[attr-defined]
    streams = [await running.submit("1", f"r{index}", range(20 + index), 200) for index in range(7)]
    await asyncio.wait_for(anext(streams[0]), 10)
    await asyncio.wait_for(
        running.client.admin.ask(lambda query_id: UnloadModel(query_id, "1", time.monotonic() + 0.05)), 10
    )
    for stream in streams:
        with pytest.raises(EngineUnavailableError, match="was unloaded"):
            await asyncio.wait_for(read(stream), 10)
    assert running.client.num_open_streams == 0
    assert running.caches()[1].pool.num_out == 0
    running.check_pool()


async def test_a_conversation_of_one_model_gives_its_blocks_to_another(running: RunningModels) -> None:
    chat = await running.submit("0", "chat", range(200), 30, session_id="s")
    assert (await asyncio.wait_for(read(chat), 10))[1] is FinishReason.LENGTH
    assert running.caches()[0].sessions.num_pinned_blocks > 0
    large = [
        await running.submit("1", f"large-{index}", range(900 * index, 900 * index + 200), 50) for index in range(2)
    ]
    for result in await asyncio.wait_for(asyncio.gather(*map(read, large)), 10):
        assert result == expected("1", 200, 50)
    again = await running.submit("0", "again", [*range(200), *range(200, 230), 5], 10, session_id="s")
    assert (await asyncio.wait_for(read(again), 10))[0] == list(range(231, 241))
    await running.client.sessions("0", "s", delete=True)
    await at_rest(running)
