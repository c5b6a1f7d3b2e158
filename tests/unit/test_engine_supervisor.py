"""Real engine processes on the simulated executor: started, killed, stopped, hung, restarted, drained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from configs.loader import load_profile
from runners.engine_client import EngineClient
from runners.engine_state import EnginePhase
from runners.engine_supervisor import EngineSupervisor
from runners.errors import EngineUnavailableError, StartupError
from runners.messages import ModelInfo
from runners.request import FinishReason, SamplingParams
from runners.request_stream import RequestStream
from tests.support.eventually import eventually

START_LIMIT_S = 60.0
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


class Supervised:
    """A supervisor and its client, with settings given as the profile's environment variables."""

    def __init__(self, folder: Path, **settings: str) -> None:
        env = {
            "WAVELANE_ENGINE__EXECUTOR": "simulated",
            "WAVELANE_MODELS__0__SOURCE": str(folder),
            "WAVELANE_MODELS__0__SERVED_NAMES": "[m]",
            "WAVELANE_WATCHDOG__RESTART_BACKOFF_S": "0.1",
            **{f"WAVELANE_{name.upper()}": value for name, value in settings.items()},
        }
        self.resolved = load_profile(None, env, has_gpu=False)
        self.client = EngineClient(
            slots=16, max_queued_requests=100, beat_limit_s=self.resolved.profile.watchdog.beat_s
        )
        self.announced: list[ModelInfo] = []
        self.text_error: StartupError | None = None
        self.supervisor = EngineSupervisor(self.resolved, self.client, self._on_ready)
        self.supervisor.start()

    async def _on_ready(self, models: list[ModelInfo]) -> None:
        if self.text_error is not None:
            raise self.text_error
        self.announced += models

    async def ready(self) -> int:
        """Wait for it; the engine's pid."""
        await eventually(lambda: self.client.is_ready, START_LIMIT_S)
        assert self.supervisor.engine_pid is not None
        return self.supervisor.engine_pid

    async def submit(self, request_id: str, params: SamplingParams = LONG) -> RequestStream:
        return await self.client.submit("m", [1, 2, 3], params, request_id=request_id)

    async def started(self, request_id: str) -> RequestStream:
        """A long request with its first token read."""
        stream = await self.submit(request_id)
        await asyncio.wait_for(anext(stream), 10)
        return stream


@contextlib.asynccontextmanager
async def supervised(folder: Path, **settings: str) -> AsyncIterator[Supervised]:
    running = Supervised(folder, **settings)
    try:
        yield running
    finally:
        pid = running.supervisor.engine_pid
        running.client.fail_streams(EngineUnavailableError("the test is over"))
        await running.supervisor.stop()
        assert pid is None or not psutil.pid_exists(pid)


async def drain_stream(stream: RequestStream) -> tuple[int, FinishReason | None]:
    count, reason = 0, None
    async for chunk in stream:
        count += len(chunk.token_ids)
        reason = chunk.finish_reason
    return count, reason


async def assert_serves(running: Supervised, request_id: str) -> None:
    stream = await running.submit(request_id, SamplingParams(max_tokens=5, ignore_eos=True))
    assert await asyncio.wait_for(drain_stream(stream), 10) == (5, FinishReason.LENGTH)


async def test_it_starts_serves_and_stops(tmp_path: Path) -> None:
    async with supervised(tmp_path) as running:
        assert running.client.state.phase is EnginePhase.STARTING
        pid = await running.ready()
        assert [info.served_names for info in running.announced] == [["m"]]
        assert running.client.models == running.announced
        await eventually(lambda: running.client.stats.free_blocks == running.client.models[0].total_blocks)
        await assert_serves(running, "a")
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        await assert_serves(running, "b")
        process = running.supervisor._process
        await running.supervisor.stop()
        assert process is not None
        assert process.exit_status == 0
        assert running.client.state.phase is EnginePhase.DRAINING


async def test_a_killed_engine_fails_its_streams_at_once_and_comes_back(tmp_path: Path) -> None:
    async with supervised(tmp_path) as running:
        pid = await running.ready()
        streams = [await running.started(name) for name in "abc"]
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*map(drain_stream, streams), return_exceptions=True), 5)
        assert [type(result) for result in results] == [EngineUnavailableError] * 3
        assert not running.client.is_ready
        assert running.client.state.phase is EnginePhase.RESTARTING
        with pytest.raises(EngineUnavailableError, match="killed by signal 9"):
            await running.submit("d")
        assert await running.ready() != pid
        assert running.client.restarts == 1
        await assert_serves(running, "e")


async def test_a_stopped_engine_is_killed_and_comes_back(tmp_path: Path) -> None:
    async with supervised(tmp_path, watchdog__beat_s="2.0") as running:
        pid = await running.ready()
        stream = await running.started("a")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailableError, match="no sign of life"):
            await asyncio.wait_for(drain_stream(stream), 10)
        assert not running.client.is_ready
        assert await running.ready() != pid
        assert not psutil.pid_exists(pid)
        await assert_serves(running, "b")


async def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    """The I/O thread still beats; the loop's stamp gives it away."""
    async with supervised(tmp_path, simulated__step_us="60000000", watchdog__hung_min_s="0.3") as running:
        pid = await running.ready()
        stream = await running.submit("a")
        with pytest.raises(EngineUnavailableError, match="a step takes longer"):
            await asyncio.wait_for(drain_stream(stream), 15)
        assert await running.ready() != pid


async def test_a_start_up_that_fails_says_why_and_is_not_tried_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, models__0__source=str(tmp_path / "nowhere")) as running:
        await eventually(lambda: running.client.state.phase is EnginePhase.FAILED, START_LIMIT_S)
        assert "nowhere: no such file or folder" in running.client.state.detail
        process = running.supervisor._process
        assert process is not None
        await eventually(lambda: process.exit_status is not None)
        with pytest.raises(EngineUnavailableError, match="nowhere"):
            await running.submit("a")
        assert running.client.restarts == 0


async def test_a_tokenizer_that_fails_to_load_is_a_failed_start_up(tmp_path: Path) -> None:
    async with supervised(tmp_path) as running:
        running.text_error = StartupError("tokenizer.json: not JSON")
        await eventually(lambda: running.client.state.phase is EnginePhase.FAILED, START_LIMIT_S)
        assert running.client.state.detail == "tokenizer.json: not JSON"


async def test_a_crash_before_ready_is_tried_again(tmp_path: Path) -> None:
    async with supervised(tmp_path) as running:
        assert running.supervisor.engine_pid is not None
        os.kill(running.supervisor.engine_pid, signal.SIGKILL)
        await running.ready()
        assert running.client.restarts == 1


async def test_a_drain_lets_streams_finish(tmp_path: Path) -> None:
    async with supervised(tmp_path) as running:
        await running.ready()
        stream = await running.submit("a", SamplingParams(max_tokens=300, ignore_eos=True))
        drain = asyncio.create_task(running.supervisor.drain())
        await asyncio.sleep(0)
        assert not running.client.is_ready
        with pytest.raises(EngineUnavailableError, match="draining"):
            await running.submit("b")
        assert await asyncio.wait_for(drain_stream(stream), 10) == (300, FinishReason.LENGTH)
        await asyncio.wait_for(drain, 10)


async def test_a_drain_has_a_deadline(tmp_path: Path) -> None:
    async with supervised(tmp_path, http__drain_deadline_s="0.2", simulated__step_us="20000") as running:
        await running.ready()
        stream = await running.started("a")
        await asyncio.wait_for(running.supervisor.drain(), 10)
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await drain_stream(stream)


async def test_an_engine_that_dies_while_draining_stays_dead(tmp_path: Path) -> None:
    async with supervised(tmp_path, simulated__step_us="20000") as running:
        pid = await running.ready()
        stream = await running.started("a")
        drain = asyncio.create_task(running.supervisor.drain())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError):
            await asyncio.wait_for(drain_stream(stream), 5)
        await asyncio.wait_for(drain, 10)
        await asyncio.sleep(0.3)  # three times the back-off
        assert running.client.restarts == 0


async def test_a_busy_front_end_does_not_kill_its_engine(tmp_path: Path) -> None:
    """Beats wait unread in the socket while this process does not look: that is no fault of the engine."""
    async with supervised(tmp_path, watchdog__beat_s="1.5") as running:
        pid = await running.ready()
        time.sleep(2.5)  # noqa: ASYNC251 -- blocking the loop is the point
        await asyncio.sleep(0.5)
        assert await running.ready() == pid
        assert running.client.restarts == 0


_PARENT = """
import asyncio, sys
from pathlib import Path
from tests.unit.test_engine_supervisor import Supervised

async def main():
    running = Supervised(Path(sys.argv[1]))
    await running.ready()
    await running.started("a")
    print(running.supervisor.engine_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_engine_outlives_its_parent(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE, cwd=root, env={**os.environ}
    ) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        _, alive = psutil.wait_procs([engine], timeout=10)
        assert not alive
