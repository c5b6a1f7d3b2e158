"""Several models in one engine loop on its own thread, and a client on the test's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from configs.schema import AdmissionSection, Profile
from runners.engine_client import EngineClient
from runners.engine_core import EngineCore
from runners.engine_io import EngineIO
from runners.engine_startup import LoadedModel
from runners.engine_state import EnginePhase
from runners.execution.executor import Executor
from runners.kv_cache.block_pool import free_list
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.kv_budget import KvBudget
from runners.messages import ModelInfo, Ready, Shutdown
from runners.request import FinishReason, SamplingParams
from runners.request_stream import RequestStream
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from tests.support.block_accounts import joint_free_list_is_exact
from tests.support.scripted_engine import model_info

BLOCK_TOKENS = 16


class RunningModels:
    """Models "0", "1", … on one shared pool of `num_blocks`; every invariant is checked after every call."""

    def __init__(
        self, folder: Path, executors: Sequence[Executor], num_blocks: int, *, slots: int = 4, max_context: int = 256
    ) -> None:
        self.num_blocks = num_blocks
        self.free = free_list(num_blocks)
        self.budget = KvBudget(num_blocks)
        profile = Profile(admission=AdmissionSection(cold_window_us=0, cold_silence_us=0))
        self.models: list[LoadedModel] = []
        for index, executor in enumerate(executors):
            cache = CacheManager(num_blocks, BLOCK_TOKENS, free=self.free, budgets=[self.budget])
            limits = SchedulerLimits(max_context=max_context, slots=slots)
            scheduler = Scheduler(profile, executor.capabilities, cache, limits, check=True)
            self.models.append(LoadedModel(scheduler, executor, model_info(name=str(index))))
        self.io = EngineIO(folder / "e.sock", beat_interval_s=0.05)
        self.core = EngineCore(self.io, self.models)
        self.announced: list[list[ModelInfo]] = []
        self.client = EngineClient(slots=slots, max_queued_requests=1000, beat_limit_s=60.0)
        self.client.on_announcement = lambda message: (
            self.announced.append(message.models) if isinstance(message, Ready) else None
        )
        self.exit_status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.io.start()
        self.client.attach(f"ipc://{folder / 'e.sock'}")
        self.client.set_state(EnginePhase.READY)
        self._thread.start()

    def _run(self) -> None:
        self.exit_status = self.core.run()

    async def submit(
        self, model: str, request_id: str, prompt: Sequence[int], max_tokens: int, session_id: str | None = None
    ) -> RequestStream:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return await self.client.submit(model, list(prompt), params, request_id=request_id, session_id=session_id)

    def caches(self) -> list[CacheManager]:
        return [model.scheduler.cache for model in self.models]

    def check_pool(self) -> None:
        """Every block is free or out of exactly one model. Only while the loop rests."""
        self.budget.check_invariants()
        assert joint_free_list_is_exact(self.num_blocks, self.free, self.caches())

    async def close(self) -> None:
        self.client.send(Shutdown())
        await asyncio.to_thread(self._thread.join, 10)
        self.client.detach()
        self.io.stop()
        assert self.exit_status is not None


async def read(stream: RequestStream) -> tuple[list[int], FinishReason | None]:
    """All ids of a stream and why it ended."""
    ids: list[int] = []
    reason = None
    async for chunk in stream:
        ids += chunk.token_ids
        reason = chunk.finish_reason
    return ids, reason
