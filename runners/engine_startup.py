"""From a profile to a running engine: resolve the source, load weights, size the KV pool, warm up."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections import Counter
from collections.abc import Callable
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
from runners.kv_cache.sizing import DeviceMemory, PoolSize, format_bytes, kv_block_bytes, size_pool
from runners.loading.sources import resolve_source, served_name
from runners.messages import ModelInfo
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import BlockAppend, DecodeRow, PlanKind, PrefillChunk, SlotInit, StepPlan
from runners.startup_checks import choose_device, context_in_pool, model_context

if TYPE_CHECKING:
    import torch

    from runners.loading.checkpoint import Checkpoint
    from runners.models.decoder import Decoder

logger = logging.getLogger("runners.engine_startup")

Report = Callable[[str, str, float | None], None]
"""Called with a phase, a detail, and the fraction done where it is known."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """One model, ready to serve."""

    scheduler: Scheduler
    executor: Executor
    info: ModelInfo
    grammars: GrammarCompiler | None = None


def load_engine(settings: EngineSettings, report: Report) -> LoadedEngine:
    """Load what the profile names. Raises StartupError, one line, when a file or setting is at fault."""
    if settings.profile.engine.executor == "simulated":
        engine = _load_simulated(settings.profile, report)
    else:
        engine = _load_torch(settings.profile, report)
    info = engine.info
    logger.info(
        "model %s (%s, %s, %.0fM parameters, %s of weights), profile %s, device %s, executor %s, "
        "KV %s = %d blocks of %d tokens = %.1f sequences of %d tokens",
        *(info.served_names[0], info.architecture, info.quantization, info.parameters / 1e6),
        *(format_bytes(info.weight_bytes), settings.profile_name, info.device, info.executor),
        *(format_bytes(info.kv_bytes), info.total_blocks, info.block_tokens, info.peak_concurrency, info.max_context),
    )
    return engine


# --- simulated -----------------------------------------------------------------------------------------------------


def _load_simulated(profile: Profile, report: Report) -> LoadedEngine:
    """No weights are read; the source is resolved because the HTTP process takes the tokenizer from it."""
    settings = profile.simulated
    model = profile.models[0]
    path = resolve_source(model.source, report).resolve()
    if settings.cost_model is not None:
        cost_model = CostModel.load(Path(settings.cost_model))
    else:
        cost_model = CostModel.constant(settings.step_us / 1e6)
    max_context = settings.max_context if model.max_context == "auto" else min(model.max_context, settings.max_context)
    pool = _size_simulated_pool(profile, max_context)
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
        block_tokens=pool.block_tokens,
        total_blocks=pool.num_blocks,
        kv_bytes=0,
        peak_concurrency=pool.peak_concurrency,
    )
    executor = SimulatedExecutor(cost_model, RealTimeClock(), vocab_size=settings.vocab_size)
    return _assemble(profile, executor, info)


def _size_simulated_pool(profile: Profile, max_context: int) -> PoolSize:
    """Blocks and sequences count as they stand; where bytes would decide, every slot gets a whole context."""
    pool = profile.kv.pool
    sequences = pool.sequences if pool.blocks is None else None
    if pool.blocks is None and sequences is None:
        sequences = profile.engine.slots
    return size_pool(
        block_bytes=0,
        block_tokens=profile.kv.block_tokens,
        max_context=max_context,
        blocks=pool.blocks,
        sequences=sequences,
    )


# --- torch ---------------------------------------------------------------------------------------------------------


def _load_torch(profile: Profile, report: Report) -> LoadedEngine:
    model = profile.models[0]
    path = resolve_source(model.source, report).resolve()
    report("loading", path.name, None)
    import torch

    from runners.loading.checkpoint import open_checkpoint
    from runners.models.builder import build_decoder
    from runners.text.assets import load_text, read_end_tokens

    _use_cores(profile)
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
    report("warming", names_of(model)[0], None)
    is_cuda = _takes_cuda_executor(profile.engine.executor, device)
    make_executor = _make_cuda_executor if is_cuda else _make_torch_executor
    executor, pool = make_executor(profile, decoder, max_context, eos_token_ids, grammars)
    info = ModelInfo(
        served_names=names_of(model),
        source=model.source,
        path=str(path),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_context=max_context,
        eos_token_ids=eos_token_ids,
        dtype=str(decoder.dtype).removeprefix("torch."),
        quantization=_stored_form(checkpoint) if model.quantization == "auto" else "none",
        parameters=sum(math.prod(checkpoint.get(name).shape) for name in checkpoint.names()),
        weight_bytes=decoder.weight_bytes,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        executor="cuda" if is_cuda else "torch",
        slots=profile.engine.slots,
        block_tokens=pool.block_tokens,
        total_blocks=pool.num_blocks,
        kv_bytes=pool.pool_bytes,
        peak_concurrency=pool.peak_concurrency,
    )
    _warm_up(executor)
    return _assemble(profile, executor, info, grammars)


def _takes_cuda_executor(name: str, device: torch.device) -> bool:
    """StartupError where the `cuda` executor is asked for by name on another device, or without Triton."""
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "cuda" and (device.type != "cuda" or not has_triton):
        reason = "Triton is not installed" if device.type == "cuda" else f"the device is {device}"
        raise StartupError(f"engine.executor: cuda needs a CUDA device and Triton, but {reason}")
    return name in ("cuda", "auto") and device.type == "cuda" and has_triton


def _make_torch_executor(
    profile: Profile, decoder: Decoder, max_context: int, eos_token_ids: list[int], grammars: GrammarCompiler
) -> tuple[Executor, PoolSize]:
    from runners.execution.torch_executor import TorchExecutor
    from runners.kv_cache.device_cache import DeviceCache, device_memory

    pool = _size_pool(profile, decoder, max_context, device_memory(decoder.device))
    cache = DeviceCache(decoder.config, pool.num_blocks, pool.block_tokens, decoder.dtype, decoder.device)
    executor = TorchExecutor(
        decoder,
        cache,
        slots=profile.engine.slots,
        max_context=max_context,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
    )
    return executor, pool


def _make_cuda_executor(
    profile: Profile, decoder: Decoder, max_context: int, eos_token_ids: list[int], grammars: GrammarCompiler
) -> tuple[Executor, PoolSize]:
    from runners.execution.cuda_loading import load_cuda_executor

    slots = profile.engine.slots
    # A prompt without cursor goes in one pass; waves and mixed steps have budgets of their own.
    longest_prompt = min(max_context, profile.chunk.tokens or profile.wave.max_rows, profile.wave.max_rows)
    wave_tokens = profile.wave.sub_wave * profile.wave.max_prompt_tokens
    return load_cuda_executor(
        decoder,
        lambda memory: _size_pool(profile, decoder, max_context, memory),
        slots=slots,
        max_context=max_context,
        max_step_tokens=max(longest_prompt, min(wave_tokens, profile.wave.max_rows), profile.mix.token_budget + slots),
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        capture_at_start=profile.decode.capture_at_start == "common",
        batch_invariant=profile.decode.batch_invariant,
    )


def _size_pool(profile: Profile, decoder: Decoder, max_context: int, memory: DeviceMemory | None) -> PoolSize:
    return size_pool(
        block_bytes=kv_block_bytes(decoder.config, profile.kv.block_tokens, decoder.dtype.itemsize),
        block_tokens=profile.kv.block_tokens,
        max_context=max_context,
        memory=memory,
        **profile.kv.pool.model_dump(),
    )


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


def names_of(model: ModelSection) -> list[str]:
    """The names requests may use for a model."""
    return list(model.served_names) or [served_name(model.source)]


def _assemble(
    profile: Profile, executor: Executor, info: ModelInfo, grammars: GrammarCompiler | None = None
) -> LoadedEngine:
    usable_blocks = min(info.total_blocks, profile.kv.quota_blocks or info.total_blocks)
    max_context = context_in_pool(profile.models[0].max_context, info.max_context, usable_blocks, info.block_tokens)
    peak_concurrency = info.total_blocks / -(-max_context // info.block_tokens)
    info = msgspec.structs.replace(info, max_context=max_context, peak_concurrency=peak_concurrency)
    cache = CacheManager(
        info.total_blocks,
        info.block_tokens,
        prefix_cache=profile.kv.prefix_cache,
        shared_by_keys=profile.kv.prefix_cache_scope == "server",
        session_ttl_s=profile.kv.session_ttl_s,
        quota_blocks=profile.kv.quota_blocks,
    )
    limits = SchedulerLimits(
        max_context=info.max_context, slots=info.slots, eos_token_ids=frozenset(info.eos_token_ids)
    )
    return LoadedEngine(Scheduler(profile, executor.capabilities, cache, limits), executor, info, grammars)
