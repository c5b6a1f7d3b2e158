"""Steps on their way to whoever watches: a real loop, I/O thread and client; nothing while nobody does."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from configs.schema import AdmissionSection, Profile
from runners.engine_client import EngineClient
from runners.engine_core import EngineCore
from runners.engine_io import EngineIO
from runners.engine_startup import LoadedModel
from runners.engine_state import EnginePhase
from runners.execution.cost_model import CostModel
from runners.execution.simulated import RealTimeClock, SimulatedExecutor
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import Shutdown, StepsReport
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import PlanKind
from runners.telemetry.step_observer import StepObserver
from runners.telemetry.trace_file import TraceFile
from tests.support.eventually import eventually
from tests.support.scripted_engine import model_info
from tests.support.trace_format import check_format

SLOTS = 4


class WatchedEngine:
    """A loop on its own thread, with steps of 2 ms."""

    def __init__(self, folder: Path, trace: TraceFile | None = None) -> None:
        executor = SimulatedExecutor(CostModel.constant(0.002), RealTimeClock())
        profile = Profile(admission=AdmissionSection(cold_window_us=0, cold_silence_us=0))
        limits = SchedulerLimits(max_context=512, slots=SLOTS)
        scheduler = Scheduler(profile, executor.capabilities, CacheManager(128, 16), limits)
        self.io = EngineIO(folder / "e.sock", beat_interval_s=0.05)
        self.core = EngineCore(self.io, [LoadedModel(scheduler, executor, model_info(name="m"))], trace=trace)
        self.client = EngineClient(slots=SLOTS, max_queued_requests=100, beat_limit_s=30.0)
        self.reports: list[StepsReport] = []
        self.client.on_steps = self.reports.append
        self._thread = threading.Thread(target=self.core.run, daemon=True)
        self.io.start()
        self.client.attach(f"ipc://{folder / 'e.sock'}")
        self.client.set_state(EnginePhase.READY)
        self._thread.start()

    async def watch(self, is_on: bool) -> None:
        self.client.watch_steps(is_on)
        await eventually(lambda: self.io.is_watched == is_on)

    async def generate(self, request_id: str, max_tokens: int, num_prompt_tokens: int = 20) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompt = [ord(request_id), *range(num_prompt_tokens - 1)]  # no two begin alike: nothing comes from the cache
        stream = await self.client.submit("m", prompt, params, request_id=request_id)
        async for _ in stream:
            pass

    async def close(self) -> None:
        self.client.send(Shutdown())
        await asyncio.to_thread(self._thread.join, 10)
        self.client.detach()
        self.io.stop()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[WatchedEngine]:
    engine = WatchedEngine(tmp_path)
    yield engine
    await engine.close()


async def test_a_watcher_sees_every_step_in_order(engine: WatchedEngine) -> None:
    await engine.watch(True)
    await asyncio.gather(*(engine.generate(name, max_tokens=30) for name in "abc"))
    await eventually(lambda: engine.reports and engine.reports[-1].stats.running == 0)
    steps = [step for report in engine.reports for step in report.steps]
    assert sum(bin(int(step.decode_slots, 16)).count("1") for step in steps) == 3 * 29  # the prompt gives the first
    assert sum(tokens for step in steps for _, tokens in step.chunks) == 3 * 20
    assert [step.step_id for step in steps] == sorted(step.step_id for step in steps)
    assert all(before.end <= after.start for before, after in itertools.pairwise(steps))
    assert all(step.start < step.end <= engine.reports[-1].time for step in steps)
    assert {step.kind for step in steps} <= set(PlanKind)
    assert len(engine.reports) >= 2, "reports come while the work goes on, too"
    last = engine.reports[-1]
    assert (last.model, last.slots, last.skipped) == ("m", [], 0)
    assert last.stats.generation_tokens == 90


async def test_slots_are_told_as_counts(engine: WatchedEngine) -> None:
    await engine.watch(True)
    await engine.generate("a", max_tokens=60, num_prompt_tokens=20)
    facts = [fact for report in engine.reports for fact in report.slots]
    assert {(fact.slot, fact.prompt_tokens, fact.max_tokens) for fact in facts} == {(0, 20, 60)}
    decoding = [fact for fact in facts if fact.decodes]
    assert all(fact.computed_prompt_tokens == 20 for fact in decoding)
    generated = [fact.generated_tokens for fact in decoding]
    assert generated == sorted(generated)
    assert 0 < generated[-1] <= 60


async def test_nobody_watches_nothing_is_gathered_or_sent(
    engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = []
    monkeypatch.setattr(StepObserver, "flush", lambda self, now: flushes.append(now))
    await engine.generate("a", max_tokens=20)
    assert flushes == []
    assert engine.reports == []


async def test_who_stops_watching_hears_no_more(engine: WatchedEngine) -> None:
    await engine.watch(True)
    await engine.generate("a", max_tokens=20)
    await eventually(lambda: bool(engine.reports))
    await engine.watch(False)
    await engine.generate("b", max_tokens=1)  # what was under way has arrived
    engine.reports.clear()
    await engine.generate("c", max_tokens=40)
    assert engine.reports == []


async def test_a_new_engine_is_told_that_somebody_watches(engine: WatchedEngine, tmp_path: Path) -> None:
    await engine.watch(True)
    folder = tmp_path / "next"
    folder.mkdir()
    successor = EngineIO(folder / "e.sock", beat_interval_s=0.05)
    successor.start()
    try:
        engine.client.attach(f"ipc://{folder / 'e.sock'}")
        await eventually(lambda: successor.is_watched)
    finally:
        engine.client.detach()
        successor.stop()
        engine.client.attach(f"ipc://{tmp_path / 'e.sock'}")


async def test_a_trace_of_a_running_loop(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path, 1 << 24, wants_emissions=True)
    engine = WatchedEngine(tmp_path, trace)
    try:
        await asyncio.gather(*(engine.generate(name, max_tokens=40) for name in "abcdef"))
    finally:
        await engine.close()
        trace.close()
    events = json.loads(path.read_text())
    check_format(events)
    assert {"admit", "launch", "sync", "read", "emit"} <= {event["name"] for event in events if event["ph"] == "X"}
    assert sum(event["args"]["tokens"] for event in events if event["ph"] == "i") == 6 * 40
    spans = [event["args"] for event in events if event["ph"] == "X" and event["name"] == "decode"]
    decoded = [facts["tokens"] for facts in spans if "request" in facts]
    assert sum(decoded) == 6 * 39, "every token but the prompt's is in a slot's slice"
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"loop phases", "decode steps", "slot 0", "slot 3"} <= names
