"""From a profile to running models: resolve the source, load weights, place them in a KV pool, warm up."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from configs.schema import ModelSection, Profile
from runners.engine_settings import EngineSettings
from runners.errors import StartupError
from runners.execution.cost_model import CostModel
from runners.execution.executor import Executor
from runners.execution.simulated import RealTimeClock, SimulatedExecutor
from runners.grammar.compiler import GrammarCompiler
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.kv_budget import KvBudget
from runners.kv_cache.pools import EnginePools, Pool, PoolNeed
from runners.kv_cache.sizing import DeviceMemory, PoolSize, format_bytes, kv_block_bytes, size_pool
from runners.loading.sources import resolve_source
from runners.messages import ModelInfo
from runners.model_names import check_names, names_of
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import BlockAppend, DecodeRow, PlanKind, PrefillChunk, SlotInit, StepPlan
from runners.startup_checks import choose_device, context_in_pool, model_context

if TYPE_CHECKING:
    import torch

    from runners.execution.device_streams import CudaStreams
    from runners.loading.checkpoint import Checkpoint
    from runners.models.decoder import Decoder

logger = logging.getLogger("runners.engine_startup")

Report = Callable[[str, str, float | None], None]
"""Called with a phase, a detail, and the fraction done where it is known."""

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


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose weights are there; what it still needs is a pool and an executor. `decoder` is None where the
    executor is simulated; `info` lacks what only the pool decides."""

    section: ModelSection
    info: ModelInfo
    decoder: Decoder | None = None
    grammars: GrammarCompiler | None = None


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
            _use_cores(self._profile)
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
            return _prepare_simulated(self._profile, model, report)
        return _prepare_torch(self._profile, model, report)

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
        except BaseException:
            self._pools.leave(info.served_names[0])
            raise
        if decoder is not None:
            _warm_up(executor)
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


# --- simulated -----------------------------------------------------------------------------------------------------


def _prepare_simulated(profile: Profile, model: ModelSection, report: Report) -> PreparedModel:
    """No weights are read; the source is resolved because the HTTP process takes the tokenizer from it."""
    settings = profile.simulated
    path = resolve_source(model.source, report).resolve()
    max_context = settings.max_context if model.max_context == "auto" else min(model.max_context, settings.max_context)
    info = ModelInfo(
        served_names=names_of(model),
        source=model.source,
        path=str(path),
        architecture="simulated",
        vocab_size=settings.vocab_size,
        max_context=max_context,
        eos_token_ids=[],  # tokens are made up: none of them means that a text ends
        dtype="none",
        quantization="none",
        parameters=0,
        weight_bytes=0,
        device="none",
        executor="simulated",
        slots=profile.engine.slots,
        block_tokens=profile.kv.block_tokens,
        total_blocks=0,
        kv_bytes=0,
        peak_concurrency=0.0,
        pooling=model.pooling,
    )
    return PreparedModel(model, info)


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


# --- torch ---------------------------------------------------------------------------------------------------------


def _prepare_torch(profile: Profile, model: ModelSection, report: Report) -> PreparedModel:
    path = resolve_source(model.source, report).resolve()
    report("loading", path.name, None)
    import torch

    from runners.loading.checkpoint import open_checkpoint
    from runners.models.builder import build_decoder
    from runners.text.assets import load_text, read_end_tokens

    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    device = choose_device(profile.engine.device)
    max_context = model_context(model.max_context, config.max_context)
    override = Path(model.tokenizer) if model.tokenizer is not None else None
    eos_token_ids = sorted(set(config.eos_token_ids) | read_end_tokens(path, override))
    decoder = build_decoder(
        checkpoint, dtype=model.dtype, device=device, quantization=model.quantization, max_context=max_context
    )
    grammars = GrammarCompiler(lambda: load_text(path, override).tokenizer, config.vocab_size, eos_token_ids)
    info = ModelInfo(
        served_names=names_of(model),
        source=model.source,
        path=str(path),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_context=max_context,
        eos_token_ids=eos_token_ids,
        dtype=str(decoder.dtype).removeprefix("torch."),
        quantization=_stored_form(checkpoint) if model.quantization == "auto" else model.quantization,
        parameters=sum(math.prod(checkpoint.get(name).shape) for name in checkpoint.names()),
        weight_bytes=decoder.weight_bytes,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        executor="cuda" if _takes_cuda_executor(profile.engine.executor, device) else "torch",
        slots=profile.engine.slots,
        block_tokens=profile.kv.block_tokens,
        total_blocks=0,
        kv_bytes=0,
        peak_concurrency=0.0,
        pooling=model.pooling,
    )
    return PreparedModel(model, info, decoder, grammars)


def _takes_cuda_executor(name: str, device: torch.device) -> bool:
    """StartupError where the `cuda` executor is asked for by name on another device, or without Triton."""
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "cuda" and (device.type != "cuda" or not has_triton):
        reason = "Triton is not installed" if device.type == "cuda" else f"the device is {device}"
        raise StartupError(f"engine.executor: cuda needs a CUDA device and Triton, but {reason}")
    return name in ("cuda", "auto") and device.type == "cuda" and has_triton


def _use_cores(profile: Profile) -> None:
    """As many threads as the profile grants; fewer than there are cores: also keep to that many of them."""
    import torch

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    wanted = len(cores) if profile.engine.cpu_cores == "auto" else min(profile.engine.cpu_cores, len(cores))
    if wanted < len(cores) and hasattr(os, "sched_setaffinity"):
        # The last ones: the first is where interrupts and whoever asks for one core end up.
        os.sched_setaffinity(0, cores[-wanted:])
    torch.set_num_threads(wanted)
    torch.set_num_interop_threads(1)


def _stored_form(checkpoint: Checkpoint) -> str:
    """The type that most weight bytes have in the file: `q4_1`, `bf16` …"""
    num_bytes: Counter[str] = Counter()
    for name in checkpoint.names():
        tensor = checkpoint.get(name)
        if len(tensor.shape) == 2:
            num_bytes[tensor.ggml_type.name.lower()] += tensor.nbytes
    return num_bytes.most_common(1)[0][0]


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
