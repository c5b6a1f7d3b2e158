"""From a profile to running models: resolve the source, load weights, place them in a KV pool, warm up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from configs.schema import ModelSection, Profile
from runners.engine_settings import EngineSettings
from runners.execution.cost_model import CostModel
from runners.execution.executor import Executor
from runners.execution.simulated import RealTimeClock, SimulatedExecutor
from runners.grammar.compiler import GrammarCompiler
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.kv_budget import KvBudget
from runners.kv_cache.pools import EnginePools, Pool, PoolNeed
from runners.kv_cache.sizing import DeviceMemory, PoolSize, format_bytes, kv_block_bytes, size_pool
from runners.messages import ModelInfo
from runners.model_names import check_names
from runners.model_preparation import PreparedModel, Report, prepare_simulated, prepare_torch, use_cores
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import BlockAppend, DecodeRow, PlanKind, PrefillChunk, SlotInit, StepPlan
from runners.startup_checks import context_in_pool

if TYPE_CHECKING:
    from runners.execution.device_streams import CudaStreams
    from runners.models.decoder import Decoder

logger = logging.getLogger("runners.engine_startup")

Placement = tuple[Pool, Sequence[KvBudget], PoolNeed]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One model, ready to serve."""

    scheduler: Scheduler
    executor: Executor
    info: ModelInfo
    grammars: GrammarCompiler | None = None

    @property
    def name(self) -> str:
        return self.info.served_names[0]


class ModelLoader:
    """Loads the models of one engine process onto its device. Raises StartupError, one line, when a file or setting is
    at fault."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._profile = settings.profile
        self._is_simulated = settings.profile.engine.executor == "simulated"
        self._pools: EnginePools | None = None
        self._streams: CudaStreams | None = None
        self._is_serving = False

    def load_all(self, report: Report) -> list[LoadedModel]:
        """Every model of the settings: weights of all first, so that their pools share what is left."""
        check_names(self._settings.models)
        if not self._is_simulated:
            use_cores(self._profile)
        prepared = [self.prepare(model, report) for model in self._settings.models]
        loaded = []
        for index, model in enumerate(prepared):
            report("warming", model.info.served_names[0], None)
            loaded.append(self.finish(model, prepared[index + 1 :]))
        self._is_serving = True
        return loaded

    def prepare(self, model: ModelSection, report: Report) -> PreparedModel:
        """Files and weights: what takes long, on whatever thread."""
        if self._is_simulated:
            return prepare_simulated(self._profile, model, report)
        return prepare_torch(self._profile, model, report)

    def finish(self, prepared: PreparedModel, later: Sequence[PreparedModel] = ()) -> LoadedModel:
        """Pool, executor, first steps; on the loop's thread. `later` are the models that come in the same go."""
        profile = self._profile
        decoder, info = prepared.decoder, prepared.info
        is_lazy = decoder is not None and decoder.device.type == "cpu"
        if self._pools is None:
            self._pools = EnginePools(share=profile.kv.share_pool, is_lazy=is_lazy)
        try:
            if decoder is None:
                pool, budgets, own = self._place(prepared, later, None)
                executor: Executor = _make_simulated_executor(profile)
            elif info.executor == "cuda":
                executor, (pool, budgets, own) = self._make_cuda_executor(prepared, decoder, later)
            else:
                executor, (pool, budgets, own) = self._make_torch_executor(prepared, decoder, later)
            loaded = _assemble(profile, prepared, executor, pool, budgets, own)
            if decoder is not None:
                _warm_up(executor)
        except BaseException:
            # Also an interrupt: the other models go on, and their pool must not count one that is not there.
            self._pools.leave(info.served_names[0])
            raise
        _report_loaded(loaded.info, self._settings.profile_name)
        return loaded

    def unload(self, model: LoadedModel) -> int:
        """Free everything; returns how many KV blocks nobody gave back. Nothing may be in flight."""
        model.executor.close()
        if model.grammars is not None:
            model.grammars.close()
        num_lost = model.scheduler.cache.close()
        if self._pools is not None:
            self._pools.leave(model.name)
        return num_lost

    def _place(self, prepared: PreparedModel, later: Sequence[PreparedModel], memory: DeviceMemory | None) -> Placement:
        assert self._pools is not None
        need = _need(self._profile, prepared, memory)
        pool, budgets = self._pools.place(need, [_need(self._profile, other, memory) for other in later])
        return pool, budgets, need

    def _make_torch_executor(
        self, prepared: PreparedModel, decoder: Decoder, later: Sequence[PreparedModel]
    ) -> tuple[Executor, Placement]:
        from runners.execution.torch_executor import TorchExecutor
        from runners.kv_cache.device_cache import DeviceCache, device_memory

        info = prepared.info
        placement = self._place(prepared, later, device_memory(decoder.device))
        pool = placement[0]
        cache = DeviceCache(
            decoder.config, pool.size.num_blocks, info.block_tokens, decoder.dtype, decoder.device, pool.storage
        )
        pool.storage = cache.pool
        executor = TorchExecutor(
            decoder,
            cache,
            slots=info.slots,
            max_context=info.max_context,
            eos_token_ids=info.eos_token_ids,
            grammars=prepared.grammars,
        )
        return executor, placement

    def _make_cuda_executor(
        self, prepared: PreparedModel, decoder: Decoder, later: Sequence[PreparedModel]
    ) -> tuple[Executor, Placement]:
        import torch

        from runners.execution.cuda_loading import load_cuda_executor
        from runners.execution.device_streams import CudaStreams
        from runners.kv_cache.device_cache import DeviceCache

        profile, info = self._profile, prepared.info
        # A prompt without cursor goes in one pass; waves and mixed steps have budgets of their own.
        longest_prompt = min(info.max_context, profile.chunk.tokens or profile.wave.max_rows, profile.wave.max_rows)
        wave_tokens = min(profile.wave.sub_wave * profile.wave.max_prompt_tokens, profile.wave.max_rows)
        placements: list[Placement] = []

        def size_pool_for(memory: DeviceMemory) -> PoolSize:
            placements.append(self._place(prepared, later, memory))
            return placements[0][0].size

        def make_cache(size: PoolSize) -> DeviceCache:
            pool = placements[0][0]
            cache = DeviceCache(
                decoder.config, size.num_blocks, size.block_tokens, decoder.dtype, decoder.device, pool.storage
            )
            pool.storage = cache.pool
            torch.cuda.synchronize(decoder.device)  # weights and pool were written on whatever stream made them
            return cache

        if self._streams is None:
            # One for all models: a block that one gives up is another's to write only in the order of one stream.
            self._streams = CudaStreams(decoder.device)
        executor, _ = load_cuda_executor(
            decoder,
            size_pool_for,
            streams=self._streams,
            make_cache=make_cache,
            slots=info.slots,
            max_context=info.max_context,
            max_step_tokens=max(longest_prompt, wave_tokens, profile.mix.token_budget + info.slots),
            eos_token_ids=info.eos_token_ids,
            grammars=prepared.grammars,
            # Of a model that comes later, while others serve, graphs are captured as they are needed.
            capture_at_start=profile.decode.capture_at_start == "common" and not self._is_serving,
            batch_invariant=profile.decode.batch_invariant,
        )
        return executor, placements[0]


def _report_loaded(info: ModelInfo, profile_name: str) -> None:
    logger.info(
        "model %s (%s, %s, %.0fM parameters, %s of weights), profile %s, device %s, executor %s, "
        "KV %s = %d blocks of %d tokens = %.1f sequences of %d tokens",
        *(info.served_names[0], info.architecture, info.quantization, info.parameters / 1e6),
        *(format_bytes(info.weight_bytes), profile_name, info.device, info.executor),
        *(format_bytes(info.kv_bytes), info.total_blocks, info.block_tokens, info.peak_concurrency, info.max_context),
    )


def _need(profile: Profile, prepared: PreparedModel, memory: DeviceMemory | None) -> PoolNeed:
    """The pool that a model would have alone, and what its blocks must have in common with another's to be shared."""
    decoder, info, kv = prepared.decoder, prepared.info, profile.kv
    counts_for_all = kv.pool.bytes is not None or kv.pool.gpu_fraction is not None
    if decoder is None:
        own = _size_simulated_pool(profile, info.max_context)
        return PoolNeed(info.served_names[0], ("simulated",), own, counts_for_all=False)
    block_bytes = kv_block_bytes(decoder.config, kv.block_tokens, decoder.dtype.itemsize)
    own = size_pool(
        block_bytes=block_bytes,
        block_tokens=kv.block_tokens,
        max_context=info.max_context,
        memory=memory,
        **kv.pool.model_dump(),
    )
    return PoolNeed(info.served_names[0], (block_bytes, info.dtype), own, counts_for_all)


def _make_simulated_executor(profile: Profile) -> SimulatedExecutor:
    settings = profile.simulated
    if settings.cost_model is not None:
        cost_model = CostModel.load(Path(settings.cost_model))
    else:
        cost_model = CostModel.constant(settings.step_us / 1e6)
    return SimulatedExecutor(cost_model, RealTimeClock(), vocab_size=settings.vocab_size)


def _size_simulated_pool(profile: Profile, max_context: int) -> PoolSize:
    """Blocks and sequences count as they stand; where bytes would decide, every slot gets a whole context."""
    pool = profile.kv.pool
    sequences = pool.sequences if pool.blocks is None else None
    if pool.blocks is None and sequences is None:
        sequences = profile.engine.slots
    return size_pool(
        block_bytes=1,  # for the account of what several models hold
        block_tokens=profile.kv.block_tokens,
        max_context=max_context,
        blocks=pool.blocks,
        sequences=sequences,
    )


def _warm_up(executor: Executor) -> None:
    """A prompt and a decode step in slot 0 and block 0, which nobody owns yet: first calls fill caches."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompt = (1, 2, 3, 4)
    executor.launch(
        StepPlan(
            step_id=-2,
            kind=PlanKind.CHUNK,
            chunks=(PrefillChunk("warm-up", 0, 0, prompt, samples=True),),
            slot_inits=(SlotInit(0, "warm-up", sampling, prompt, len(prompt)),),
            block_appends=(BlockAppend(0, 0, (0,)),),
        )
    )
    executor.collect()
    row = DecodeRow("warm-up", 0, len(prompt))
    executor.launch(StepPlan(step_id=-1, kind=PlanKind.DECODE, decode_rows=(row,), width=1))
    executor.collect()


def _assemble(
    profile: Profile,
    prepared: PreparedModel,
    executor: Executor,
    pool: Pool,
    budgets: Sequence[KvBudget],
    need: PoolNeed,
) -> LoadedModel:
    info, model = prepared.info, prepared.section
    total_blocks = pool.size.num_blocks
    quota = model.quota_blocks or profile.kv.quota_blocks
    usable_blocks = min(total_blocks if need.counts_for_all else need.own.num_blocks, quota or total_blocks)
    max_context = context_in_pool(model.max_context, info.max_context, usable_blocks, info.block_tokens)
    info = msgspec.structs.replace(
        info,
        max_context=max_context,
        total_blocks=total_blocks,
        kv_bytes=0 if prepared.decoder is None else pool.size.pool_bytes,
        peak_concurrency=total_blocks / -(-max_context // info.block_tokens),
    )
    cache = CacheManager(
        total_blocks,
        info.block_tokens,
        prefix_cache=profile.kv.prefix_cache,
        shared_by_keys=profile.kv.prefix_cache_scope == "server",
        session_ttl_s=profile.kv.session_ttl_s,
        quota_blocks=None if quota is None else min(quota, total_blocks),
        free=pool.free,
        budgets=budgets,
        block_bytes=pool.size.block_bytes,
    )
    limits = SchedulerLimits(
        max_context=info.max_context, slots=info.slots, eos_token_ids=frozenset(info.eos_token_ids)
    )
    return LoadedModel(Scheduler(profile, executor.capabilities, cache, limits), executor, info, prepared.grammars)
